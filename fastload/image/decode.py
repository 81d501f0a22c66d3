"""Encoded files to pictures: Pillow's for unmodified transforms, arrays of pixels for plans."""

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
    """Read and decode the picture at `path`, whole: RGB, 8 bits a channel, no file left open.

    As `open_rgb`; raises OSError with its `filename` where the file cannot be read
    (FileNotFoundError, PermissionError, an input/output error in the middle).
    """
    name = os.fspath(path)
    with stage("read"):
        encoded = read_file(name)
    with stage("decode"):
        return open_rgb(encoded, name=name)


def read_file(name: str) -> bytes:
    """Return all bytes of a file: four system calls, where Pillow's own reading takes dozens.

    Each lets the GIL go, and beside a busy loop it takes some 50 us to have it back.
    """
    try:
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(file).st_size
            if not size:  # also of files that are made as they are read
                with open(file, "rb", closefd=False) as whole:
                    return whole.read()
            encoded = os.read(file, size)
            while len(encoded) < size:  # a signal, a network file system
                more = os.read(file, size - len(encoded))
                if not more:
                    break
                encoded += more
            return encoded
        finally:
            os.close(file)
    except OSError as error:
        # Unlike that of open(), an error of read() does not say which file it was.
        error.filename = name
        raise


def open_rgb(encoded: Encoded, *, name: str) -> Image.Image:
    """Decode the bytes of a picture, whole: RGB, 8 bits a channel.

    Any format that Pillow knows, recognised by its content and not by its name. Grey, palette, CMYK
    and pictures with alpha become RGB as Pillow converts them, of 16 bits the upper 8 are taken; an
    EXIF orientation is not applied (torchvision does the same). Safe to call from many threads; the
    pixels are decoded with the GIL released.

    Raises `DecodeError`, with `name`, for what cannot be decoded: empty, truncated, damaged, not a
    picture, of more pixels than twice `PIL.Image.MAX_IMAGE_PIXELS`, or of a kind without an obvious
    RGB (floating point).
    """
    return _decoding(name, encoded, lambda: as_rgb(Image.open(io.BytesIO(encoded))))


class Header(NamedTuple):
    """What a picture says of itself before it is decoded; height and width in pixels, as it is stored."""

    height: int
    width: int
    decoder: Decoder
    picture: Any  # what the decoder goes on with


class Decoder(Protocol):
    """A row of `DECODERS`: who reads which bytes."""

    def header(self, encoded: Encoded) -> Header | None:
        """The header; None where the bytes are another decoder's."""

    def pixels(self, encoded: Encoded, header: Header, height: int, width: int) -> Pixels:
        """uint8[H, W, 3] in RGB: the whole picture, possibly smaller, but at least `height` by `width`.

        Good until this thread decodes again.
        """


class SimpleJpeg:
    """JPEG by libjpeg-turbo, with the GIL released, into memory that the thread uses again."""

    def header(self, encoded: Encoded) -> Header | None:
        """See `Decoder`."""
        if simplejpeg is None or bytes(encoded[:3]) != b"\xff\xd8\xff":
            return None
        try:
            height, width, colors, _ = simplejpeg.decode_jpeg_header(encoded)
        except ValueError:
            return None
        if colors not in ("YCbCr", "RGB", "Gray"):  # CMYK, which only Pillow makes RGB
            return None
        return Header(height, width, self, None)

    def pixels(self, encoded: Encoded, header: Header, height: int, width: int) -> Pixels:
        """See `Decoder`. Smaller by libjpeg's own scaling, from a half down: 7/8 takes longer than all of it."""
        smaller = {"min_height": height, "min_width": width, "min_factor": 2}
        try:
            pixels: Pixels = simplejpeg.decode_jpeg(
                encoded,
                buffer=_buffer(3 * header.height * header.width),
                fastupsample=False,
                **smaller,
            )
        except ValueError:
            # What libjpeg has any objection to; Pillow knows which of them matter.
            picture = Image.open(io.BytesIO(encoded))
            return ANY.pixels(encoded, Header(*picture.size[::-1], ANY, picture), height, width)
        return pixels


