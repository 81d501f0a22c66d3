"""Encoders of images as JPEG."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def encode_jpeg(ycbcr: NDArray[np.uint8], *, quality: int) -> bytes:
    """Encode `ycbcr`, uint8[3, H, W] of luma and the two chroma planes, as a JPEG.

    `quality` is libjpeg's, 1 to 95. Chroma is stored at half the resolution (4:2:0), as most
    photographs are. The same planes give the same bytes with the same version of Pillow.
    """
    return _encoded(Image.merge("YCbCr", [Image.fromarray(plane) for plane in ycbcr]), quality)


def encode_rgb(pixels: NDArray[np.uint8], *, quality: int) -> bytes:
    """Encode `pixels`, uint8[H, W, 3] in RGB, as `encode_jpeg` does."""
    return _encoded(Image.fromarray(pixels), quality)


def _encoded(image: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()
