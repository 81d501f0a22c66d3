"""`backbone`: a network of torchvision without its head."""

from __future__ import annotations

import os
import pickle
from typing import Any, Literal
from urllib.error import URLError

import torch
from torch import nn

from fastload.errors import UsageError

_HEADS = ("fc", "classifier", "heads", "head")


def backbone(
    name: str = "resnet50",
    *,
    weights: str | os.PathLike[str],
    layout: Literal["pooled", "flat"] = "pooled",
    seed: int = 0,
) -> nn.Module:
    """Return a classification network of torchvision without its head: images to float32[batch, features].

    Args:
        name: name of the network, such as "resnet50" or "vit_b_16".
        weights: path of a file with its `state_dict()`, with or without the head. "default": torchvision's best
            weights, which torch downloads once into its own folder. "random": untrained weights, only for tests.
        layout: "pooled": the mean over the last feature map, 2,048 numbers for "resnet50". "flat": all of that map,
            by channel, row and column, 2,048 x 7 x 7 = 100,352 numbers for an image of 224 pixels.
        seed: seed of random weights.

    Raises:
        UsageError: torchvision does not have the network, it has no such layout, or the weights do not fit or cannot be
            downloaded.

    Examples:
        >>> network = fastload.store.backbone("resnet18", weights="random")
        >>> network(torch.zeros(2, 3, 64, 64)).shape  # (N, C, H, W) to (N, features)
        torch.Size([2, 512])
    """
    if layout not in ("pooled", "flat"):
        raise UsageError(f'layout must be "pooled" or "flat", got {layout!r}')
    network = _network(name, weights, seed)
    head = next(
        (found for found in _HEADS if isinstance(getattr(network, found, None), nn.Module)), None
    )
    if head is None:
        raise UsageError(
            f"fastload cannot remove the head of {name!r}. Remove it yourself, and pass the network as model"
        )
    setattr(network, head, nn.Identity())
    if layout == "flat":
        if not isinstance(getattr(network, "avgpool", None), nn.Module):
            raise UsageError(
                f'{name!r} has no layer "avgpool", so it has no flat layout. Choose "pooled"'
            )
        network.avgpool = nn.Identity()
    if weights not in ("default", "random"):
        _load(network, name, head, weights)
    return nn.Sequential(network, nn.Flatten(1)).eval()


def _network(name: str, weights: str | os.PathLike[str], seed: int) -> nn.Module:
    from fastload.train.models import build_model

    # Without memory if the weights come from elsewhere: then this only says what is wrong with the name.
    with torch.random.fork_rng(devices=[]), torch.device("meta" if weights == "default" else "cpu"):
        torch.manual_seed(seed)
        network = build_model(name, classes=1000)
    if weights != "default":
        return network
    from torchvision import models

    try:
        found: nn.Module = models.get_model(name, weights="DEFAULT")
    except (URLError, TimeoutError, ConnectionError, ValueError) as error:
        raise UsageError(
            f"the weights of {name!r} cannot be downloaded ({error}). Give a file that "
            "torch.save(model.state_dict(), file) wrote, or 'random' for tests"
        ) from error
    return found


def _load(network: nn.Module, name: str, head: str, path: str | os.PathLike[str]) -> None:
    """Load the weights of a file, except those of the head. Raise UsageError if they do not fit."""
    from fastload.train.models import mismatch

    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise UsageError(
            f"{os.fspath(path)} is not a file of weights: {error}".splitlines()[0]
        ) from error
    if isinstance(found, dict):
        others = f"{head}.", "aux", "AuxLogits"
        found = {key: value for key, value in found.items() if not str(key).startswith(others)}
    if difference := mismatch(network.state_dict(), found, here=f"{name!r}"):
        raise UsageError(f"{os.fspath(path)}: {difference}. Give weights of {name!r}")
    network.load_state_dict(found)
