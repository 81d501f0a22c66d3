"""The columns of a part: the dtype and shape of their rows, and the rows as arrays. Needs no torch."""

from __future__ import annotations

import json
import mmap
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

STORED_AS = {"bool": "uint8", "bfloat16": "int16"}
"""Dtypes that Arrow lacks, or does not store as whole bytes, and the dtypes that store their bytes instead."""
# The same layout without the rule that the bytes are UTF-8: a check of it reads no string.
_WITHOUT_TEXT = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}


def is_number(kind: pa.DataType) -> bool:
    """Return True for integers and floats."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def dtype_of(field: pa.Field) -> str | None:
    """Return the name of a column's dtype, or None if its values are Python objects, such as strings.

    Raise ValueError if the metadata names a dtype that this column cannot hold.
    """
    kind = field.type.value_type if isinstance(field.type, pa.FixedShapeTensorType) else field.type
    if not is_number(kind):
        return None
    # `to_pandas_dtype()` imports pandas, and some versions of pyarrow need it.
    stored = np.from_dlpack(pa.nulls(0, kind)).dtype.name
    about = json.loads((field.metadata or {}).get(b"fastload", b"{}"))
    dtype = str(about["dtype"]) if isinstance(about, dict) and "dtype" in about else stored
    if STORED_AS.get(dtype, dtype) != stored:
        raise ValueError(f"column {field.name!r} has {stored}, which cannot hold {dtype:.40}")
    return dtype


def shape_of(field: pa.Field) -> tuple[int, ...]:
    """Return the shape of one row of a column."""
    kind = field.type
    return tuple(kind.shape) if isinstance(kind, pa.FixedShapeTensorType) else ()


Arrays = dict[str, tuple[str, NDArray[Any]]]
"""Columns of numbers by name: the name of the dtype, and an array [rows, *shape]."""


def arrays_of(batch: pa.RecordBatch, memory: mmap.mmap, *, full: bool) -> Arrays:
    """Return the columns of numbers as arrays that share the mapped `memory` of their part.

    Arrow does not check what it reads. So this raises ValueError if a column ends outside its memory, if its offsets
    fall, or if it has nulls. It reads offsets and no values. With `full`, it also reads strings and checks them.
    """
    batch.validate(full=full)
    arrays: Arrays = {}
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if column.null_count:
            raise ValueError(f"column {field.name!r} has nulls")
        without_text = _WITHOUT_TEXT.get(column.type)
        (column if without_text is None else column.view(without_text)).validate(full=True)
        if (dtype := dtype_of(field)) is not None:
            arrays[field.name] = dtype, _array(column, field, memory)
    return arrays


def _array(column: pa.Array, field: pa.Field, memory: mmap.mmap) -> NDArray[Any]:
    storage = column.storage if isinstance(column, pa.ExtensionArray) else column
    values = storage.flatten() if pa.types.is_fixed_size_list(storage.type) else storage
    dtype = np.from_dlpack(pa.nulls(0, values.type)).dtype
    # Arrow's own view of it is read-only.
    begin = values.buffers()[1].address - np.frombuffer(memory, np.uint8).ctypes.data
    found = np.frombuffer(memory, dtype, len(values), begin + values.offset * dtype.itemsize)
    return found.reshape(len(column), *shape_of(field))
