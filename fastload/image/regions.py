"""Regions of pictures as values, and what makes pixels of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastload.image.decode import Pixels
from fastload.torch_private import resize_antialiased


class Box(NamedTuple):
    """A rectangle in pixels."""

    top: int
    left: int
    height: int
    width: int


class Region(NamedTuple):
    """What becomes of a picture: `box` of it is resized to `size` (height, width), of which `window` is kept.

    The window may reach beyond what it is cut from: there it is black, as torchvision's centre crop.
    """

    box: Box
    size: tuple[int, int]
    window: Box | None = None
    flip: bool = False


def scaled(region: Region, height: int, width: int, pixels: Pixels) -> Region:
    """`region` of a picture of `height` by `width` on `pixels`, which may be smaller: to the nearest pixel."""
    rows, columns = pixels.shape[:2]
    if (rows, columns) == (height, width):
        return region
    top, left, h, w = region.box
    first, last = round(top * rows / height), round((top + h) * rows / height)
    begin, end = round(left * columns / width), round((left + w) * columns / width)
    box = Box(first, begin, max(1, last - first), max(1, end - begin))
    return region._replace(box=box)


def resampled(pixels: Pixels, box: Box, size: tuple[int, int]) -> Pixels:
    """The box of `pixels`, resized: uint8[H, W, 3]. Where nothing is resized, it may be a view of `pixels`."""
    top, left, height, width = box
    part = pixels[top : top + height, left : left + width]
    # Of a side of 1, NumPy does not look at the stride, which may be negative; torch does.
    if not (part.flags.c_contiguous and part.flags.writeable) or min(part.strides) < 0:
        # For the kernel: it takes other strides too, by way of two more copies. Torch warns of what is
        # read-only.
        part = np.array(part, order="C")
    return part if (height, width) == size else resize_antialiased(part, size)


def windowed(image: Pixels, window: Box) -> Pixels:
    """The window of `image`, uint8[H, W, 3]: a view, or a copy on black where it reaches beyond."""
    top, left, height, width = window
    rows, columns = image.shape[:2]
    if top >= 0 and left >= 0 and top + height <= rows and left + width <= columns:
        return image[top : top + height, left : left + width]
    black = np.zeros((height, width, 3), np.uint8)
    y, x = max(0, -top), max(0, -left)
    part = image[max(0, top) : top + height, max(0, left) : left + width]
    black[y : y + part.shape[0], x : x + part.shape[1]] = part
    return black
