"""Encoders of images as JPEG."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

try:
    import simplejpeg
except ModuleNotFoundError:
    simplejpeg = None


def encode_jpeg(ycbcr: NDArray[np.uint8], *, quality: int) -> bytes:
    """Encode `ycbcr`, uint8[3, H, W] of luma and the two chroma planes, as a JPEG.

    `quality` is libjpeg's, 1 to 95. Chroma is stored at half the resolution (4:2:0), as most
    photographs are. The same planes give the same bytes with the same version of Pillow.
    """
    planes = [Image.fromarray(plane) for plane in ycbcr]
    buffer = io.BytesIO()
    Image.merge("YCbCr", planes).save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()


def encode_rgb(pixels: NDArray[np.uint8], *, quality: int) -> bytes:
    """Encode `pixels`, uint8[H, W, 3] in RGB, as a JPEG of libjpeg's `quality`, 1 to 95, chroma 4:2:0.

    It uses simplejpeg, which releases the GIL, or Pillow if simplejpeg is not installed. With the same library, the
    same pixels give the same bytes.
    """
    if simplejpeg is not None:
        encoded: bytes = simplejpeg.encode_jpeg(
            np.ascontiguousarray(pixels), quality=quality, colorspace="RGB", colorsubsampling="420"
        )
        return encoded
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()
