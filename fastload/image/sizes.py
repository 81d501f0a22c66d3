"""The sizes of images and boxes: torchvision's arithmetic, and the checks of a plan's arguments."""

from __future__ import annotations

import math
import operator
from functools import lru_cache
from typing import Any

import torch
from PIL import Image

Size = int | tuple[int, int]


def sides(area: float, log_of_ratio: float) -> tuple[int, int]:
    """Return the rounded width and height of a box of `area` pixels. `log_of_ratio` is a float32, as in torchvision."""
    # torch's exp: another one may differ in the last bit, and round a side to another number.
    ratio = float(torch.tensor(log_of_ratio, dtype=torch.float32, device="cpu").exp_().item())
    return round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))


@lru_cache(maxsize=64)
def log_ratio(ratio: tuple[float, float]) -> tuple[float, float]:
    """Return the logarithms of the bounds, as float32."""
    # In float32, as torchvision. Not in the default dtype and device: a user may set these, and the result is cached.
    low, high = torch.tensor(ratio, dtype=torch.float32, device="cpu").log_().tolist()
    return low, high


def resized(height: int, width: int, size: Size) -> tuple[int, int]:
    """Return the size that torchvision gives. A number is the shorter side; the longer one is rounded down.

    Raises ValueError if an image is so narrow that the result has more pixels than the limit.
    """
    if isinstance(size, tuple):
        return size
    longer = int(size * max(height, width) / min(height, width))
    resized = (longer, size) if width <= height else (size, longer)
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and longer * size > 2 * limit:
        raise ValueError(
            f"{width} x {height} pixels, resized: {resized[1]} x {resized[0]} pixels, more than twice "
            f"PIL.Image.MAX_IMAGE_PIXELS ({limit}). Raise that limit if you trust the file"
        )
    return resized


def set_size(plan: object, name: str, size: Any) -> None:
    """Check a size argument of a frozen plan, and set it as integers. Raises ValueError."""
    sides = size if isinstance(size, tuple | list) else (size,)
    try:
        whole = tuple(operator.index(s) for s in sides if not isinstance(s, bool))
    except TypeError:
        whole = ()
    if len(whole) != len(sides) or len(whole) not in (1, 2) or min(whole) < 1:
        raise ValueError(f"{name} must be a number of pixels or (height, width), got {size!r}")
    object.__setattr__(plan, name, whole if len(whole) == 2 else whole[0])


def pair(size: Size) -> tuple[int, int]:
    """Return height and width. One number stands for both."""
    return size if isinstance(size, tuple) else (size, size)


def check_share(name: str, share: float) -> None:
    """Raise ValueError unless `share` is a probability."""
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"{name} must be a probability from 0 to 1, got {share!r}")
