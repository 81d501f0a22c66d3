"""What recipes share: torchvision's decoder and transforms (v2), for loaders without their own, and a random box."""

from __future__ import annotations

import math
from pathlib import Path
from random import randint, uniform

import torch
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from benchmarks.recipes import SIZE

crop = v2.Compose([v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()])
"""uint8[3, H, W] -> uint8[3, 224, 224], a random part of it."""


def decode_file(path: str) -> torch.Tensor:
    """The image in a file, uint8[3, H, W]."""
    return decode_image(path, mode=ImageReadMode.RGB)


def decode(encoded: bytes) -> torch.Tensor:
    """The image in encoded bytes, uint8[3, H, W]."""
    return decode_image(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), ImageReadMode.RGB)


def encoded(path: str | Path) -> bytes:
    return Path(path).read_bytes()


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Left, top, width and height of a part, by the law of torchvision's RandomResizedCrop."""
    for _ in range(10):
        area = width * height * uniform(0.08, 1.0)
        ratio = math.exp(uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return randint(0, width - w), randint(0, height - h), w, h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (width - w) // 2, (height - h) // 2, w, h
