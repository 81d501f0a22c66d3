"""Plans: crop, resize and flip as values, executed on pixels in one step.

`Plan.region` takes the size of an image and random numbers, and chooses the region to use. `Plan.decode` then decodes
no more than that region needs, resizes by torch's own antialiased uint8 kernel, and returns a tensor. A plan is also a
transform like torchvision's: `plan(image)` takes a PIL image.

The boxes equal torchvision's. With `scaled_decode=False`, pixels differ from torchvision's by at most 3 of 255, and by
less than 0.5 on average: the kernel rounds differently. On photographs, libjpeg's scaling adds 1 to 5 of 255 on
average, and up to 8 in one crop. It filters differently, and the box is rounded to the pixels that scaling leaves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fastload._kit.torch_private import no_torch_function, resize_antialiased
from fastload.errors import DecodeError
from fastload.image.decode import (
    Encoded,
    Pixels,
    open_rgb,
    orientation,
    pixels_at_least,
    read_header,
    rgb_pixels,
    upright,
)
from fastload.image.drawing import below, uniform
from fastload.image.normalize import channels, factor_and_shift, numbers
from fastload.image.regions import Box, Region, boxed, scaled, windowed
from fastload.image.sizes import Size, check_share, log_ratio, pair, resized, set_size, sides
from fastload.random.streams import sample_generator
from fastload.telemetry import stage


@dataclass(frozen=True)
class Plan(ABC):
    """The base of all plans. Immutable and thread-safe; plans with equal arguments compare equal.

    Args:
        mean, std: mean and standard deviation of each channel, on the scale of 0 to 1. Give both or neither.
            The result is float32, `(pixel / 255 - mean) / std`, as from torchvision's ToTensor and Normalize.
        channels_last: return a tensor [3, H, W] that lies in memory as [H, W, 3]. That saves a copy. A batch is
            contiguous nevertheless, unless the loader has `memory_format=torch.channels_last`.
        upright: apply the EXIF orientation first, as PIL.ImageOps.exif_transpose does. torchvision does not.
        scaled_decode: decode a JPEG at a half, a quarter ... if that leaves at least as many pixels as the
            result has. On photographs that changes pixels by 1 to 5 of 255 on average.
        region_decode: decode only the box of a JPEG, if the image kernels have libjpeg-turbo. It gives the same
            pixels faster. Changed bits outside of the box go unseen: see docs/images.md.

    Examples:
        >>> plan = fastload.image.ResizeCenterCrop(256, 224, upright=True)
    """

    _: KW_ONLY
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    channels_last: bool = False
    upright: bool = False
    scaled_decode: bool = True
    region_decode: bool = True

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise ValueError("give both mean and std, or neither")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, channels(name, values))

    @abstractmethod
    def region(self, height: int, width: int, generator: torch.Generator | None = None) -> Region:
        """Return the region for an image of `height` by `width` pixels. Draw from `generator`, by default torch's."""

    def _sample_region(self, height: int, width: int) -> Region:
        """Return `region`, drawn from the stream of the sample that this thread reads."""
        return self.region(height, width, sample_generator())

    def decode(self, encoded: Encoded, *, name: str) -> torch.Tensor:
        """Return an image from its bytes: uint8 of shape (3, H, W), or float32. Draw from `sample_generator()`.

        `name` is the name of its file, for errors.

        Raises:
            DecodeError: the image is damaged: see `open_rgb`.
        """
        # Here torch draws only from the generator. So calls can skip torch's function modes, which would cost a
        # microsecond each.
        with no_torch_function():
            with stage("decode"):
                pixels, region = self.decoded(encoded, self._sample_region, name=name)
            with stage("transform"):
                return self.finished(pixels, region)

    def decoded(
        self, encoded: Encoded, choose: Callable[[int, int], Region], *, name: str
    ) -> tuple[Pixels, Region]:
        """Return an image's pixels, perhaps scaled down, and the region in them. `choose` picks it in the full image.

        Raises:
            DecodeError: see `decode`.
        """
        image = read_header(encoded, name=name)
        tag = orientation(image, name=name) if self.upright else 1
        height, width = image.height, image.width
        if tag >= 5:
            height, width = width, height
        try:
            region = choose(height, width)
        except ValueError as error:
            raise DecodeError(name, str(error)) from error
        least = self.least(height, width, region.box)
        if tag >= 5:
            least = least[1], least[0]
        pixels = pixels_at_least(image, *least, name=name)
        if tag > 1:
            pixels = upright(pixels, tag)
        return pixels, scaled(region, height, width, pixels)

    def resample(self, pixels: Pixels) -> torch.Tensor:
        """Return decoded pixels, uint8 of shape (H, W, 3), as `decode` does: uint8 of shape (3, H, W), or float32.

        Raises:
            ValueError: the pixels have another dtype or shape, or there are no pixels.
        """
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
            raise ValueError(
                f"expected pixels of uint8[H, W, 3], got {pixels.dtype} {list(pixels.shape)}"
            )
        return self.resample_rows(lambda first, stop: pixels[first:stop], *pixels.shape[:2])

    def resample_rows(
        self, rows: Callable[[int, int], Pixels], height: int, width: int
    ) -> torch.Tensor:
        """Return what `resample` does for an image of `height` by `width` pixels, but read only the rows that it needs.

        Call `rows(first, stop)` once, which returns uint8[stop - first, width, 3].
        """
        with no_torch_function():
            region = self._sample_region(height, width)
            top, left, h, w = region.box
            pixels = rows(top, top + h)
            with stage("transform"):
                return self.finished(pixels, region._replace(box=Box(0, left, h, w)))

    def __call__(self, image: Any) -> torch.Tensor:
        """Turn a PIL image (converted to RGB) or uint8[H, W, 3] into uint8[3, H, W] (or float32). Ignore `upright`.

        Raises ValueError for an image without an obvious RGB, and TypeError for any other object.
        """
        if isinstance(image, Image.Image):
            image = rgb_pixels(image)
        elif not isinstance(image, np.ndarray):
            raise TypeError(
                f"expected a PIL image or uint8[H, W, 3], got {type(image).__name__}. Put the plan first: it "
                "replaces the transforms before it"
            )
        return self.resample(image)

    def least(self, height: int, width: int, box: Box) -> tuple[int, int]:
        """Return the size to which a whole image may shrink without its `box` becoming smaller than the result."""
        if not self.scaled_decode:
            return height, width
        rows, columns = self.resized(height, width)
        return (
            min(height, math.ceil(height * rows / box.height)),
            min(width, math.ceil(width * columns / box.width)),
        )

    @abstractmethod
    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the size to which the box of an image is resized.

        Raises:
            ValueError: the size has too many pixels.
        """

    def finished(self, pixels: Pixels, region: Region) -> torch.Tensor:
        """Return the region of `pixels` as a result: of the result's dtype, in new memory."""
        size, window = region.size, region.window
        shape = 3, *(size if window is None else (window.height, window.width))
        dtype = np.uint8 if self.mean is None else np.float32
        memory = (*shape[1:], 3) if self.channels_last else shape
        out = np.empty(memory, dtype)
        if self.channels_last:
            out = out.transpose(2, 0, 1)
        self.finish(pixels, region, out)
        return torch.from_numpy(out)

    def finish(self, pixels: Pixels, region: Region, out: NDArray[Any]) -> None:
        """Write the region of `pixels` into `out`, uint8[3, H, W] (or float32), of any strides.

        It uses NumPy if that is as fast. Every call of torch releases the GIL. Getting it back beside other threads
        costs more than most of these calls.
        """
        size, window = region.size, region.window
        # Mirroring before resizing gives the same bits; mirroring before the window does not.
        box = boxed(pixels, region.box, flip=region.flip and window is None)
        resizes = box.shape[:2] != size
        interleaved = out.transpose(1, 2, 0)
        direct = window is None and out.dtype == np.uint8 and interleaved.flags.c_contiguous
        if resizes and direct:
            resize_antialiased(box, size, out=interleaved)
            return
        image = resize_antialiased(box, size) if resizes else box
        image = windowed(image, window, flip=region.flip)
        if self.mean is None:
            np.copyto(interleaved, image)
            return
        factor, shift = factor_and_shift(self.mean, self.std)
        result = torch.from_numpy(out)
        result.copy_(torch.from_numpy(image.transpose(2, 0, 1))).mul_(factor).sub_(shift)


