"""The bytes of the shards of a packed set. All knowledge of them is here.

`fastload.datasets.manifest` says what lies in the folder of a set. A shard has record batches of bounded size.
First come fastload's columns: `payload` (large_binary), in mode "raw" `height` and `width` (int32), `label` (int64),
`source` (string) and `checksum` (uint32: CRC-32 of the payload). The user's columns follow. Any Arrow tool reads it.

Every byte is under a checksum. The checksum of a record covers its payload. That of a shard, in the index, covers all
bytes between the payloads, in the order of the file. That of the index is in the index, which has only one valid form.
CRC-32 is in the standard library, releases the GIL from 5 KB on, and finds every burst of up to 32 wrong bits. It runs
at 1.5 GB/s on one common core, sha256 at 0.5 GB/s. It finds faults, but not forged sets: so the reader compares sizes
with that of the file before it allocates memory.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastload.datasets.manifest import (
    FORMAT,
    INDEX,
    VERSION,
    Index,
    Mode,
    Shard,
    described,
    expect_size,
)
from fastload.errors import PackedDataError

MODES: tuple[Mode, ...] = ("encoded", "jpeg", "raw")
BATCH_BYTES = 16 * 2**20  # of payload in a record batch; a larger record has a batch of its own
BATCH_RECORDS = 4096
MAX_SIDE = 2**20  # of a raw image; the product of two of them and 3 is far below 2**63


@dataclass
class Columns:
    """Columns of records, checked. Row k of each is record k.

    `begins` and `lengths` (int64, bytes) are the positions of payloads in the file: inside it and end to end. `sides`
    are the height and width of raw images, int32[rows, 2]. `seen` marks the records whose payload was verified.
    """

    begins: NDArray[np.int64]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]
    checksums: NDArray[np.uint32]
    sides: NDArray[np.int32] | None
    seen: NDArray[np.bool_]

    def hold(self, table: Table, first: int, stop: int) -> Table:
        """Copy a shard's columns to records `first` to `stop`. Return its table with views of the copies."""
        parts = {}
        for field in fields(Columns):
            whole = getattr(self, field.name)
            if whole is not None:
                parts[field.name] = part = whole[first:stop]
                # Another thread may have read the shard, and marked records.
                if field.name != "seen":
                    part[:] = getattr(table, field.name)
        return replace(table, **parts)


@dataclass
class Table(Columns):
    """The columns of one shard. `extras` are the batches of the requested columns, `batch_ends` the ends of each."""

    extras: list[pa.RecordBatch]
    batch_ends: NDArray[np.int64]


def fault_of(payload: memoryview, columns: Columns, row: int) -> str:
    """Return "" if a payload has the checksum of its record, and what is wrong if not."""
    found, expected = zlib.crc32(payload), int(columns.checksums[row])
    if found == expected:
        return ""
    return f"the payload has checksum {found:#010x}, expected {expected:#010x}. It is damaged"


def columns_of(index: Index) -> Columns:
    """Return the columns of all shards, end to end. Until a shard is read, its columns cost no memory."""
    n = index.rows
    return Columns(
        begins=np.empty(n, np.int64),
        lengths=np.empty(n, np.int64),
        labels=np.empty(n, np.int64),
        checksums=np.empty(n, np.uint32),
        sides=np.empty((n, 2), np.int32) if index.mode == "raw" else None,
        seen=np.zeros(n, np.bool_),
    )


