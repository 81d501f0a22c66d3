"""Arrow memory that came from another process or out of a file, checked before it is read. Needs pyarrow."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


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