@dataclass(frozen=True)
class RandomResizedCrop(Plan):
    """A box of random area and ratio, resized to `size`, mirrored with probability `flip`.

    It equals torchvision's transform of the same name, followed by RandomHorizontalFlip if `flip` > 0. The defaults are
    the same, and so are the boxes for the same random numbers.

    Args:
        size: the size of the result, (height, width) or one number for both.
        scale: the bounds of the box's share of the image's area.
        ratio: the bounds of the box's width / height.
        flip: the probability, 0 to 1, of mirroring. torchvision's RandomResizedCrop never mirrors.

    Examples:
        >>> plan = fastload.image.RandomResizedCrop(224, flip=0.5)
        >>> plan.decode(encoded, name="0.jpg").shape  # (C, H, W)
        torch.Size([3, 224, 224])
    """

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        set_size(self, "size", self.size)
        object.__setattr__(self, "size", pair(self.size))
        for name in ("scale", "ratio"):
            bounds = numbers(name, getattr(self, name), 2)
            if not 0 < bounds[0] <= bounds[1]:
                raise ValueError(f"{name} must be two numbers, 0 < from <= to, got {bounds}")
            object.__setattr__(self, name, bounds)
        check_share("flip", self.flip)

    def region(self, height: int, width: int, generator: torch.Generator | None = None) -> Region:
        """See `Plan`. Draws as torchvision's `RandomResizedCrop.get_params` and RandomHorizontalFlip do."""
        box = self._box(height, width, generator)
        # As torch compares `rand(1) < flip`: with flip as a float32.
        flip = self.flip > 0 and uniform(0.0, 1.0, generator) < np.float32(self.flip)
        return Region(box, pair(self.size), None, bool(flip))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """See `Plan`."""
        return pair(self.size)

    def _box(self, height: int, width: int, generator: torch.Generator | None) -> Box:
        area = height * width
        bounds = log_ratio(self.ratio)
        for _ in range(10):
            target = area * uniform(*self.scale, generator)
            w, h = sides(target, uniform(*bounds, generator))
            if 0 < w <= width and 0 < h <= height:
                top = below(height - h + 1, generator)
                return Box(top, below(width - w + 1, generator), h, w)
        low, high = self.ratio
        h, w = height, width
        if width / height < low:
            h = max(1, round(width / low))
        elif width / height > high:
            w = max(1, round(height * high))
        return Box((height - h) // 2, (width - w) // 2, h, w)


@dataclass(frozen=True)
class Resize(Plan):
    """The whole image, resized as torchvision's Resize does: to (height, width), or the shorter side to one number.

    Args:
        size: (height, width), or one number for the shorter side. For the others see `Plan`.

    Examples:
        >>> fastload.image.Resize((32, 48)).decode(encoded, name="0.jpg").shape
        torch.Size([3, 32, 48])
    """

    size: Size

    def __post_init__(self) -> None:
        super().__post_init__()
        set_size(self, "size", self.size)

    def region(self, height: int, width: int, generator: torch.Generator | None = None) -> Region:
        """See `Plan`. Draws nothing."""
        return Region(Box(0, 0, height, width), self.resized(height, width))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """See `Plan`."""
        return resized(height, width, self.size)


@dataclass(frozen=True)
class ResizeCenterCrop(Plan):
    """torchvision's Resize(`resize`) and then CenterCrop(`crop`). The usual values for validation are (256, 224).

    Args:
        resize: size of `Resize`.
        crop: size of the crop. For the others see `Plan`.

    Examples:
        >>> plan = fastload.image.ResizeCenterCrop(256, 224)
        >>> images = fastload.datasets.ImageFolder("images", transform=plan)
    """

    resize: Size = 256
    crop: Size = 224

    def __post_init__(self) -> None:
        super().__post_init__()
        set_size(self, "resize", self.resize)
        set_size(self, "crop", self.crop)
        object.__setattr__(self, "crop", pair(self.crop))

    def region(self, height: int, width: int, generator: torch.Generator | None = None) -> Region:
        """See `Plan`. Draws nothing."""
        rows, columns = size = self.resized(height, width)
        h, w = pair(self.crop)
        # torchvision pads a small image evenly, with the odd pixel at the end, and rounds to even.
        top = round((rows - h) / 2.0) if h <= rows else -((h - rows) // 2)
        left = round((columns - w) / 2.0) if w <= columns else -((w - columns) // 2)
        return Region(Box(0, 0, height, width), size, Box(top, left, h, w))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """See `Plan`."""
        return resized(height, width, self.resize)


def is_known_plan(transform: Any) -> bool:
    """Return whether `transform` is one of this module's plans, and not of a subclass.

    Args:
        transform: any object.

    Examples:
        >>> fastload.image.is_known_plan(fastload.image.Resize(256))
        True
    """
    return type(transform) in (RandomResizedCrop, Resize, ResizeCenterCrop)


def open_image(encoded: Encoded, transform: Any, *, name: str) -> Any:
    """Return the result of `transform` for an image's bytes. A plan decodes them; other transforms get a PIL image.

    Args:
        encoded: bytes of the image.
        transform: a plan, a callable that takes an RGB `PIL.Image.Image`, or None for the image itself.
        name: name of its file, for errors.

    Raises:
        DecodeError: see `open_rgb`.

    Examples:
        >>> fastload.image.open_image(encoded, fastload.image.Resize(32), name="0.jpg").shape
        torch.Size([3, 32, 42])
    """
    if isinstance(transform, Plan):
        return transform.decode(encoded, name=name)
    with stage("decode"):
        image = open_rgb(encoded, name=name)
    if transform is None:
        return image
    with stage("transform"):
        return transform(image)
