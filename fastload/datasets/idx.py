"""IDX files of bytes, the format of MNIST: a header of big-endian integers, then the values of one array."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from fastload.errors import IdxError

_UINT8 = 0x08  # the code of the only dtype that MNIST's files have
_GZIP = b"\x1f\x8b"
_PIECE = 1 << 20  # bytes; a forged size gets no more memory than this beyond what the file holds


def read_idx(path: str | os.PathLike[str], dimensions: int) -> NDArray[np.uint8]:
    """Return the array in an IDX file of uint8 values, gzipped or not. It must have this number of dimensions.

    The file's first bytes, not its name, tell whether it is gzipped.

    Raises IdxError if the file is not such a file, is cut off or too long, or has a damaged gzip stream. The message
    names the file, what was found and what was expected. Raises OSError if the file cannot be read.
    """
    name = os.fspath(path)
    with open(name, "rb") as file:
        zipped = file.read(2) == _GZIP
        file.seek(0)
        if not zipped:
            return _read(file, name, dimensions)
        try:
            with gzip.GzipFile(fileobj=file) as unzipped:
                return _read(cast(BinaryIO, unzipped), name, dimensions)
        except EOFError:
            raise IdxError(
                f"{name}: the gzip stream is cut off. Copy or download the file again"
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise IdxError(
                f"{name}: the gzip stream is damaged ({error}). Copy or download the file again"
            ) from error


def write_idx(file: BinaryIO, array: NDArray[np.uint8]) -> None:
    """Write an array of uint8 to an open file as IDX. Raise ValueError for another dtype."""
    if array.dtype != np.uint8:
        raise ValueError(f"expected uint8 values, got {array.dtype}. Convert them with astype()")
    file.write(struct.pack(f">HBB{array.ndim}I", 0, _UINT8, array.ndim, *array.shape))
    file.write(np.ascontiguousarray(array).data)


def _read(file: BinaryIO, name: str, dimensions: int) -> NDArray[np.uint8]:
    magic, expected = _header(file, 4, name), bytes([0, 0, _UINT8, dimensions])
    if magic != expected:
        raise IdxError(
            f"{name}: this is not an IDX file of uint8 values in {dimensions} dimensions: it begins with "
            f"{magic.hex(' ')}. Expected {expected.hex(' ')}"
        )
    shape = struct.unpack(f">{dimensions}I", _header(file, 4 * dimensions, name))
    size = math.prod(shape)
    content = _up_to(file, size + 1)  # one byte more, to see whether the file ends here
    if len(content) != size:
        found = f"only {len(content):,}" if len(content) < size else "more"
        raise IdxError(
            f"{name}: expected {size:,} bytes after the header, for uint8{[*shape]}, and found {found}"
        )
    try:
        return np.frombuffer(content, np.uint8).reshape(shape)
    except ValueError as error:  # no values, but dimensions too large for an address
        raise IdxError(
            f"{name}: the header gives the shape {[*shape]}, which no array can have"
        ) from error


def _header(file: BinaryIO, size: int, name: str) -> bytes:
    found = bytes(_up_to(file, size))
    if len(found) < size:
        raise IdxError(f"{name}: the file ends within its header. Copy or download the file again")
    return found


def _up_to(file: BinaryIO, size: int) -> bytearray:
    """Return the next `size` bytes, or fewer at the end of the file."""
    content = bytearray()
    while piece := file.read(min(_PIECE, size - len(content))):
        content += piece
    return content
