"""Tensors and arrays become Arrow columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from fastload.store.fields import STORED_AS, is_number

_NUMBERS = "iuf"  # kinds of NumPy's dtypes


def record_batch(columns: Any) -> pa.RecordBatch:
    """Return columns as an Arrow record batch. All have the same length, and dim 0 is the row.

    Args:
        columns: a mapping of names to tensors, arrays, or sequences of strings, bytes, or arrays of one shape; an Arrow
            record batch or table; a pandas frame.

    A one-dimensional column of numbers becomes a plain Arrow column, and one of more dimensions a `fixed_shape_tensor`.
    Raises TypeError and ValueError with the name of the column, and of the row if one is at fault.
    """
    if isinstance(columns, pa.Table | pa.RecordBatch):
        columns.validate(full=True)  # it may map a damaged file, and Arrow does not check
    if isinstance(columns, pa.Table):
        batches = columns.combine_chunks().to_batches()
        if len(batches) > 1:
            raise ValueError(
                f"a table of {columns.num_rows:,} rows has more than 2 GiB in a column of texts or bytes, too much for "
                "one part. Give an iterable of smaller tables, such as table.to_batches()"
            )
        columns = batches[0] if batches else pa.RecordBatch.from_pylist([], schema=columns.schema)
    if isinstance(columns, pa.RecordBatch):
        pairs = [_of_arrow(field, columns.column(field.name)) for field in columns.schema]
    else:
        if not hasattr(columns, "items") and hasattr(columns, "to_dict"):
            columns = columns.to_dict()  # a frame of polars
        if not hasattr(columns, "items"):  # a mapping and a frame of pandas have them
            raise TypeError(
                "a part must be a mapping of names to columns, a record batch, a table or a frame, got "
                f"{columns!r:.80}. Read a file with its own library first, and give what that returns"
            )
        pairs = [_named(str(name), values) for name, values in columns.items()]
    if not pairs:
        raise ValueError("a part must have at least one column")
    lengths = {field.name: len(array) for field, array in pairs}
    if len(lengths) < len(pairs):
        raise ValueError(
            f"two columns have the same name: {[field.name for field, _ in pairs]}. Rename one"
        )
    if len(set(lengths.values())) > 1:
        raise ValueError(f"all columns of a part must have the same length, got {lengths}")
    schema = pa.schema([field for field, _ in pairs])
    return pa.RecordBatch.from_arrays([array for _, array in pairs], schema=schema)


@contextmanager
def naming(part: str) -> Iterator[None]:
    """Add the name of the part to errors of the block."""
    try:
        yield
    except UnicodeError:  # it is not made of one text
        raise
    except (TypeError, ValueError) as error:
        raise type(error)(f"{part}: {error}") from error


def _named(name: str, values: Any) -> tuple[pa.Field, pa.Array]:
    """Return a column as Arrow's. Raises TypeError or ValueError, which name the column."""
    try:
        return _column(name, values)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        if f"column {name!r}" in str(error):
            raise
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"column {name!r} cannot be stored in a set: {error}") from error


def _column(name: str, values: Any) -> tuple[pa.Field, pa.Array]:
    if isinstance(values, torch.Tensor):
        return _of_tensor(name, values)
    if isinstance(values, pa.ChunkedArray | pa.Array):
        values.validate(full=True)
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.Array):
        return _of_arrow(pa.field(name, values.type), values)
    if isinstance(values, str | bytes):
        raise ValueError(
            f"column {name!r}: expected a row for each sample, got one text, {values!r:.40}"
        )
    if not isinstance(values, np.ndarray):
        _expect_no_nulls(name, values)
        # A pandas series gives its values. A frame stores strings and cells that are arrays as objects.
        values = values.to_numpy() if hasattr(values, "to_numpy") else _stacked(name, values)
    if np.ma.is_masked(values):
        row = int(np.argwhere(np.ma.getmaskarray(values))[0][0])
        raise _null(name, row, "is masked")
    if isinstance(values, np.ndarray) and values.dtype == object:
        values = _stacked(name, values)
    if isinstance(values, np.ndarray) and (values.dtype == bool or values.dtype.kind in _NUMBERS):
        writable = np.require(values, requirements=["C", "W"])  # torch warns of memory that is not
        return _of_tensor(name, torch.from_numpy(writable))
    return _of_arrow(pa.field(name, pa.null()), pa.array(list(values)))


def _expect_no_nulls(name: str, values: Any) -> None:
    """Raise ValueError if a nullable series has a null. An array would show it as NaN, and integers as floats."""
    if isinstance(getattr(values, "dtype", None), np.dtype) or not hasattr(values, "to_numpy"):
        return
    nulls = getattr(values, "isna", None) or getattr(values, "is_null", None)
    absent = np.flatnonzero(np.asarray(nulls() if nulls else []))
    if absent.size:
        raise _null(name, absent[0], "is null")


def _null(name: str, row: int, what: str) -> ValueError:
    return ValueError(
        f"column {name!r}, row {row} {what}, and a set has no nulls. Fill or drop them"
    )


