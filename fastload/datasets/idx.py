"""IDX files, the format of MNIST: a header of big-endian integers, then the values of one array."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from fastload.errors import IdxError

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}
_GZIP = b"\x1f\x8b"
_MAX_DIMENSIONS = 32  # the limit of NumPy 1
_PIECE = 1 << 20  # bytes; a forged size gets no more memory than this beyond what the file holds


def read_idx(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Return the array in an IDX file, gzipped or not, in the byte order of this machine.

    The file's first bytes, not its name, tell whether it is gzipped. The dtype is uint8, int8, int16, int32, float32 or
    float64.

    Raises IdxError if the file is not an IDX file, is cut off or too long, or has a damaged gzip stream. The message
    names the file, what was found and what was expected. Raises OSError if the file cannot be read.
    """
    name = os.fspath(path)
    with open(name, "rb") as file:
        zipped = file.read(2) == _GZIP
        file.seek(0)
        if not zipped:
            return _read(file, name)
        try:
            with gzip.GzipFile(fileobj=file) as unzipped:
                return _read(cast(BinaryIO, unzipped), name)
        except EOFError:
            raise IdxError(
                f"{name}: the gzip stream is cut off. Copy or download the file again"
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise IdxError(
                f"{name}: the gzip stream is damaged ({error}). Copy or download the file again"
            ) from error


def write_idx(file: BinaryIO, array: NDArray[Any]) -> None:
    """Write an array to an open file as IDX. Raise ValueError for a dtype that IDX does not have."""
    code = _CODES.get(array.dtype.newbyteorder(">"))
    if code is None:
        known = ", ".join(np.dtype(name).name for name in _DTYPES.values())
        raise ValueError(f"IDX has no dtype {array.dtype}. Expected one of {known}")
    file.write(struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape))
    file.write(np.ascontiguousarray(array, dtype=_DTYPES[code]).data)


def _read(file: BinaryIO, name: str) -> NDArray[Any]:
    magic = _header(file, 4, name)
    zeros, code, dimensions = struct.unpack(">HBB", magic)
    if zeros or code not in _DTYPES or dimensions > _MAX_DIMENSIONS:
        raise IdxError(
            f"{name}: this is not an IDX file: it begins with {magic.hex(' ')}. Expected 00 00, a type from "
            f"{', '.join(f'{known:02x}' for known in _DTYPES)}, and at most {_MAX_DIMENSIONS} dimensions"
        )
    shape = struct.unpack(f">{dimensions}I", _header(file, 4 * dimensions, name))
    dtype = np.dtype(_DTYPES[code])
    size = math.prod(shape) * dtype.itemsize
    content = _up_to(file, size + 1)  # one byte more, to see whether the file ends here
    if len(content) != size:
        found = f"only {len(content):,}" if len(content) < size else "more"
        raise IdxError(
            f"{name}: expected {size:,} bytes after the header, for {dtype.name}{[*shape]}, and found {found}"
        )
    try:
        array: NDArray[Any] = np.frombuffer(content, dtype).reshape(shape)
    except ValueError as error:  # no values, but dimensions too large for an address
        raise IdxError(
            f"{name}: the header gives the shape {[*shape]}, which no array can have"
        ) from error
    return array.astype(dtype.newbyteorder("="), copy=False)


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
