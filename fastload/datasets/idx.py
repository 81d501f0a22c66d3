"""IDX files of bytes, the format of MNIST: a header of big-endian integers, then the values of one array."""

from __future__ import annotations

import math
import os
import struct
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fastload.errors import IdxError

_UINT8 = 0x08  # the code of the only dtype that MNIST's files have


def read_idx(path: str | os.PathLike[str], dimensions: int) -> NDArray[np.uint8]:
    """Return the array in an IDX file of uint8 values. It must have this number of dimensions.

    Raises IdxError if the file is not such a file, is cut off or too long. The message names the file, what was found
    and what was expected. Raises OSError if the file cannot be read.
    """
    name = os.fspath(path)
    content = np.fromfile(name, np.uint8)
    values = content[4 + 4 * dimensions :]
    magic, header = bytes(content[:4]), bytes(content[4 : 4 + 4 * dimensions])
    expected = bytes([0, 0, _UINT8, dimensions])
    if not expected.startswith(magic):
        raise IdxError(
            f"{name}: this is not an IDX file of uint8 values in {dimensions} dimensions: it begins with "
            f"{magic.hex(' ')}. Expected {expected.hex(' ')}"
        )
    if len(header) < 4 * dimensions:
        raise IdxError(f"{name}: the file ends within its header. Copy or download the file again")
    shape = struct.unpack(f">{dimensions}I", header)
    if len(values) != math.prod(shape):
        raise IdxError(
            f"{name}: expected {math.prod(shape):,} bytes after the header, for uint8{[*shape]}, and found "
            f"{len(values):,}. Copy or download the file again"
        )
    return values.reshape(shape)


def write_idx(file: BinaryIO, array: NDArray[np.uint8]) -> None:
    """Write an array of uint8 to an open file as IDX. Raise ValueError for another dtype."""
    if array.dtype != np.uint8:
        raise ValueError(f"expected uint8 values, got {array.dtype}. Convert them with astype()")
    file.write(struct.pack(f">HBB{array.ndim}I", 0, _UINT8, array.ndim, *array.shape))
    file.write(np.ascontiguousarray(array).data)
