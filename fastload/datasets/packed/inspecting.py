"""Descriptions of packed sets, for the command `fastload set inspect`. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain, islice

from fastload.datasets.manifest import INDEX, Index
from fastload.datasets.packed.format import read_packed_index, read_table
from fastload.datasets.packed.pieces import expect_payload, opened, read_piece


def inspect(path: str | os.PathLike[str], *, records: int = 5) -> str:
    """Describe the set at `path` in lines: schema, counts, sizes, how it was made, its first records.

    Raises FileNotFoundError and `PackedDataError`, as `PackedDataset`.
    """
    path = os.path.abspath(path)
    index = read_packed_index(path)
    size = sum(shard.bytes for shard in index.shards)
    payload = sum(length for shard in index.shards for _, length in shard.payload)
    lines = [
        f"{path}: {index.rows:,} records, mode {index.mode}, {len(index.classes):,} classes",
        f"{counted(len(index.shards), 'shard')}, {size_text(size)}; payloads {size_text(payload)}, "
        f"{size_text(payload / index.rows)} each",
        "columns: " + ", ".join(f"{name} {kind}" for name, kind in index.schema),
        "made: " + (", ".join(f"{name} {value}" for name, value in index.made.items()) or "-"),
        f"index: {os.path.join(path, INDEX)}",
        *islice(_records(path, index), records),
    ]
    return "\n".join(lines)


def _records(path: str, index: Index) -> Iterator[str]:
    """Yield a line for each record, whose payload is read and checked."""
    for shard in index.shards:
        with opened(path, shard) as fd:
            table = read_table(path, index, shard, fd, columns=["source"])
            sources = chain.from_iterable(batch.column("source") for batch in table.extras)
            for row, source in enumerate(sources):
                length, label = int(table.lengths[row]), int(table.labels[row])
                payload = read_piece(path, shard, fd, int(table.begins[row]), length)
                expect_payload(path, shard, table, row, payload)
                name = index.classes[label] if 0 <= label < len(index.classes) else ""
                where = f"{os.path.join(path, shard.name)}, record {row} ({source.as_py()})"
                yield f"{where}: {size_text(length)}, label {label} {name}".rstrip()


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def size_text(count: float) -> str:
    """Return a number of bytes with its unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
