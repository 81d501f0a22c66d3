"""What is trained: a model and its optimiser on a device, and one step of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastload.distributed import Rank, device_of
from fastload.image import normalize_on
from fastload.measure.loop_timer import GradientTraffic
from fastload.train.models import TINY, build_model
from fastload.train.recipe import Precision, Recipe, TrainError


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A model that learns. `model` has the parameters, `forward` is how to call it (across ranks, compiled)."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[[torch.Tensor], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    prepare: Callable[[torch.Tensor], torch.Tensor]
    """What makes the model's input of a batch of pictures on the device."""
    device: torch.device
    precision: Precision = "fp32"
    traffic: GradientTraffic | None = None
    about: dict[str, Any]
    """What a checkpoint must have in common with this."""

    def step(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Learn from a batch; its loss, a tensor on the device that nobody has waited for."""
        half = self.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            loss = self.loss(self.forward(self.prepare(images)), targets)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


def open_learner(recipe: Recipe, rank: Rank, *, classes: int) -> Learner:
    """The recipe's model with SGD and cross-entropy, as in the tutorial; over more ranks than one by DDP."""
    device = choose_device(recipe.device, rank)
    if recipe.step_ms and device.type != "cpu":
        raise TrainError(
            f"--step-ms stands in for an accelerator, and this runs on one ({device}): leave it out, or give "
            "--device cpu"
        )
    _set_precision(recipe.precision)
    name = recipe.model
    if name is None:
        name = TINY if device.type == "cpu" else "resnet50"
    outputs = recipe.classes or classes
    if outputs < classes:
        raise TrainError(
            f"--classes {outputs}: the dataset has {classes} classes; give as many or more"
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
        about={
            "model": name,
            "outputs": outputs,
            "lr": recipe.lr,
            "momentum": recipe.momentum,
        },
    )


def across_ranks(
    model: nn.Module, rank: Rank, device: torch.device
) -> tuple[nn.Module, GradientTraffic | None]:
    """The model wrapped in DDP, and what times its traffic; with one rank the model itself, and None."""
    if rank.world_size == 1:
        return model, None
    wrapped = DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device])
    return wrapped, GradientTraffic(wrapped, device)


def choose_device(name: str, rank: Rank) -> torch.device:
    """The device of a rank: with "auto" an accelerator of its own where there is one, else the CPU.

    Raises `TrainError` for a device that is not there, `RankError` if a node has fewer accelerators than ranks.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        if found is None:
            return torch.device("cpu")
        name = found.type
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TrainError(
            f"--device {name}: torch knows no such device; use auto, cpu or cuda"
        ) from error
    if device.type == "cpu":
        if ":" in name:
            raise TrainError(f"--device {name}: the CPU has no numbers; use --device cpu")
        return device
    if found is None or found.type != device.type:
        here = f"only {found.type}" if found else "no accelerator"
        raise TrainError(f"--device {name}: torch sees {here} here; use --device auto or cpu")
    count = torch.accelerator.device_count()
    if ":" not in name:
        device = torch.device(device.type, device_of(rank, count))
    elif device.index >= count:
        raise TrainError(
            f"--device {name}: torch sees {count} {device.type} devices here, numbered from 0; use one of them"
        )
    torch.accelerator.set_device_index(device.index)
    return device


def _set_precision(precision: Precision) -> None:
    """Let float32 be what the recipe says, in convolutions too, where torch alone would round to TF32."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if torch.cuda.is_available():
        torch.backends.cudnn.allow_tf32 = precision == "tf32"


def describe(learner: Learner, *, weights: Path | None, simulated: bool) -> str:
    """The model in words: which, how large, and why this one where nobody chose."""
    parameters = sum(parameter.numel() for parameter in learner.model.parameters())
    text = f"{learner.about['model']}, {parameters:,} parameters, {learner.precision}, on {learner.device}"
    text += ", random at first" if weights is None else f", from {weights}"
    if learner.about["model"] == TINY:
        text += "; a stand-in that is small enough for a CPU, not ResNet-50"
    return text + ("; its step is filled up by a simulated one" if simulated else "")
