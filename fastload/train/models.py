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
    """Raised if a model or a file of weights cannot be used. The message names it and says what to do."""


class TinyConvNet(nn.Module):
    """A convolutional network small enough to train on a laptop: float32[N, 3, H, W] to float32[N, classes].

    H and W can be any size. It has no batch statistics, so N ranks with batches of B learn the same as one rank with
    batches of N x B.
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
        """Return the class scores of a batch."""
        scores: torch.Tensor = self.head(self.features(images))
        return scores


def build_model(name: str, *, classes: int, weights: Path | None = None) -> nn.Module:
    """Return the model of that name, with random parameters or those of a file. Download nothing.

    Args:
        name: "tiny", or the name of a classification model of torchvision ("resnet50", "vit_b_16").
        classes: number of outputs.
        weights: a file that `torch.save(model.state_dict(), file)` wrote.

    Raise `ModelError` if the name is unknown or the weights do not fit.
    """
    model = TinyConvNet(classes) if name == TINY else _of_torchvision(name, classes)
    if weights is not None:
        _load_weights(model, name, weights)
    return model


def _of_torchvision(name: str, classes: int) -> nn.Module:
    if importlib.util.find_spec("torchvision") is None:
        raise ModelError(
            f"model {name!r} needs torchvision, which is not installed. Run pip install 'torch-fastload[images]', or "
            f"use --model {TINY}"
        )
    from torchvision import models

    if name not in models.list_models(module=models):
        raise ModelError(
            f"model {name!r} is unknown. Give {TINY!r}, or the name of a classification model of torchvision, such "
            "as 'resnet50'"
        )
    # GoogLeNet and Inception return a tuple in training, and would warn about their initialisation.
    options: dict[str, Any] = (
        {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    )
    model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **options)
    return model


def _load_weights(model: nn.Module, name: str, path: Path) -> None:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ModelError(f"{path} is not a file of weights: {error}".splitlines()[0]) from error
    if difference := mismatch(model.state_dict(), found, here=f"model {name!r}"):
        raise ModelError(f"{path}: {difference}")
    model.load_state_dict(found)


def mismatch(ours: dict[str, Any], theirs: Any, *, here: str) -> str | None:
    """Describe the first parameter of a file that does not fit a model. Return None if all fit."""
    if not isinstance(theirs, dict):
        return f"expected a state_dict, found a {type(theirs).__name__}"
    for name, value in ours.items():
        if name not in theirs:
            return f"{name}: missing in the file, but {here} has {tuple(value.shape)}"
        shape = tuple(getattr(theirs[name], "shape", ()))
        if shape != tuple(value.shape):
            return f"{name}: the file has {shape}, but {here} has {tuple(value.shape)}"
    if more := next((name for name in theirs if name not in ours), None):
        return f"{more}: the file has {tuple(getattr(theirs[more], 'shape', ()))}, but {here} has no such parameter"
    return None
