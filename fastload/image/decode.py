"""Decoders of image files: to Pillow's images for unmodified transforms, to arrays of pixels for plans."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fastload.errors import DecodeError
from fastload.telemetry import stage

try:
    import simplejpeg
except ModuleNotFoundError:
    simplejpeg = None

T = TypeVar("T")
Encoded = bytes | bytearray | memoryview
Pixels = NDArray[np.uint8]

_BUFFER_BYTES = 64 * 1024 * 1024
_local = threading.local()


def decode_rgb(path: str | os.PathLike[str]) -> Image.Image:
    """Read and decode the whole image at `path`: RGB, 8 bits a channel. No file stays open.

    See `open_rgb`. If the file cannot be read, raises OSError with its `filename`: FileNotFoundError, PermissionError,
    or an input/output error.
    """
    name = os.fspath(path)
    with stage("read"):
        encoded = read_file(name)
    with stage("decode"):
        return open_rgb(encoded, name=name)


def read_file(name: str) -> bytes:
    """Return all bytes of a file, in four system calls. Pillow's own reading takes dozens.

    Each call releases the GIL. Beside a busy loop, it takes some 50 us to get the GIL back.
    """
    try:
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(file).st_size
            if not size:  # also if the kernel creates the file as it is read
                with open(file, "rb", closefd=False) as whole:
                    return whole.read()
            encoded = os.read(file, size)
            while len(encoded) < size:  # cut short by a signal or a network file system
                more = os.read(file, size - len(encoded))
                if not more:
                    break
                encoded += more
            return encoded
        finally:
            os.close(file)
    except OSError as error:
        # Unlike an error of open(), that of read() does not name the file.
        error.filename = name
        raise


def open_rgb(encoded: Encoded, *, name: str) -> Image.Image:
    """Decode the bytes of a whole image: RGB, 8 bits a channel.

    It accepts any format that Pillow knows, and recognises it by its content, not by its name. Pillow converts grey,
    palette and CMYK images, and images with alpha, to RGB. 16-bit channels are reduced to their upper 8 bits. Like
    torchvision, it does not apply the EXIF orientation. Many threads may call it at once: the pixels are decoded with
    the GIL released.

    Raises `DecodeError`, with `name`, if the bytes are empty, truncated, damaged or not an image. It raises it too if
    the image has more pixels than twice `PIL.Image.MAX_IMAGE_PIXELS`, or no obvious RGB (floating point).
    """
    return _decoding(name, encoded, lambda: as_rgb(Image.open(io.BytesIO(encoded))))


class Header(NamedTuple):
    """The header of an image. Height and width are in pixels, as stored."""

    height: int
    width: int
    decoder: Decoder
    image: Any  # the decoder's own, to continue with


class Decoder(Protocol):
    """An element of `DECODERS`, which reads some formats."""

    def header(self, encoded: Encoded) -> Header | None:
        """Return the header, or None if another decoder must read these bytes."""

    def pixels(self, encoded: Encoded, header: Header, height: int, width: int) -> Pixels:
        """Return the whole image in RGB, uint8[H, W, 3]. It may be scaled down, but not below `height` by `width`.

        The pixels are valid until this thread decodes again.
        """


class SimpleJpeg:
    """Decodes JPEG by libjpeg-turbo, with the GIL released, into memory that the thread reuses."""

    def header(self, encoded: Encoded) -> Header | None:
        """See `Decoder`."""
        if simplejpeg is None or bytes(encoded[:3]) != b"\xff\xd8\xff":
            return None
        try:
            height, width, colors, _ = simplejpeg.decode_jpeg_header(encoded)
        except ValueError:
            return None
        if colors not in ("YCbCr", "RGB", "Gray"):  # CMYK, which only Pillow converts to RGB
            return None
        return Header(height, width, self, None)

    def pixels(self, encoded: Encoded, header: Header, height: int, width: int) -> Pixels:
        """See `Decoder`. libjpeg scales to a half or less: decoding at 7/8 takes longer than decoding the full size."""
        smaller = {"min_height": height, "min_width": width, "min_factor": 2}
        try:
            pixels: Pixels = simplejpeg.decode_jpeg(
                encoded,
                buffer=_buffer(3 * header.height * header.width),
                fastupsample=False,
                **smaller,
            )
        except ValueError:
            # libjpeg objects to something. Pillow knows which objections matter.
            image = Image.open(io.BytesIO(encoded))
            return ANY.pixels(encoded, Header(*image.size[::-1], ANY, image), height, width)
        return pixels


class AnyPillow:
    """Decodes whatever Pillow reads."""

    def header(self, encoded: Encoded) -> Header | None:
        """See `Decoder`."""
        image = Image.open(io.BytesIO(encoded))
        return Header(image.height, image.width, self, image)

    def pixels(self, encoded: Encoded, header: Header, height: int, width: int) -> Pixels:
        """See `Decoder`."""
        image = header.image
        if header.height >= 2 * height and header.width >= 2 * width:
            image.draft("RGB", (width, height))  # a JPEG scales itself; no effect on others
        return np.asarray(as_rgb(image))


ANY = AnyPillow()
DECODERS: tuple[Decoder, ...] = (SimpleJpeg(), ANY)
"""The first decoder that knows the bytes reads them. The last one accepts everything, or raises an error."""


def decodes_3_eighths() -> bool:
    """Return whether JPEGs are decoded at 3/8 of their size too, as the kernels do. Pillow alone cannot."""
    return simplejpeg is not None


def read_header(encoded: Encoded, *, name: str) -> Header:
    """Return the header of an image, from the first decoder that knows it. A JPEG takes some 2 us.

    Raises `DecodeError` if it is not an image, or has more pixels than twice `PIL.Image.MAX_IMAGE_PIXELS`: a small file
    can claim gigabytes.
    """

    def read() -> Header:
        header = next(h for decoder in DECODERS if (h := decoder.header(encoded)) is not None)
        check_pixels(header.height, header.width)
        return header

    return _decoding(name, encoded, read)


def check_pixels(height: int, width: int) -> None:
    """Raise ValueError if an image has more pixels than the limit."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and height * width > 2 * limit:
        raise _Unfit(
            f"{width} x {height} pixels, more than twice PIL.Image.MAX_IMAGE_PIXELS ({limit}). Raise that limit if "
            "you trust the file"
        )


