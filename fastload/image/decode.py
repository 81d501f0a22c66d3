"""Decoders of image files: to Pillow's images for unmodified transforms, to arrays of pixels for plans and packing."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fastload._kit.torch_private import no_torch_function, resize_antialiased
from fastload.errors import DecodeError

T = TypeVar("T")
Encoded = bytes | bytearray | memoryview
Pixels = NDArray[np.uint8]


def read_file(name: str) -> bytes:
    """Return all bytes of a file."""
    try:
        with open(name, "rb", buffering=0) as file:
            return file.readall()
    except OSError as error:
        # Unlike an error of open(), that of reading does not name the file.
        error.filename = name
        raise


def open_rgb(encoded: Encoded, *, name: str) -> Image.Image:
    """Return a whole image, decoded from its bytes: RGB, 8 bits a channel.

    It accepts any format that Pillow knows, and recognises it by its content, not by its name. Pillow converts grey,
    palette and CMYK images, and images with alpha, to RGB. 16-bit channels are reduced to their upper 8 bits. Like
    torchvision, it does not apply the EXIF orientation. Many threads may call it at once: the pixels are decoded with
    the GIL released.

    Args:
        encoded: bytes of the image.
        name: name of its file, for errors.

    Raises:
        DecodeError: the bytes are empty, truncated, damaged or not an image, the image has more pixels than twice
            `PIL.Image.MAX_IMAGE_PIXELS`, or no obvious RGB (floating point).

    Examples:
        >>> fastload.image.open_rgb(encoded, name="0.jpg").mode
        'RGB'
    """
    return _decoding(name, lambda: as_rgb(_opened(encoded)))


def decode_pixels(encoded: Encoded, *, name: str, max_size: int | None = None) -> Pixels:
    """Return the pixels of an image, uint8 of shape (H, W, 3) in RGB.

    Args:
        encoded: bytes of the image.
        name: name of its file, for errors.
        max_size: the most pixels of its longer side. None: as it is.

    Raises:
        DecodeError: see `open_rgb`.

    Examples:
        >>> fastload.image.decode_pixels(encoded, name="0.jpg").shape
        (48, 64, 3)
    """
    if max_size is not None and max_size < 1:
        raise ValueError(f"max_size must be a number of pixels above 0, got {max_size!r}")
    image = read_header(encoded, name=name)
    height, width = image.height, image.width
    longer = max(height, width)
    size = height, width
    if max_size is not None and longer > max_size:
        size = max(1, round(height * max_size / longer)), max(1, round(width * max_size / longer))
    pixels = pixels_at_least(image, *size, name=name)
    with no_torch_function():
        pixels = np.array(pixels, order="C")  # torch warns of read-only memory
        return pixels if pixels.shape[:2] == size else resize_antialiased(pixels, size)


def read_header(encoded: Encoded, *, name: str) -> Image.Image:
    """Return an image of which only the header is decoded.

    Raises `DecodeError` if it is not an image, or has more pixels than twice `PIL.Image.MAX_IMAGE_PIXELS`: a small file
    can claim gigabytes.
    """
    return _decoding(name, lambda: _opened(encoded))


def pixels_at_least(image: Image.Image, height: int, width: int, *, name: str) -> Pixels:
    """Return the pixels of a whole image of which only the header is decoded, uint8[H, W, 3], read-only.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if that leaves at least `height` by `width` pixels.
    """

    def decode() -> Pixels:
        image.draft("RGB", (width, height))  # no effect on other formats
        return rgb_pixels(image)

    return _decoding(name, decode)


def orientation(image: Image.Image, *, name: str) -> int:
    """Return the EXIF orientation, 1 to 8, or 1 if the image has no orientation."""

    def read() -> int:
        if image.format == "TIFF":
            image.load()  # Pillow then turns the image itself, and removes the tag
        tag = image.getexif().get(0x0112, 1)
        return tag if isinstance(tag, int) and 1 <= tag <= 8 else 1

    return _decoding(name, read)


def upright(pixels: Pixels, tag: int) -> Pixels:
    """Return a view of `pixels`, uint8[H, W, 3], turned and mirrored as the EXIF orientation `tag` says."""
    if tag >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if tag in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if tag in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _opened(encoded: Encoded) -> Image.Image:
    if not encoded:
        raise _Unfit("the file is empty")
    return Image.open(io.BytesIO(encoded))


def _decoding(name: str, decode: Callable[[], T]) -> T:
    """Return what `decode()` returns. Raises `DecodeError` if `decode()` raises an error about the bytes."""
    try:
        return decode()
    except (MemoryError, DecodeError):
        raise
    except _Unfit as error:
        raise DecodeError(name, str(error)) from None
    except Image.DecompressionBombError as error:
        advice = "Raise PIL.Image.MAX_IMAGE_PIXELS if you trust the file"
        raise DecodeError(name, f"{error} {advice}") from None
    except UnidentifiedImageError as error:
        raise DecodeError(name, "not an image in a format that Pillow can read") from error
    except Exception as error:
        # No file is touched here, so the error is about the bytes. For damaged bytes, Pillow's decoders raise
        # OSError, SyntaxError, ValueError, IndexError, struct.error, zlib.error and others.
        raise DecodeError(name, f"cannot be decoded: {error or type(error).__name__}") from error


class _Unfit(ValueError):
    """An image has no bytes, or no obvious RGB."""


def as_rgb(image: Image.Image) -> Image.Image:
    """Return `image` in RGB, as `open_rgb` does. Raises ValueError if the conversion is not obvious."""
    mode = image.mode
    if mode.startswith("I"):  # "I;16" and its kin; Pillow's own conversion clips them at 255
        values = np.asarray(image)
        if values.size and (values.min() < 0 or values.max() > 0xFFFF):
            raise _Unfit("grey values beyond 16 bits. Expected 8 or 16 bits per channel")
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if mode == "F":
        raise _Unfit("floating-point grey values. Expected 8 or 16 bits per channel")
    return image.convert("RGB")


def rgb_pixels(image: Image.Image) -> Pixels:
    """Return the pixels of `image`, uint8[H, W, 3], read-only. Raises ValueError as `as_rgb` does."""
    image.load()
    return np.asarray(image if image.mode == "RGB" else as_rgb(image))
