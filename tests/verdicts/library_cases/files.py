"""Files that the cases read: images, sounds, films and boxes, all small and of known content."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

COUNT = 8
"""The samples of each case."""


def pixels(index: int, side: int = 32) -> np.ndarray[Any, Any]:
    """Return an RGB image, uint8[side, side, 3]."""
    image = np.full((side, side, 3), index * 20 % 256, np.uint8)
    image[..., 1] = np.arange(side)
    return image


def encoded(index: int, side: int = 32, format: str = "JPEG") -> bytes:
    """Return the bytes of an image file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels(index, side)).save(file, format=format)
    return file.getvalue()


def image_folder(root: Path, suffix: str = "jpg") -> Path:
    """Write a tree with one folder for each of two classes, and return its root."""
    kind = {"jpg": "JPEG", "png": "PNG"}[suffix]
    for index in range(COUNT):
        path = root / "images" / ("cat", "dog")[index % 2] / f"{index}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(index, format=kind))
    return root / "images"


def wave(index: int, length: int = 800) -> np.ndarray[Any, Any]:
    """Return a sound, float32[length]."""
    return np.sin(np.arange(length, dtype=np.float32) * (index + 1) / 50) / 2


def texts() -> list[str]:
    """Return texts of a few words."""
    return [
        " ".join(f"w{(index + k) % 20}" for k in range(3 + index % 3)) for index in range(COUNT)
    ]