def pixels_at_least(
    encoded: Encoded, header: Header, height: int, width: int, *, name: str
) -> Pixels:
    """Return the pixels of a whole image, uint8[H, W, 3], scaled down if that is cheaper: see `Decoder.pixels`.

    The memory belongs to this thread, and is valid until it decodes again.
    """
    return _decoding(name, encoded, lambda: header.decoder.pixels(encoded, header, height, width))


def orientation(encoded: Encoded, *, name: str) -> int:
    """Return the EXIF orientation, 1 to 8, or 1 if the image has no orientation."""

    def read() -> int:
        image = Image.open(io.BytesIO(encoded))
        if image.format == "TIFF":
            image.load()  # Pillow then turns the image itself, and removes the tag
        tag = image.getexif().get(0x0112, 1)
        return tag if isinstance(tag, int) and 1 <= tag <= 8 else 1

    return _decoding(name, encoded, read)


def upright(pixels: Pixels, tag: int) -> Pixels:
    """Return a view of `pixels`, uint8[H, W, 3], turned and mirrored as the EXIF orientation `tag` says."""
    if tag >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if tag in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if tag in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _decoding(name: str, encoded: Encoded, decode: Callable[[], T]) -> T:
    """Return what `decode()` returns. Raises `DecodeError` if `decode()` raises an error about the bytes."""
    if not encoded:
        raise DecodeError(name, "the file is empty")
    try:
        return decode()
    except (MemoryError, DecodeError):
        raise
    except _Unfit as error:
        raise DecodeError(name, str(error)) from None
    except UnidentifiedImageError as error:
        raise DecodeError(name, "not an image in a format that Pillow can read") from error
    except Exception as error:
        # No file is touched here, so the error is about the bytes. For damaged bytes, Pillow's decoders raise
        # OSError, SyntaxError, ValueError, IndexError, struct.error, zlib.error and others.
        raise DecodeError(name, f"cannot be decoded: {error or type(error).__name__}") from error


class _Unfit(ValueError):
    """An image has no obvious RGB, or too many pixels."""


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


def _buffer(nbytes: int) -> Pixels:
    """Return memory of this thread. Its next image overwrites it: fresh memory costs a page fault per 4 KiB."""
    if nbytes > _BUFFER_BYTES:
        return np.empty(nbytes, np.uint8)
    buffer: Pixels | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.nbytes < nbytes:
        buffer = _local.buffer = np.empty(nbytes, np.uint8)
    return buffer
