"""A model with its optimiser on a device, and one training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastload.distributed import Rank
from fastload.image import normalize_on
from fastload.measure.loop_timer import GradientTraffic
from fastload.train.devices import choose_device
from fastload.train.models import TINY, build_model
from fastload.train.recipe import Precision, Recipe, TrainError


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A model in training. `model` has the parameters. `forward` is the function to call (DDP, compiled)."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[[torch.Tensor], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    prepare: Callable[[torch.Tensor], torch.Tensor]
    """Turns a batch of images on the device into the input of the model."""
    device: torch.device
    precision: Precision = "fp32"
    traffic: GradientTraffic | None = None
    about: dict[str, Any]
    """Settings that a checkpoint must share with this run."""

    def step(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Train on a batch, and return its loss, a tensor on the device. Do not wait for the device."""
        half = self.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            loss = self.loss(self.forward(self.prepare(images)), targets)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


def open_learner(recipe: Recipe, rank: Rank, *, classes: int) -> Learner:
    """Return the recipe's model with SGD and cross-entropy, as in the tutorial. Use DDP if there are several ranks."""
    device = choose_device(recipe.device, rank)
    if recipe.step_ms and device.type != "cpu":
        raise TrainError(
            f"--step-ms simulates an accelerator, but this run uses one ({device}). Remove --step-ms, or give "
            "--device cpu"
        )
    _set_precision(recipe.precision)
    name = recipe.model
    if name is None:
        name = TINY if device.type == "cpu" else "resnet50"
    outputs = recipe.classes or classes
    if outputs < classes:
        raise TrainError(
            f"--classes {outputs} is too small: the dataset has {classes} classes. Give {classes} or more"
        )
    model = build_model(name, classes=outputs, weights=recipe.weights).to(device)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)
    model.train()
    across, traffic = across_ranks(model, rank, device)
    return Learner(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum),
        forward=torch.compile(across) if recipe.compile else across,
        loss=nn.CrossEntropyLoss(),
        prepare=normalize_on(device, channels_last=recipe.channels_last),
        device=device,
        precision=recipe.precision,
        traffic=traffic,
        about={"model": name, "outputs": outputs, "lr": recipe.lr, "momentum": recipe.momentum},
    )


def across_ranks(
    model: nn.Module, rank: Rank, device: torch.device
) -> tuple[nn.Module, GradientTraffic | None]:
    """Return the model wrapped in DDP and the timer of its traffic. With one rank, return the model itself and None."""
    if rank.world_size == 1:
        return model, None
    wrapped = DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device])
    return wrapped, GradientTraffic(wrapped, device)


def _set_precision(precision: Precision) -> None:
    """Set the precision of float32 products. Without this, torch would use TF32 in convolutions."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if torch.cuda.is_available():
        torch.backends.cudnn.allow_tf32 = precision == "tf32"


def describe(learner: Learner, *, weights: Path | None, simulated: bool) -> str:
    """Describe the model: its name, its size, and why it was chosen."""
    parameters = sum(parameter.numel() for parameter in learner.model.parameters())
    text = f"{learner.about['model']}, {parameters:,} parameters, {learner.precision}, on {learner.device}"
    text += ", initially random" if weights is None else f", from {weights}"
    if learner.about["model"] == TINY:
        text += "; a small model for the CPU instead of ResNet-50"
    return text + ("; a simulated accelerator makes its steps longer" if simulated else "")