def schema_of(mode: Mode, extras: Sequence[pa.Field] = ()) -> pa.Schema:
    """Return the schema of a shard: fastload's columns, then the user's columns `extras`."""
    sides = [pa.field(name, pa.int32(), nullable=False) for name in ("height", "width")]
    fields = [
        pa.field("payload", pa.large_binary(), nullable=False),
        *(sides if mode == "raw" else []),
        pa.field("label", pa.int64(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("checksum", pa.uint32(), nullable=False),
    ]
    own = {field.name for field in fields}
    for field in extras:
        if field.name in own or field.name in ("height", "width"):
            raise ValueError(
                f"an extra column cannot be named {field.name!r}, because fastload uses that name. Choose another name"
            )
        own.add(field.name)
    if len(own) != len(fields) + len(extras):
        raise ValueError(f"two columns have the same name: {[field.name for field in extras]}")
    for field in extras:
        if pa.types.is_dictionary(field.type):
            raise ValueError(
                f"the column {field.name!r} is dictionary-encoded, but a file can hold only one dictionary per "
                f"column. Cast the column to {field.type.value_type}"
            )
    about = {"fastload": json.dumps({"format": FORMAT, "version": VERSION, "mode": mode})}
    schema = pa.schema([*fields, *extras], metadata=about)
    return pa.ipc.read_schema(schema.serialize())  # as a file returns it: maps lose names


def packed_index(path: str, index: Index) -> Index:
    """Return the index of the set at `path`. Raises `PackedDataError` if it is not that of a packed set."""
    if index.mode not in MODES:
        raise PackedDataError(path, "this is a set of columns. Read it with fastload.store.get()")
    own = described(schema_of(index.mode))
    if index.schema[: len(own)] != own:
        reason = f"{INDEX} has the columns {index.schema}, but {own} must come first"
        raise PackedDataError(path, reason)
    return index


def read_table(
    path: str,
    index: Index,
    shard: Shard,
    size: int,
    read: Callable[[memoryview, int], int],
    *,
    columns: Sequence[str] = (),
) -> Table:
    """Read and check all of a shard except its payloads. Keep `columns` in Arrow's own form.

    `read` fills a buffer from an offset of the file, which has `size` bytes, and returns how many it has read.

    It reads the bytes between the payloads into an anonymous map as long as the file, at the same offsets. The map
    costs memory only where it is written. A truncated file cannot kill its reader, and Arrow copies nothing out of the
    map.
    """

    def fail(reason: str, record: int | None = None) -> PackedDataError:
        return PackedDataError(path, reason, shard=shard.name, record=record)

    expect_size(path, shard, size)
    sparse = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    sparse.madvise(mmap.MADV_NOHUGEPAGE)  # or each batch's columns would cost 2 MiB and more
    found, at = 0, 0
    with memoryview(sparse) as whole:
        for start, length in (*shard.payload, (size, 0)):
            with whole[at:start] as piece:
                if (count := read(piece, at)) < start - at:
                    raise fail(f"the file was cut off at byte {at + count:,} while it was read")
                found = zlib.crc32(piece, found)
            at = start + length
    if found != shard.checksum:
        raise fail(
            f"the columns have checksum {found:#010x}, expected {shard.checksum:#010x}. They are damaged"
        )
    try:
        source = pa.py_buffer(sparse)
        reader = pa.ipc.open_file(source)
        batches = [reader.get_batch(k) for k in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate(full=True)  # offsets and strings of all columns; reads no payload
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise fail(f"is not an Arrow file: {error}") from error
    try:
        return _table(index, shard, batches, source.address, columns)
    except ValueError as error:
        raise fail(str(error)) from error


def _table(
    index: Index, shard: Shard, batches: list[pa.RecordBatch], base: int, columns: Sequence[str]
) -> Table:
    if len(batches) != len(shard.payload) or sum(b.num_rows for b in batches) != shard.rows:
        rows = sum(b.num_rows for b in batches)
        raise ValueError(
            f"has {rows} records in {len(batches)} batches, expected {shard.rows} in {len(shard.payload)}"
        )
    begins, lengths = [], []
    for batch, extent in zip(batches, shard.payload, strict=True):
        if described(batch.schema) != index.schema:
            raise ValueError(f"has the columns {described(batch.schema)}, expected {index.schema}")
        # `validate` has checked that the offsets ascend from 0 and end within the data.
        payload = batch.column("payload")
        _, offsets_buffer, data = payload.buffers()
        offsets = np.frombuffer(offsets_buffer, np.int64, batch.num_rows + 1)
        length = int(offsets[-1])
        found = (data.address - base if length else extent[0], length)
        if found != extent or offsets[0] or payload.null_count:
            raise ValueError(f"has payloads at (offset, bytes) {found}, expected {extent}")
        begins.append(extent[0] + offsets[:-1])
        lengths.append(np.diff(offsets))

    def numbers(name: str, dtype: type) -> NDArray[Any]:
        if any(batch.column(name).null_count for batch in batches):
            raise ValueError(f"has records without a {name}")
        # Not `to_numpy()`: that imports pandas where it is installed, hundreds of milliseconds in the first sample.
        columns = [batch.column(name) for batch in batches if batch.num_rows]
        return np.concatenate([np.frombuffer(c.buffers()[1], dtype, len(c)) for c in columns])

    table = Table(
        begins=np.concatenate(begins),
        lengths=np.concatenate(lengths),
        labels=numbers("label", np.int64),
        checksums=numbers("checksum", np.uint32),
        sides=None,
        seen=np.zeros(shard.rows, dtype=np.bool_),
        extras=[batch.select(list(columns)) for batch in batches] if columns else [],
        batch_ends=np.cumsum([batch.num_rows for batch in batches]),
    )
    if index.mode == "raw":
        table.sides = np.stack([numbers("height", np.int32), numbers("width", np.int32)], axis=1)
        sides = table.sides.astype(np.int64)
        good = ((sides > 0) & (sides <= MAX_SIDE)).all(axis=1)
        good &= sides.prod(axis=1) * 3 == table.lengths
        if not good.all():
            row = int(np.argmin(good))
            height, width = sides[row]
            raise ValueError(
                f"record {row} has {table.lengths[row]} bytes for {height} x {width} pixels of 3 bytes"
            )
    return table


def payload_extents(batches: Sequence[pa.RecordBatch], base: int) -> tuple[tuple[int, int], ...]:
    """Return (offset, length) of the payloads of each batch of a file that is mapped at `base`."""
    extents = []
    for batch in batches:
        _, offsets, data = batch.column("payload").buffers()
        length = int(np.frombuffer(offsets, np.int64, batch.num_rows + 1)[-1])
        extents.append((data.address - base if length else offsets.address - base, length))
    return tuple(extents)
