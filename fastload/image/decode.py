"""Encoded files to pictures."""

from __future__ import annotations

import io
import os

from PIL import Image, UnidentifiedImageError

from fastload.errors import DecodeError
from fastload.telemetry import stage


def decode_rgb(path: str | os.PathLike[str]) -> Image.Image:
    """Read and decode the picture at `path`, whole: RGB, 8 bits a channel, no file left open.

    Any format that Pillow knows, recognised by its content and not by its name. Grey, palette, CMYK
    and pictures with alpha become RGB as Pillow converts them; an EXIF orientation is not applied
    (torchvision does the same). Safe to call from many threads; the pixels are decoded with the GIL
    released.

    Raises OSError with its `filename` where the file cannot be read (FileNotFoundError,
    PermissionError, an input/output error in the middle) and `DecodeError` where it can be read but
    not decoded: empty, truncated, damaged, not a picture, or more pixels than Pillow's limit.
    """
    name = os.fspath(path)
    with stage("read"):
        encoded = _read(name)
    if not encoded:
        raise DecodeError(name, "the file is empty")
    try:
        with stage("decode"):
            return Image.open(io.BytesIO(encoded)).convert("RGB")
    except MemoryError:
        raise
    except UnidentifiedImageError as error:
        raise DecodeError(name, "not a picture in a format that Pillow can read") from error
    except Exception as error:
        # No file is touched here, so this is about the bytes. Pillow's decoders meet damaged ones
        # with OSError, SyntaxError, ValueError, IndexError, struct.error, zlib.error and others.
        raise DecodeError(name, f"cannot be decoded: {error or type(error).__name__}") from error


def _read(name: str) -> bytes:
    """Return all bytes of a file: three system calls, where Pillow's own reading takes dozens."""
    try:
        with open(name, "rb", buffering=0) as file:
            return file.read()
    except OSError as error:
        # Unlike that of open(), an error of read() does not say which file it was.
        error.filename = name
        raise
