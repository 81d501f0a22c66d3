"""Arrow memory that came from another process or out of a file, checked before it is read. Needs pyarrow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

SCHEMA = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])
"""The one column of messages of bytes."""


def checked(batch: Any, schema: pa.Schema) -> pa.RecordBatch:
    """Return a record batch of this schema whose buffers hold all its rows, without nulls. Raise ValueError for others.

    Arrow trusts the lengths and offsets in a message. Reading an unchecked batch may read beyond its memory.
    """
    if not isinstance(batch, pa.RecordBatch) or batch.schema != schema:
        raise ValueError(f"expected a record batch with the columns {schema.names}")
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise ValueError(f"the buffers of a record batch do not hold its rows: {error}") from error
    if any(column.null_count for column in batch.columns):
        raise ValueError("a record batch has nulls")
    return batch


def batch_of(content: NDArray[np.uint8]) -> pa.RecordBatch:
    """Return bytes as a record batch, without a copy. `pa.array` would import pandas."""
    array = pa.Array.from_buffers(pa.uint8(), len(content), [None, pa.py_buffer(content)])
    return pa.RecordBatch.from_arrays([array], schema=SCHEMA)


def bytes_of(batch: pa.RecordBatch) -> NDArray[np.uint8]:
    """Return the bytes of a batch, without a copy. Raise ValueError if it does not hold them."""
    column = checked(batch, SCHEMA).column(0)
    if not len(column):
        return np.empty(0, np.uint8)
    _, buffer = column.buffers()
    return np.frombuffer(buffer, np.uint8, len(column), column.offset)
