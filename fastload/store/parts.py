"""The parts of a set of columns: written once, opened without a copy."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from typing import Any

import pyarrow as pa

from fastload._kit.disk import open_file
from fastload.datasets.manifest import Shard, described, expect_size
from fastload.datasets.packed.shard_file import ShardFile
from fastload.errors import PackedDataError
from fastload.store.fields import Arrays, arrays_of
from fastload.store.room import expect_room, room_for
from fastload.store.root import in_memory, this_node

Schema = tuple[tuple[str, str], ...]
_FOOTER = b"ARROW1"
_OF_ARROW = (pa.ArrowException, OSError, MemoryError, ValueError)
"""Arrow's errors for damaged files."""


def write_part(path: str, batch: pa.RecordBatch, checksums: bool | None) -> Shard:
    """Write a record batch to a new file at `path`, and return its entry for the index.

    A part on a disk is synced, and all nodes see it. One in memory is of this node.

    Args:
        checksums: compute the checksum. None: on a disk only.

    Raises OSError, and StoreFullError if the file system has no room. The file is then deleted.
    """
    durable = not in_memory(path)
    checksum = durable if checksums is None else checksums
    expect_room(path, batch.nbytes)
    with (
        room_for(path, batch.nbytes),
        ShardFile(path, batch.schema, checksum=checksum, durable=durable) as file,
    ):
        file.append(batch)
        return replace(file.complete(), node="" if durable else this_node())


def python_value(folder: str, shard: Shard, batch: pa.RecordBatch, name: str, row: int) -> Any:
    """Return a value that is a Python object. Raise PackedDataError if it is none: nothing has looked at it before."""
    try:
        return batch.column(name)[row].as_py()
    except (ValueError, OverflowError) as error:
        reason = (
            f"column {name!r} has no valid value ({error}). Check the set with fastload set verify"
        )
        raise PackedDataError(folder, reason, shard=shard.name, record=row) from error


def is_here(folder: str, shard: Shard) -> bool:
    """Return True if a set has the file of a part in its folder."""
    return os.path.exists(os.path.join(folder, shard.name))


def open_part(
    folder: str, shard: Shard, schema: Schema | None = None, *, full: bool = False
) -> tuple[pa.RecordBatch, Arrays]:
    """Map a part. Return its columns, and those of numbers as arrays, in the mapped memory.

    The columns are checked by `arrays_of`, which reads no values unless `full`. The mapping is private: only this
    process sees what is written into it, and nothing reaches the file.
    Raises PackedDataError if the file is missing, cut off or damaged, has other rows, or columns other than `schema`.
    """

    def fail(reason: str) -> PackedDataError:
        return PackedDataError(folder, reason, shard=shard.name)

    try:
        with open_file(os.path.join(folder, shard.name)) as file:
            size = os.fstat(file.fileno()).st_size
            expect_size(folder, shard, size)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise fail("the file is missing") from None
    if mapped[-len(_FOOTER) :] != _FOOTER:
        raise fail("the file does not end like an Arrow file. It was cut off or changed")
    try:
        whole = pa.py_buffer(mapped)
        reader = pa.ipc.open_file(whole)
        # The file has its schema twice, and no checksum over the metadata that say what a bfloat16 is.
        if not reader.schema.equals(pa.ipc.read_schema(whole.slice(8)), check_metadata=True):
            raise ValueError("the schemas at its begin and its end differ")
        found = described(reader.schema)
        batch: Any = reader.get_batch(0) if reader.num_record_batches == 1 else None
    except _OF_ARROW as error:
        raise fail(f"is not an Arrow file: {error}") from error
    rows = None if batch is None else batch.num_rows
    if rows != shard.rows:
        raise fail(f"has {rows} rows in one batch, expected {shard.rows}. It was changed")
    if schema not in (None, found):
        raise fail(f"has the columns {found}, expected {schema}")
    try:
        return batch, arrays_of(batch, mapped, full=full)
    except _OF_ARROW as error:
        raise fail(f"is damaged: {error}") from error
