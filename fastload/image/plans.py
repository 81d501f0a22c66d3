"""Plans: crop, resize and flip as values, executed on pixels in one go.

A plan takes the size of a picture and random numbers and says which region of it becomes which
pixels (`Plan.region`, pure); `Plan.decode` then decodes no more than that needs, resizes by torch's
own antialiased uint8 kernel, and gives a tensor. In its place a plan is also a transform like
torchvision's: `plan(picture)` takes a PIL picture.

Distance to torchvision's transforms on the same decoded PIL picture: the boxes are the same, pixel
values at most 3 of 255 apart, on average under 0.5 (another rounding in the kernel). So it is for
files with `scaled_decode=False`, against Pillow's decoding. libjpeg's own scaling, where a JPEG has
pixels to spare, filters otherwise, and the box is rounded to the pixels that it leaves, half a pixel
of the result at most: on photographs 1 to 5 of 255 on average, up to 8 in one crop.
"""

from __future__ import annotations

import math
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from fastload.errors import DecodeError
from fastload.image.decode import (
    Encoded,
    Pixels,
    as_rgb,
    check_pixels,
    open_rgb,
    orientation,
    pixels_at_least,
    read_header,
    upright,
)
from fastload.randomness import sample_generator
from fastload.telemetry import stage
from fastload.torch_private import no_torch_function, resize_antialiased

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Size = int | tuple[int, int]


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


@dataclass(frozen=True)
class Plan(ABC):
    """What all plans have in common. Immutable; equal plans are equal; safe in any number of threads.

    Args:
        mean, std: of each channel, on the scale of 0 to 1: the result is float32,
            `(pixel / 255 - mean) / std`, as torchvision's ToTensor and Normalize. Both or neither.
        channels_last: the result lies in memory as [H, W, 3], though its shape is [3, H, W]. (A batch
            made by `default_collate` is contiguous, whatever its samples are.)
        upright: apply the EXIF orientation first, as PIL.ImageOps.exif_transpose; some 50 us more.
            torchvision does not.
        scaled_decode: decode a JPEG at a half, a quarter ... where as many pixels are left as the
            result has; see the module for the distance.
    """

    _: KW_ONLY
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    channels_last: bool = False
    upright: bool = False
    scaled_decode: bool = True

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std belong together: give both or neither")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, _channels(name, values))

    @abstractmethod
    def region(self, height: int, width: int, generator: torch.Generator | None = None) -> Region:
        """What becomes of a picture of `height` by `width` pixels; draws from `generator`, by default torch's."""

    def decode(self, encoded: Encoded, *, name: str) -> torch.Tensor:
        """The bytes of a picture to uint8[3, H, W] (or float32), random numbers from `sample_generator()`.

        `name` is that of its file, for errors. Raises `DecodeError` as `open_rgb` and `read_header` do.
        """
        generator = sample_generator()
        # No torch function here draws but by the generator: none needs to pass through the stream's
        # mode, at a microsecond each.
        with no_torch_function():
            with stage("decode"):
                header = read_header(encoded, name=name)
                tag = orientation(encoded, name=name) if self.upright else 1
                height, width = header.height, header.width
                if tag >= 5:
                    height, width = width, height
                try:
                    region = self.region(height, width, generator)
                except ValueError as error:
                    raise DecodeError(name, str(error)) from error
                least = self._least(height, width, region)
                if tag >= 5:
                    least = least[1], least[0]
                pixels = pixels_at_least(encoded, header, *least, name=name)
                if tag > 1:
                    pixels = upright(pixels, tag)
            with stage("transform"):
                return self._finish(_cut(pixels, _scaled(region, height, width, pixels)), region)

    def resample(self, pixels: Pixels) -> torch.Tensor:
        """Decoded pixels, uint8[H, W, 3], to uint8[3, H, W] (or float32), as `decode`.

        Raises ValueError for pixels of another dtype or shape, or none.
        """
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
            raise ValueError(
                f"expected pixels of uint8[H, W, 3], got {pixels.dtype} {list(pixels.shape)}"
            )
        generator = sample_generator()
        with no_torch_function(), stage("transform"):
            region = self.region(pixels.shape[0], pixels.shape[1], generator)
            return self._finish(_cut(pixels, region), region)

    def __call__(self, picture: Any) -> torch.Tensor:
        """A PIL picture (made RGB) or uint8[H, W, 3] to uint8[3, H, W] (or float32); `upright` is not looked at.

        Raises ValueError for a picture without an obvious RGB, TypeError for anything else.
        """
        if isinstance(picture, Image.Image):
            picture = np.asarray(picture if picture.mode == "RGB" else as_rgb(picture))
        elif not isinstance(picture, np.ndarray):
            raise TypeError(
                f"expected a PIL picture or uint8[H, W, 3], got {type(picture).__name__}: "
                "a plan takes the place of all transforms before it"
            )
        return self.resample(picture)

    def _least(self, height: int, width: int, region: Region) -> tuple[int, int]:
        """The size to which the whole picture may shrink without `box` becoming smaller than `size`."""
        if not self.scaled_decode:
            return height, width
        box, (rows, columns) = region.box, region.size
        return (
            min(height, math.ceil(height * rows / box.height)),
            min(width, math.ceil(width * columns / box.width)),
        )

    def _finish(self, image: torch.Tensor, region: Region) -> torch.Tensor:
        """Window, flip and type. `image`, uint8[3, H, W] in the memory of [H, W, 3], may be a view."""
        if region.window is not None:
            image = _window(image, region.window)
        if region.flip:
            image = image.flip(-1)
        shape = (image.shape[1], image.shape[2], 3) if self.channels_last else image.shape
        dtype = torch.uint8 if self.mean is None else torch.float32
        out = torch.empty(shape, dtype=dtype, device="cpu")
        result = out.permute(2, 0, 1) if self.channels_last else out
        result.copy_(image)
        if self.mean is not None and self.std is not None:
            factor, shift = _normalization(self.mean, self.std)
            result.mul_(factor).sub_(shift)
        return result


