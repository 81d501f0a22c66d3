"""Regions of images as values, and functions that cut pixels by them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from fastload.image.decode import Pixels


class Box(NamedTuple):
    """A rectangle in pixels.

    Attributes:
        top, left: position of the corner.
        height, width: size of the rectangle.

    Examples:
        >>> fastload.image.Box(top=0, left=8, height=32, width=32).width
        32
    """

    top: int
    left: int
    height: int
    width: int


class Region(NamedTuple):
    """The steps for an image: resize its `box` to `size` (height, width), cut out `window`, and mirror it if `flip`.

    The window may reach beyond the resized image. There it is black, as in torchvision's centre crop.

    Examples:
        >>> box = fastload.image.Box(0, 8, 32, 32)
        >>> fastload.image.Region(box, size=(224, 224), flip=True).window is None
        True
    """

    box: Box
    size: tuple[int, int]
    window: Box | None = None
    flip: bool = False


def scaled(region: Region, height: int, width: int, pixels: Pixels) -> Region:
    """Return `region`, of an image of `height` by `width`, in `pixels`, which may be scaled down: in whole pixels."""
    rows, columns = pixels.shape[:2]
    if (rows, columns) == (height, width):
        return region
    top, left, h, w = region.box
    first, last = round(top * rows / height), round((top + h) * rows / height)
    begin, end = round(left * columns / width), round((left + w) * columns / width)
    box = Box(first, begin, max(1, last - first), max(1, end - begin))
    return region._replace(box=box)


def boxed(pixels: Pixels, box: Box, *, flip: bool = False) -> Pixels:
    """Return the box of `pixels`, mirrored if `flip`: uint8[H, W, 3], contiguous, perhaps a view."""
    top, left, height, width = box
    part = pixels[top : top + height, left : left + width]
    # NumPy ignores the stride of a side of 1, which may be negative. torch does not. And torch warns of read-only
    # memory.
    if not part.flags.writeable or min(part.strides) < 0:
        part = np.array(part, order="C")
    if flip:  # in torch: NumPy takes ten times as long for interleaved colours
        part = torch.from_numpy(part).flip(1).numpy()
    # The resizing kernel accepts other strides too, but copies twice more.
    return part if part.flags.c_contiguous else np.array(part, order="C")


def windowed(image: Pixels, window: Box | None, *, flip: bool) -> Pixels:
    """Return the window of `image`, uint8[H, W, 3], mirrored if `flip`. Return `image` if it is None. May be a view."""
    if window is None:
        return image
    top, left, height, width = window
    part = image[max(0, top) : max(0, top + height), max(0, left) : max(0, left + width)]
    if part.shape[:2] != (height, width):
        black = np.zeros((height, width, 3), np.uint8)
        y, x = max(0, -top), max(0, -left)
        black[y : y + part.shape[0], x : x + part.shape[1]] = part
        part = black
    return np.array(part[:, ::-1], order="C") if flip else part
