"""Models to train: fastload's own small one, or one of torchvision's."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastload.errors import UsageError

TINY = "tiny"


class ModelError(UsageError):
    """A model, or a file of weights, cannot be used as asked; the message names it and what to do."""


class TinyConvNet(nn.Module):
    """A convolutional network small enough to train on a laptop: float32[N, 3, H, W] to float32[N, classes].

    Any H and W. It has no batch statistics, so that N ranks with batches of B learn what one rank with
    batches of N x B learns.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, kernel_size=8, stride=8, padding=4),
            nn.ReLU(),
            nn.Conv2d(8, 16, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(16, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores of a batch."""
        scores: torch.Tensor = self.head(self.features(images))
        return scores


def build_model(name: str, *, classes: int, weights: Path | None = None) -> nn.Module:
    """The model of that name, with random parameters or those of a file; nothing is looked for on a network.

    Args:
        name: "tiny", or the name of a classification model of torchvision ("resnet50", "vit_b_16").
        classes: how many outputs it has.
        weights: a file that `torch.save(model.state_dict(), file)` wrote.

    Raises `ModelError` for a name that is not known, and for weights that do not fit.
    """
    model = TinyConvNet(classes) if name == TINY else _of_torchvision(name, classes)
    if weights is not None:
        _load_weights(model, name, weights)
    return model


def _of_torchvision(name: str, classes: int) -> nn.Module:
    if importlib.util.find_spec("torchvision") is None:
        raise ModelError(
            f"model {name!r} is torchvision's, which is not installed: pip install 'fastload[images]', or "
            f"use --model {TINY}"
        )
    from torchvision import models

    if name not in models.list_models(module=models):
        raise ModelError(
            f"{name!r} is no model: expected {TINY!r}, or the name of a classification model of torchvision's, such "
            "as 'resnet50'"
        )
    # GoogLeNet and Inception give a tuple while they train, and would warn of how they begin.
    options: dict[str, Any] = (
        {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    )
    model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **options)
    return model


def _load_weights(model: nn.Module, name: str, path: Path) -> None:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ModelError(f"{path}: no file of weights: {error}".splitlines()[0]) from error
    if difference := mismatch(model.state_dict(), found, here=f"model {name!r}"):
        raise ModelError(f"{path}: {difference}")
    model.load_state_dict(found)


def mismatch(ours: dict[str, Any], theirs: Any, *, here: str) -> str | None:
    """The first thing in which the parameters of a file are others than a model's, in words; None if they fit."""
    if not isinstance(theirs, dict):
        return f"expected a state_dict, found a {type(theirs).__name__}"
    for name, value in ours.items():
        if name not in theirs:
            return f"{name}: the file has nothing, {here} has {tuple(value.shape)}"
        shape = tuple(getattr(theirs[name], "shape", ()))
        if shape != tuple(value.shape):
            return f"{name}: the file has {shape}, {here} has {tuple(value.shape)}"
    if more := next((name for name in theirs if name not in ours), None):
        return (
            f"{more}: the file has {tuple(getattr(theirs[more], 'shape', ()))}, {here} has nothing"
        )
    return None
