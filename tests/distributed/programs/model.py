"""A small model without batch statistics, its global batches and ten steps: the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

STEPS, GLOBAL_BATCH = 10, 16
Batch = tuple[torch.Tensor, ...]


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)
    )


def global_batch(step: int) -> Batch:
    """Images float32[16, 3, 8, 8] and classes int64[16] of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    images = torch.randn(GLOBAL_BATCH, 3, 8, 8, generator=generator)
    return images, torch.randint(5, (GLOBAL_BATCH,), generator=generator)


def train(net: nn.Module, batch_of: Callable[[int], Batch]) -> None:
    """Ten steps of SGD with momentum on the mean loss of the batches that `batch_of(step)` gives."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        images, classes = batch_of(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), classes).backward()
        optimizer.step()