@dataclass(frozen=True)
class RandomResizedCrop(Plan):
    """A box of random area and ratio, resized to `size`, mirrored with probability `flip`.

    torchvision's transform of the same name, then its RandomHorizontalFlip where `flip` > 0, with the
    same defaults and, from the same random numbers, the same boxes.

    Args:
        size: of the result, (height, width) or one number for both.
        scale: the box's share of the picture's area, from and to.
        ratio: the box's width / height, from and to.
        flip: 0 to 1; torchvision's RandomResizedCrop flips none.
    """

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _set_size(self, "size", self.size)
        object.__setattr__(self, "size", _pair(self.size))
        for name in ("scale", "ratio"):
            bounds = _numbers(name, getattr(self, name), 2)
            if not 0 < bounds[0] <= bounds[1]:
                raise ValueError(f"{name} must be two numbers, 0 < from <= to, got {bounds}")
            object.__setattr__(self, name, bounds)
        _check_share("flip", self.flip)

    def region(self, height: int, width: int, generator: torch.Generator | None = None) -> Region:
        """See `Plan`. Draws as torchvision's `RandomResizedCrop.get_params` and RandomHorizontalFlip do."""
        box = self._box(height, width, generator)
        # `rand(1) < flip` as torch compares it: with flip as a float32.
        flip = self.flip > 0 and _scratch.number.uniform_(generator=generator).item() < np.float32(
            self.flip
        )
        return Region(box, _pair(self.size), None, bool(flip))

    def _box(self, height: int, width: int, generator: torch.Generator | None) -> Box:
        area = height * width
        log_ratio = _log_ratio(self.ratio)
        number, place = _scratch.number, _scratch.place
        for _ in range(10):
            target = area * number.uniform_(*self.scale, generator=generator).item()
            aspect = number.uniform_(*log_ratio, generator=generator).exp_().item()
            w = round(math.sqrt(target * aspect))
            h = round(math.sqrt(target / aspect))
            if 0 < w <= width and 0 < h <= height:
                top = place.random_(0, height - h + 1, generator=generator).item()
                left = place.random_(0, width - w + 1, generator=generator).item()
                return Box(int(top), int(left), h, w)
        low, high = self.ratio
        h, w = height, width
        if width / height < low:
            h = max(1, round(width / low))
        elif width / height > high:
            w = max(1, round(height * high))
        return Box((height - h) // 2, (width - w) // 2, h, w)


@dataclass(frozen=True)
class Resize(Plan):
    """The whole picture resized, as torchvision's Resize: to (height, width), or its shorter side to a number."""

    size: Size

    def __post_init__(self) -> None:
        super().__post_init__()
        _set_size(self, "size", self.size)

    def region(self, height: int, width: int, generator: torch.Generator | None = None) -> Region:
        """See `Plan`. Draws nothing."""
        return Region(Box(0, 0, height, width), _resized(height, width, self.size))


@dataclass(frozen=True)
class ResizeCenterCrop(Plan):
    """torchvision's Resize(`resize`) and then CenterCrop(`crop`): the usual one for validation is (256, 224)."""

    resize: Size = 256
    crop: Size = 224

    def __post_init__(self) -> None:
        super().__post_init__()
        _set_size(self, "resize", self.resize)
        _set_size(self, "crop", self.crop)
        object.__setattr__(self, "crop", _pair(self.crop))

    def region(self, height: int, width: int, generator: torch.Generator | None = None) -> Region:
        """See `Plan`. Draws nothing."""
        rows, columns = size = _resized(height, width, self.resize)
        h, w = _pair(self.crop)
        # torchvision pads what is too small evenly, the odd pixel behind; and rounds to even.
        top = round((rows - h) / 2.0) if h <= rows else -((h - rows) // 2)
        left = round((columns - w) / 2.0) if w <= columns else -((w - columns) // 2)
        return Region(Box(0, 0, height, width), size, Box(top, left, h, w))


def decode_pixels(encoded: Encoded, *, name: str, max_size: int | None = None) -> Pixels:
    """The pixels of a picture, uint8[H, W, 3] in RGB, its longer side reduced to `max_size` where it is longer.

    Raises `DecodeError`, with `name`, as `open_rgb` and `read_header` do.
    """
    if max_size is not None and max_size < 1:
        raise ValueError(f"max_size must be a number of pixels above 0, got {max_size!r}")
    header = read_header(encoded, name=name)
    height, width = header.height, header.width
    longer = max(height, width)
    size = height, width
    if max_size is not None and longer > max_size:
        size = max(1, round(height * max_size / longer)), max(1, round(width * max_size / longer))
    pixels = pixels_at_least(encoded, header, *size, name=name)
    with no_torch_function():
        image = _cut(pixels, Region(Box(0, 0, *pixels.shape[:2]), size))
        return np.array(image.permute(1, 2, 0).numpy(), order="C")


def normalize_on(
    device: str | torch.device,
    *,
    mean: tuple[float, float, float] = IMAGENET_MEAN,
    std: tuple[float, float, float] = IMAGENET_STD,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that brings a batch uint8[N, 3, H, W] to `device` and makes it `(pixel / 255 - mean) / std` there.

    A quarter of the bytes of a float32 batch are copied, and the CPU does none of the arithmetic. From
    pinned memory the copy does not block. The result is `dtype`[N, 3, H, W], in channels-last memory if
    asked; it equals torchvision's ToTensor and Normalize within 1e-6 in float32.

        normalize = fastload.image.normalize_on("cuda")
        for images, labels in loader:
            images = normalize(images)
    """
    factor, shift = _normalization(_channels("mean", mean), _channels("std", std))
    factor, shift = factor.to(device), shift.to(device)
    memory = torch.channels_last if channels_last else torch.contiguous_format

    def normalize(images: torch.Tensor) -> torch.Tensor:
        if images.dtype is not torch.uint8 or images.dim() < 3 or images.shape[-3] != 3:
            raise ValueError(
                f"expected uint8[N, 3, H, W], got {images.dtype} {list(images.shape)}: "
                "pictures that a plan without mean and std made"
            )
        there = images.to(device, non_blocking=True).to(torch.float32, memory_format=memory)
        return there.mul_(factor).sub_(shift).to(dtype)

    return normalize


def open_picture(encoded: Encoded, transform: Any, *, name: str) -> Any:
    """What `transform` makes of the bytes of a picture: a plan decodes them itself, others get a PIL picture."""
    if isinstance(transform, Plan):
        return transform.decode(encoded, name=name)
    with stage("decode"):
        picture = open_rgb(encoded, name=name)
    if transform is None:
        return picture
    with stage("transform"):
        return transform(picture)


# ---- execution ----


def _scaled(region: Region, height: int, width: int, pixels: Pixels) -> Region:
    """`region` of a picture of `height` by `width` on `pixels`, which may be smaller: to the nearest pixel."""
    rows, columns = pixels.shape[:2]
    if (rows, columns) == (height, width):
        return region
    top, left, h, w = region.box
    first, last = round(top * rows / height), round((top + h) * rows / height)
    begin, end = round(left * columns / width), round((left + w) * columns / width)
    box = Box(first, begin, max(1, last - first), max(1, end - begin))
    return region._replace(box=box)


def _cut(pixels: Pixels, region: Region) -> torch.Tensor:
    """The box of `pixels`, resized: uint8[3, H, W] in the memory of [H, W, 3]; a view where nothing is resized."""
    top, left, height, width = region.box
    box = pixels[top : top + height, left : left + width]
    # Of a side of 1, NumPy does not look at the stride, which may be negative; torch does.
    if not (box.flags.c_contiguous and box.flags.writeable) or min(box.strides) < 0:
        # For the kernel: it takes other strides too, by way of two more copies. Torch warns of what is
        # read-only.
        box = np.array(box, order="C")
    image = torch.from_numpy(box)
    if (height, width) == region.size:
        return image.permute(2, 0, 1)
    return resize_antialiased(image, region.size)


def _window(image: torch.Tensor, window: Box) -> torch.Tensor:
    top, left, height, width = window
    _, rows, columns = image.shape
    if top >= 0 and left >= 0 and top + height <= rows and left + width <= columns:
        return image[:, top : top + height, left : left + width]
    black = image.new_zeros((height, width, 3)).permute(2, 0, 1)
    y, x = max(0, -top), max(0, -left)
    part = image[:, max(0, top) : top + height, max(0, left) : left + width]
    black[:, y : y + part.shape[1], x : x + part.shape[2]] = part
    return black


@lru_cache(maxsize=64)
def _normalization(mean: Any, std: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(factor, shift), float32[3, 1, 1]: (x / 255 - mean) / std = x * factor - shift."""
    deviation = torch.tensor(std, dtype=torch.float64, device="cpu").view(3, 1, 1)
    shift = torch.tensor(mean, dtype=torch.float64, device="cpu").view(3, 1, 1) / deviation
    return (1 / (255 * deviation)).float(), shift.float()


# ---- random numbers, by the kernels that torchvision's calls end in ----


class _Scratch(threading.local):
    """A thread's tensors to draw into: making one costs as much as the draw."""

    def __init__(self) -> None:
        with torch.inference_mode(
            mode=False
        ):  # a tensor made in it could not be drawn into outside
            self.number = torch.empty(1, dtype=torch.float32, device="cpu")
            self.place = torch.empty(1, dtype=torch.int64, device="cpu")


_scratch = _Scratch()


@lru_cache(maxsize=64)
def _log_ratio(ratio: tuple[float, float]) -> tuple[float, float]:
    low, high = torch.log(torch.tensor(ratio)).tolist()  # in float32, as torchvision
    return low, high


# ---- arguments ----


def _resized(height: int, width: int, size: Size) -> tuple[int, int]:
    """As torchvision's: a number is the shorter side, the longer one keeps the ratio, rounded down.

    Raises ValueError where a picture is so narrow that this is beyond the limit of pixels.
    """
    if isinstance(size, tuple):
        return size
    longer = int(size * max(height, width) / min(height, width))
    resized = (longer, size) if width <= height else (size, longer)
    try:
        check_pixels(*resized)
    except ValueError as error:
        raise ValueError(f"{width} x {height} pixels, resized: {error}") from None
    return resized


def _set_size(plan: Plan, name: str, size: Any) -> None:
    sides = size if isinstance(size, tuple | list) else (size,)
    try:
        whole = tuple(operator.index(s) for s in sides if not isinstance(s, bool))
    except TypeError:
        whole = ()
    if len(whole) != len(sides) or len(whole) not in (1, 2) or min(whole) < 1:
        raise ValueError(f"{name} must be a number of pixels or (height, width), got {size!r}")
    object.__setattr__(plan, name, whole if len(whole) == 2 else whole[0])


def _pair(size: Size) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _check_share(name: str, share: float) -> None:
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"{name} must be a probability from 0 to 1, got {share!r}")


def _channels(name: str, values: Any) -> tuple[float, float, float]:
    red, green, blue = _numbers(name, values, 3)
    if name == "std" and min(red, green, blue) <= 0:
        raise ValueError(f"std must be above 0 for each channel, got {values!r}")
    return red, green, blue


def _numbers(name: str, values: Any, count: int) -> tuple[float, ...]:
    try:
        numbers = tuple(float(v) for v in values)
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{name} must be {count} finite numbers, got {values!r}")
    return numbers
