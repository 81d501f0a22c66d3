"""Conversion of pixels from 0 to 255 to a model's floats, for a sample or for a whole batch on its device."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def normalize_on(
    device: str | torch.device,
    *,
    mean: tuple[float, float, float] = IMAGENET_MEAN,
    std: tuple[float, float, float] = IMAGENET_STD,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that copies images to `device`, and there computes `(pixel / 255 - mean) / std`.

    It takes uint8 of shape (N, 3, H, W), and returns `dtype` of the same shape. It copies a quarter of the bytes of a
    float32 batch, and the CPU does none of the arithmetic. From pinned memory the copy does not block. In float32 the
    result equals torchvision's ToTensor and Normalize within 1e-6.

    Args:
        device: device to copy to.
        mean, std: mean and standard deviation of each channel, on the scale of 0 to 1.
        dtype: dtype of the result.
        channels_last: let the result lie in channels-last memory. It does so too if the batch does (`memory_format` of
            the loader).

    Examples:
        >>> normalize = fastload.image.normalize_on("cpu")
        >>> for images, labels in loader:
        ...     images = normalize(images)
    """
    factor, shift = factor_and_shift(channels("mean", mean), channels("std", std))
    factor, shift = factor.to(device), shift.to(device)
    memory = torch.channels_last if channels_last else torch.preserve_format

    def normalize(images: torch.Tensor) -> torch.Tensor:
        if images.dtype is not torch.uint8 or images.dim() < 3 or images.shape[-3] != 3:
            raise ValueError(
                f"expected uint8[N, 3, H, W], got {images.dtype} {list(images.shape)}. Give the images of a plan "
                "without mean and std"
            )
        there = images.to(device, non_blocking=True).to(torch.float32, memory_format=memory)
        return there.mul_(factor).sub_(shift).to(dtype)

    return normalize


@lru_cache(maxsize=64)
def factor_and_shift(mean: Any, std: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (factor, shift), float32[3, 1, 1]: (x / 255 - mean) / std = x * factor - shift."""
    deviation = torch.tensor(std, dtype=torch.float64, device="cpu").view(3, 1, 1)
    shift = torch.tensor(mean, dtype=torch.float64, device="cpu").view(3, 1, 1) / deviation
    return (1 / (255 * deviation)).float(), shift.float()


def channels(name: str, values: Any) -> tuple[float, float, float]:
    """Return `values` as three finite numbers, above 0 for "std". Raises ValueError, which names the argument."""
    red, green, blue = numbers(name, values, 3)
    if name == "std" and min(red, green, blue) <= 0:
        raise ValueError(f"std must be above 0 for each channel, got {values!r}")
    return red, green, blue


def numbers(name: str, values: Any, count: int) -> tuple[float, ...]:
    """Return `values` as `count` finite numbers. Raises ValueError, which names the argument."""
    try:
        found = tuple(float(v) for v in values)
    except (TypeError, ValueError):
        found = ()
    if len(found) != count or not all(map(math.isfinite, found)):
        raise ValueError(f"{name} must be {count} finite numbers, got {values!r}")
    return found