class AnyPillow:
    """Whatever Pillow reads."""

    def header(self, encoded: Encoded) -> Header | None:
        """See `Decoder`."""
        picture = Image.open(io.BytesIO(encoded))
        return Header(picture.height, picture.width, self, picture)

    def pixels(self, encoded: Encoded, header: Header, height: int, width: int) -> Pixels:
        """See `Decoder`."""
        picture = header.picture
        if header.height >= 2 * height and header.width >= 2 * width:
            picture.draft("RGB", (width, height))  # a JPEG's own scaling; nothing for other formats
        return np.asarray(as_rgb(picture))


ANY = AnyPillow()
DECODERS: tuple[Decoder, ...] = (SimpleJpeg(), ANY)
"""Asked in this order; the last one takes everything, or raises what is wrong with it."""


def read_header(encoded: Encoded, *, name: str) -> Header:
    """The header of a picture, by the first decoder that knows it; some 2 us for a JPEG.

    Raises `DecodeError` where it is none, or one of more pixels than twice `PIL.Image.MAX_IMAGE_PIXELS`:
    a small file can ask for gigabytes.
    """

    def read() -> Header:
        header = next(h for decoder in DECODERS if (h := decoder.header(encoded)) is not None)
        check_pixels(header.height, header.width)
        return header

    return _decoding(name, encoded, read)


def check_pixels(height: int, width: int) -> None:
    """Raise ValueError for a picture beyond the limit of pixels."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and height * width > 2 * limit:
        raise _Unfit(
            f"{width} x {height} pixels, more than twice PIL.Image.MAX_IMAGE_PIXELS ({limit}): "
            "raise that limit if you trust the file"
        )


def pixels_at_least(
    encoded: Encoded, header: Header, height: int, width: int, *, name: str
) -> Pixels:
    """The pixels of a whole picture, uint8[H, W, 3], smaller where that is cheaper: see `Decoder.pixels`.

    The memory is this thread's own: good until it decodes again.
    """
    return _decoding(name, encoded, lambda: header.decoder.pixels(encoded, header, height, width))


def orientation(encoded: Encoded, *, name: str) -> int:
    """The EXIF orientation, 1 to 8; 1 where there is none."""

    def read() -> int:
        picture = Image.open(io.BytesIO(encoded))
        if picture.format == "TIFF":
            picture.load()  # Pillow itself turns it then, and takes the tag away
        tag = picture.getexif().get(0x0112, 1)
        return tag if isinstance(tag, int) and 1 <= tag <= 8 else 1

    return _decoding(name, encoded, read)


def upright(pixels: Pixels, tag: int) -> Pixels:
    """`pixels`, uint8[H, W, 3], turned and mirrored as the EXIF orientation `tag` says: a view."""
    if tag >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if tag in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if tag in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _decoding(name: str, encoded: Encoded, decode: Callable[[], T]) -> T:
    """What `decode()` returns; `DecodeError` for whatever it raises that is about the bytes."""
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
        # No file is touched here, so this is about the bytes. Pillow's decoders meet damaged ones
        # with OSError, SyntaxError, ValueError, IndexError, struct.error, zlib.error and others.
        raise DecodeError(name, f"cannot be decoded: {error or type(error).__name__}") from error


class _Unfit(ValueError):
    """A picture without an obvious RGB, or of too many pixels."""


def as_rgb(picture: Image.Image) -> Image.Image:
    """`picture` as `open_rgb` makes it RGB. Raises ValueError where that is not obvious."""
    mode = picture.mode
    if mode.startswith("I"):  # "I;16" and its kin; Pillow's own conversion cuts them off at 255
        values = np.asarray(picture)
        if values.size and (values.min() < 0 or values.max() > 0xFFFF):
            raise _Unfit("grey values beyond 16 bits; expected 8 or 16 bits a channel")
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if mode == "F":
        raise _Unfit("floating-point grey values; expected 8 or 16 bits a channel")
    return picture.convert("RGB")


def _buffer(nbytes: int) -> Pixels:
    """Memory of this thread, which its next picture overwrites: fresh memory costs a page fault per 4 KiB."""
    if nbytes > _BUFFER_BYTES:
        return np.empty(nbytes, np.uint8)
    buffer: Pixels | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.nbytes < nbytes:
        buffer = _local.buffer = np.empty(nbytes, np.uint8)
    return buffer
