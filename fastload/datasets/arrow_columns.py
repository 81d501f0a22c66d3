"""Arrow columns, as they come out of a file, converted to tensors and Python values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

_TEXT = "string large_string string_view binary large_binary binary_view fixed_size_binary"


@dataclass(frozen=True, slots=True)
class Column:
    """The values of some rows of a column.

    `values` are `dtype[rows, *shape]`. If the column is ragged, they are `dtype[elements]`, and row `k` has the
    elements from `offsets[k]` to `offsets[k + 1]`. If the column has Python values, they are an Arrow array. `valid`,
    bool[rows], is False for a row that is null or has a null in it. It is None if no row has a null.
    """

    values: Any
    valid: NDArray[np.bool_] | None
    offsets: NDArray[np.int64] | None = None

    @property
    def is_dense(self) -> bool:
        """Whether a row is a part of one tensor, of the same shape in all rows."""
        return self.offsets is None and isinstance(self.values, torch.Tensor)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the column takes."""
        arrow = isinstance(self.values, pa.Array | pa.ChunkedArray)
        own = self.values.get_total_buffer_size() if arrow else self.values.nbytes
        return int(own) + sum(x.nbytes for x in (self.valid, self.offsets) if x is not None)

    def rows(self, rows: Sequence[int]) -> list[Any]:
        """Return the value at each of `rows`: a copy as a tensor, or a Python value."""
        if self.is_dense:
            return [*torch.from_numpy(self.values.numpy()[rows])]
        if self.offsets is None:
            return [self.values[k].as_py() for k in rows]
        return [self.values[self.offsets[k] : self.offsets[k + 1]].clone() for k in rows]


def decoded(field: pa.Field, array: pa.ChunkedArray) -> Column:
    """Return a column in memory of its own.

    Raises TypeError, which names the column, if its type cannot be read.
    """
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    if str(kind).partition("[")[0] in _TEXT.split():
        return _python_values(array)
    array = array.combine_chunks()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    present: Any = None
    offsets: Any = None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets = array.offsets.to_numpy().astype(np.int64)
        present = _valid(array)
        begin, end = offsets[[0, -1]].tolist() if len(offsets) else (0, 0)
        array, offsets = array.values.slice(begin, end - begin), offsets - begin
    elements = len(array)
    array, shape, valid = _flat(array)
    if array is None or (offsets is not None and shape):
        raise TypeError(
            f"column {field.name!r} has type {field.type}, which cannot become a tensor. Cast the column in the file, "
            "or leave it out with columns="
        )
    values = _numbers(array).reshape(elements, *shape)
    if isinstance(kind, pa.FixedShapeTensorType) and kind.permutation:
        values = np.ascontiguousarray(values.transpose(0, *(axis + 1 for axis in kind.permutation)))
    if valid is not None and offsets is None:
        present = np.all(valid.reshape(values.shape), axis=tuple(range(1, values.ndim)))
    elif valid is not None:
        nulls = np.concatenate([[0], np.cumsum(~valid)])
        present &= nulls[offsets[1:]] == nulls[offsets[:-1]]
    whole = present is None or present.all()
    return Column(torch.from_numpy(values), None if whole else present, offsets)


def _python_values(array: pa.ChunkedArray) -> Column:
    valid = array.is_valid().to_numpy() if array.null_count else None
    return Column(array.chunk(0) if array.num_chunks == 1 else array, valid)


def _flat(array: pa.Array) -> tuple[pa.Array | None, list[int], NDArray[np.bool_] | None]:
    """Return the numbers of lists of fixed sizes, the shape of a row, and which numbers are valid: None if all are.

    The array is None if other values than numbers are in the lists.
    """
    shape: list[int] = []
    if isinstance(array.type, pa.FixedShapeTensorType):
        array, shape = array.storage, array.type.shape
    valid = _valid(array) if array.null_count else None
    sizes = []
    while pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        sizes.append(size)
        # Not `flatten()`, which leaves out the elements of rows that are null.
        array = array.values.slice(array.offset * size, len(array) * size)
        valid = None if valid is None else np.repeat(valid, size)
        if array.null_count:
            valid = _valid(array) if valid is None else valid & _valid(array)
    is_kinds = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating)
    found = array if any(is_kind(array.type) for is_kind in is_kinds) else None
    return found, shape or sizes, valid


def _valid(array: pa.Array) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return found


def _numbers(array: pa.Array) -> NDArray[Any]:
    """Return the numbers of an array without lists. The number at a null is undefined."""
    if pa.types.is_boolean(array.type):
        return _numbers(array.cast(pa.uint8())).view(np.bool_)
    # `to_pandas_dtype()` imports pandas, and some versions of pyarrow need it.
    dtype = np.from_dlpack(pa.nulls(0, array.type)).dtype
    memory = array.buffers()[1]
    if memory is None or not len(array):
        return np.zeros(len(array), dtype)
    # A copy: Arrow's memory must not be written to, and would keep the file's other columns alive.
    return np.frombuffer(memory, dtype, len(array), array.offset * dtype.itemsize).copy()
