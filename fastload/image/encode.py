"""Encoders of images as JPEG."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def encode_jpeg(ycbcr: NDArray[np.uint8], *, quality: int) -> bytes:
    """Return `ycbcr` as a JPEG.

    Chroma is stored at half the resolution (4:2:0), as most photographs are. The same planes give the same bytes with
    the same version of Pillow.

    Args:
        ycbcr: luma and the two chroma planes, uint8 of shape (3, H, W).
        quality: libjpeg's quality, 1 to 95.

    Examples:
        >>> planes = np.full((3, 32, 48), 128, np.uint8)
        >>> fastload.image.encode_jpeg(planes, quality=90)[:2]
        b'\\xff\\xd8'
    """
    return _encoded(Image.merge("YCbCr", [Image.fromarray(plane) for plane in ycbcr]), quality)


def encode_rgb(pixels: NDArray[np.uint8], *, quality: int) -> bytes:
    """Return `pixels` as a JPEG, as `encode_jpeg` does.

    Args:
        pixels: RGB, uint8 of shape (H, W, 3).
        quality: libjpeg's quality, 1 to 95.

    Examples:
        >>> encoded = fastload.image.encode_rgb(np.zeros((32, 48, 3), np.uint8), quality=90)
        >>> fastload.image.decode_pixels(encoded, name="black").shape
        (32, 48, 3)
    """
    return _encoded(Image.fromarray(pixels), quality)


def _encoded(image: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()
