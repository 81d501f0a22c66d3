"""Small JPEGs of any colours, and the list of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def listed_images(folder: Path, count: int, *, classes: int = 2) -> Path:
    """Write `count` images into folders of classes. Return `list.txt` beside these, with paths relative to it."""
    names = [f"class{number % classes}/{number}.jpg" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    listing = folder / "list.txt"
    listing.write_text("\n".join(names) + "\n")
    return listing