def _stacked(name: str, values: Iterable[Any]) -> Any:
    """Return cells as one array if they are arrays or numbers, or else as a list of strings or bytes."""
    cells = list(values)
    kinds = {type(cell) for cell in cells}
    if kinds <= {str} or kinds <= {bytes}:
        return cells
    if type(None) in kinds:
        row = next(row for row, cell in enumerate(cells) if cell is None)
        raise ValueError(
            f"column {name!r}, row {row}: expected a value like those of the other rows, got nothing"
        )
    for row, cell in enumerate(cells):
        if isinstance(cell, str | bytes):
            raise ValueError(
                f"column {name!r}, row {row}: expected a value like those of the other rows, got text, {cell!r:.40}"
            )
    shapes = {np.shape(cell) for cell in cells}
    if len(shapes) > 1:
        raise ValueError(
            f"column {name!r}: all rows must have the same shape, got {sorted(shapes)[:3]}"
        )
    if not cells:
        return np.empty(0)
    arrays = [np.asarray(cell) for cell in cells]
    stacked = np.stack(arrays)
    if stacked.dtype.kind == "f" and all(array.dtype.kind in "iub" for array in arrays):
        raise ValueError(
            f"column {name!r}: no integer dtype holds the values of all rows (found "
            f"{sorted({str(array.dtype) for array in arrays})}). Give all rows the same dtype"
        )
    return stacked


def _of_tensor(name: str, tensor: torch.Tensor) -> tuple[pa.Field, pa.Array]:
    if not tensor.dim():
        raise ValueError(f"column {name!r}: expected a row for each sample, got a single value")
    tensor = tensor.detach().cpu().contiguous()
    metadata = None
    dtype = str(tensor.dtype).removeprefix("torch.")
    if stored_as := STORED_AS.get(dtype):
        metadata = {"fastload": json.dumps({"dtype": dtype})}
        tensor = tensor.view(getattr(torch, stored_as))
    try:
        array = tensor.numpy()
        kind = pa.from_numpy_dtype(array.dtype)
    except (TypeError, pa.ArrowException):
        raise TypeError(f"column {name!r}: a set cannot store the dtype {tensor.dtype}") from None
    # Not `pa.array()`, because its first call imports pandas if that is installed, which takes seconds.
    flat = pa.Array.from_buffers(kind, array.size, [None, pa.py_buffer(array.reshape(-1))])
    if tensor.dim() > 1:
        shape = list(tensor.shape[1:])
        size = int(np.prod(shape))
        if not size:
            raise ValueError(f"column {name!r}: rows of shape {shape} have no values")
        storage = pa.FixedSizeListArray.from_arrays(flat, size)
        flat = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(kind, shape), storage)
    return pa.field(name, flat.type, nullable=False, metadata=metadata), flat


def _of_arrow(field: pa.Field, array: pa.Array) -> tuple[pa.Field, pa.Array]:
    """Return an Arrow column unchanged, or as a tensor if its lists have one length. Raise ValueError for nulls."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()  # a value of the dictionary may be null
    if array.null_count:
        row = array.is_null().index(True).as_py()
        raise _null(field.name, row, "is null")
    array = _fixed(array)
    _expect_whole_rows(field, array)
    if pa.types.is_boolean(array.type):
        return _of_tensor(field.name, torch.from_numpy(array.to_numpy(zero_copy_only=False)))
    if pa.types.is_fixed_size_list(array.type) and is_number(array.type.value_type):
        values = array.flatten()
        rows = np.frombuffer(values.buffers()[1], np.from_dlpack(pa.nulls(0, values.type)).dtype)
        rows = rows[values.offset : values.offset + len(values)]
        return _of_tensor(field.name, torch.from_numpy(rows.reshape(len(array), -1).copy()))
    return pa.field(field.name, array.type, nullable=False, metadata=field.metadata), array


def _fixed(array: pa.Array) -> pa.Array:
    """Return lists of numbers as lists of a fixed size, if all have one length."""
    kind = array.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not is_number(
        kind.value_type
    ):
        return array
    lengths = array.value_lengths().unique()
    if len(lengths) != 1 or not lengths[0].as_py():
        return array
    return array.cast(pa.list_(kind.value_type, lengths[0].as_py()))


def _expect_whole_rows(field: pa.Field, array: pa.Array) -> None:
    """Raise ValueError if a row of a tensor has a null, or if its values are not in row-major order."""
    if isinstance(field.type, pa.FixedShapeTensorType):
        permutation = field.type.permutation
        if permutation and permutation != sorted(permutation):
            raise ValueError(
                f"column {field.name!r}: a set stores tensors in row-major order, got {field.type}. "
                "Write the column without a permutation"
            )
        array = array.storage
    if not pa.types.is_fixed_size_list(array.type):
        return
    values = array.flatten()
    if values.null_count:
        row = values.is_null().index(True).as_py() // array.type.list_size
        raise _null(field.name, row, "has a null among its values")
