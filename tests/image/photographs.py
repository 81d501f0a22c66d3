"""Real photographs for tests, where an installed package brings some; else fastload's synthetic ones."""

from __future__ import annotations

import io
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fastload.datasets.synthetic import generate_images

Pixels = NDArray[np.uint8]


@lru_cache(maxsize=1)
def photographs() -> dict[str, Pixels]:
    """At least three images by name, uint8[H, W, 3]; not to be written to."""
    found: dict[str, Pixels] = {}
    try:
        import skimage.data

        found |= {name: getattr(skimage.data, name)() for name in ("astronaut", "chelsea")}
    except (ImportError, OSError):
        pass  # the package is absent, or came without its images
    try:
        from sklearn.datasets import load_sample_images

        found["china"] = load_sample_images()["images"][0]
    except (ImportError, OSError):
        pass
    if len(found) < 3:
        with tempfile.TemporaryDirectory() as folder:
            file_list = generate_images(folder, count=3, workers=1)
            for line in file_list.read_text().split():
                with Image.open(Path(folder, line)) as image:
                    found[f"synthetic {Path(line).name}"] = np.array(image.convert("RGB"))
    for pixels in found.values():
        pixels.flags.writeable = False
    return found


def encoded(image: Any, kind: str = "JPEG", **options: Any) -> bytes:
    """`image`, Pillow's or an array, in a file format by Pillow."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
