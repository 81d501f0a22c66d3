"""Arrow columns, as they come out of a file, converted to tensors and Python values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class Kind:
    """The form that the values of a column take in samples."""

    dtype: torch.dtype | None
    """The dtype of its tensors, or None if values are Python objects."""
    shape: tuple[int, ...] = ()
    ragged: bool = False
    """Whether each row is a list of its own length: a tensor of one dimension."""


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
    def nbytes(self) -> int:
        """Bytes of memory that the column takes."""
        arrays = (self.valid, self.offsets)
        python = isinstance(self.values, pa.Array | pa.ChunkedArray)
        own = self.values.get_total_buffer_size() if python else self.values.nbytes
        return int(own) + sum(array.nbytes for array in arrays if array is not None)

    def row(self, k: int) -> Any:
        """Return the value of one row of a column that is not dense: the tensor of a list, or a Python value."""
        if self.offsets is not None:
            return self.values[self.offsets[k] : self.offsets[k + 1]].clone()
        return self.values[k].as_py()


def kind_of(field: pa.Field) -> Kind:
    """Return how a column is read. Raises TypeError, which names the column, if it cannot be read."""
    kind, types = field.type, pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if _is_text(kind):
        return Kind(None)
    ragged = types.is_list(kind) or types.is_large_list(kind)
    found = _dense_kind(kind.value_type if ragged else kind)
    if found is None or (ragged and found.shape):
        raise TypeError(
            f"column {field.name!r} has type {field.type}, which cannot become a tensor. Cast the column in the file, "
            "or leave it out with columns="
        )
    return Kind(found.dtype, found.shape, ragged)


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return any(getattr(types, f"is_{name}", bool)(kind) for name in names) or bool(
        types.is_fixed_size_binary(kind)
    )


def _dense_kind(kind: pa.DataType) -> Kind | None:
    """Return dtype and shape of rows that all have the same shape, or None if the rows differ in shape."""
    if isinstance(kind, pa.FixedShapeTensorType):
        inner = _dense_kind(kind.value_type)
        return None if inner is None else Kind(inner.dtype, _logical_shape(kind))
    if pa.types.is_fixed_size_list(kind):
        inner = _dense_kind(kind.value_type)
        return None if inner is None else Kind(inner.dtype, (kind.list_size, *inner.shape))
    if pa.types.is_boolean(kind):
        return Kind(torch.bool)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        # `to_pandas_dtype()` imports pandas, and some versions of pyarrow need it.
        return Kind(torch.from_numpy(np.empty(0, np.from_dlpack(pa.nulls(0, kind)).dtype)).dtype)
    return None


def _logical_shape(kind: pa.FixedShapeTensorType) -> tuple[int, ...]:
    order = kind.permutation
    return tuple(kind.shape) if order is None else tuple(kind.shape[axis] for axis in order)


def fill_value(field: pa.Field, value: Any) -> Any:
    """Return the value that replaces nulls in a column: a number for NumPy, or an Arrow scalar. Raises TypeError."""
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    while not _is_text(kind) and hasattr(kind, "value_type"):
        kind = kind.value_type
    try:
        # Arrow cannot convert Python's numbers to float16.
        scalar = pa.scalar(value, pa.float32() if pa.types.is_float16(kind) else kind)
        if scalar.is_valid and not pa.types.is_floating(kind) and scalar.as_py() != value:
            raise ValueError(f"{value!r} would become {scalar}")
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"fill: {value!r} is not a value of column {field.name!r}, of type {field.type}. Give each column its own "
            "value: fill={column: value}"
        ) from error
    if not scalar.is_valid:
        raise TypeError(
            f"fill: the value for column {field.name!r} is None. Leave the column out of fill"
        )
    return scalar if _is_text(kind) else scalar.as_py()


def decoded(array: pa.ChunkedArray, kind: Kind, fill: Any = None) -> Column:
    """Return a column in memory of its own, with nulls filled if `fill` is given."""
    if kind.dtype is None:
        return _python_values(array, fill)
    array = array.combine_chunks()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if not kind.ragged:
        values, valid = _dense(array)
        if valid is not None and fill is not None:
            values[~valid] = fill
            valid = None
        whole = None if valid is None else np.all(valid.reshape(len(valid), -1), axis=1)
        return Column(torch.from_numpy(np.ascontiguousarray(values)), whole)
    offsets = array.offsets.to_numpy().astype(np.int64)
    begin, end = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    values, valid = _dense(array.values.slice(begin, end - begin))
    offsets -= begin
    rows = _valid(array)
    if valid is not None and fill is not None:
        values[~valid] = fill
    elif valid is not None:
        nulls = np.concatenate([[0], np.cumsum(~valid)])
        whole = nulls[offsets[1:]] == nulls[offsets[:-1]]
        rows = whole if rows is None else whole & rows
    return Column(torch.from_numpy(values), rows, offsets)


def _python_values(array: pa.ChunkedArray, fill: Any) -> Column:
    if fill is not None and array.null_count:
        if pa.types.is_dictionary(array.type):
            array = array.cast(array.type.value_type)
        array = array.fill_null(fill)
    valid = array.is_valid().to_numpy() if array.null_count else None
    return Column(array.chunk(0) if array.num_chunks == 1 else array, valid)


def _valid(array: pa.Array) -> NDArray[np.bool_] | None:
    found: NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return found if array.null_count else None


def _dense(array: pa.Array) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Return the values, [rows, *shape], and a mask of those that are not null, or None if none is null."""
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        values, valid = _dense(array.storage)
        shape = (len(array), *kind.shape)
        order = (0, *(axis + 1 for axis in kind.permutation or range(len(kind.shape))))
        values = values.reshape(shape).transpose(order)
        return values, None if valid is None else valid.reshape(shape).transpose(order)
    if not pa.types.is_fixed_size_list(kind):
        return _numbers(array), _valid(array)
    size = kind.list_size
    # Not `flatten()`, which leaves out the elements of rows that are null.
    values, valid = _dense(array.values.slice(array.offset * size, len(array) * size))
    values = values.reshape(len(array), size, *values.shape[1:])
    rows = _valid(array)
    if valid is not None:
        valid = valid.reshape(values.shape)
    if rows is not None:
        rows = np.broadcast_to(rows.reshape(-1, *[1] * (values.ndim - 1)), values.shape)
        valid = rows if valid is None else valid & rows
    return values, valid


def _numbers(array: pa.Array) -> NDArray[Any]:
    """Return the numbers of an array without lists. The number at a null is undefined."""
    if pa.types.is_boolean(array.type):
        return _numbers(array.cast(pa.uint8())).view(np.bool_)
    dtype = np.from_dlpack(pa.nulls(0, array.type)).dtype
    memory = array.buffers()[1]
    if memory is None or not len(array):
        return np.zeros(len(array), dtype)
    # A copy: Arrow's memory must not be written to, and would keep the file's other columns alive.
    return np.frombuffer(memory, dtype, len(array), array.offset * dtype.itemsize).copy()


def rows_as_list(column: Column, kind: Kind, rows: Sequence[int]) -> list[Any]:
    """Return the value of a column at each of `rows`: a copy as a tensor, or a Python value."""
    if kind.dtype is None or kind.ragged:
        return [column.row(k) for k in rows]
    return [*torch.from_numpy(column.values.numpy()[rows])]
