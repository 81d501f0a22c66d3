"""Descriptions of sets, for `fastload set inspect` and `fastload set ls`. Need no torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastload.datasets.manifest import INDEX, Index, Shard
from fastload.datasets.packed.format import fault_of, read_table
from fastload.datasets.packed.texts import counted, size_text
from fastload.errors import PackedDataError
from fastload.store.fields import dtype_of, shape_of
from fastload.store.parts import is_here, open_part, python_value
from fastload.store.pieces import opened, read_piece, read_set
from fastload.store.root import is_alive

_LONGEST = 60
"""Maximum number of characters of a value."""


def inspect(path: str | os.PathLike[str], *, records: int = 5) -> str:
    """Describe the set at `path` in lines: rows, columns, parts, how it was made, first rows.

    Raise FileNotFoundError and `PackedDataError` if the set, or a part with one of these rows, cannot be read.
    """
    path = os.path.abspath(path)
    index = read_set(path)
    size = sum(shard.bytes for shard in index.shards)
    checked = sum(shard.checksum is not None for shard in index.shards)
    made = {name: value for name, value in index.made.items() if name != "owner"}
    first_rows = _first_rows if index.mode == "columns" else _first_records
    lines = [
        f"{path}: {counted(index.rows, 'row')}, mode {index.mode}, {counted(len(index.classes), 'class', 'classes')}",
        f"{counted(len(index.shards), 'part')}, {size_text(size)}, {checked:,} with checksums; {_places(path, index)}",
        *(f"column {name}: {kind}" for name, kind in columns_of(path, index).items()),
        *([f"id: {index.id}"] if index.id else []),
        "made: " + (", ".join(f"{name} {_text(value)}" for name, value in made.items()) or "-"),
        *([f"temporary: {ownership(index)}"] if ownership(index) else []),
        f"index: {os.path.join(path, INDEX)}",
        *islice(first_rows(path, index), records),
    ]
    return "\n".join(lines)


def columns_of(path: str, index: Index) -> dict[str, str]:
    """Return the dtype and the row shape of each column, or its Arrow type if it has no dtype or no part is here."""
    here = _first_here(path, index)
    kinds = dict(index.schema)
    if here is not None and index.mode == "columns":
        try:
            batch, _ = open_part(path, index.shards[here])
        except (PackedDataError, OSError):
            return kinds
        kinds.update({field.name: _kind(field) for field in batch.schema})
    return kinds


def ownership(index: Index) -> str:
    """Return which process owns a temporary set, and whether it ended; "" if the set is not temporary."""
    owner = index.made.get("owner")
    if not isinstance(owner, Mapping):
        return ""
    ended = "" if is_alive(dict(owner)) else ", which ended"
    return f"of process {owner.get('pid')} on {owner.get('node')}{ended}"


def _places(path: str, index: Index) -> str:
    """Return how many parts are here, and how many each node has."""
    here = sum(is_here(path, shard) for shard in index.shards)
    nodes = Counter(shard.node for shard in index.shards)
    named = ", ".join(f"{node} {count:,}" for node, count in nodes.items() if node)
    return f"{here:,} here" + (f"; by node: {named}" if named else "")


def _first_here(path: str, index: Index) -> int | None:
    numbers = range(len(index.shards))
    return next((k for k in numbers if is_here(path, index.shards[k])), None)


def _kind(field: pa.Field) -> str:
    dtype = dtype_of(field)
    return str(field.type) if dtype is None else dtype + str(list(shape_of(field)) or "")


def _first_rows(path: str, index: Index) -> Iterator[str]:
    """Yield a line for each row of the first part that is here."""
    number = _first_here(path, index)
    if number is None:
        return
    shard = index.shards[number]
    begin = sum(before.rows for before in index.shards[:number])
    batch, arrays = open_part(path, shard, index.schema)
    for at in range(shard.rows):
        values = {
            name: _numbers(arrays[name][0], arrays[name][1][at])
            if name in arrays
            else python_value(path, shard, batch, name, at)
            for name, _ in index.schema
        }
        texts = (f"{name} {_text(value)}" for name, value in values.items())
        yield f"row {begin + at:,}: " + ", ".join(texts)


def _first_records(path: str, index: Index) -> Iterator[str]:
    """Yield a line for each record of a packed set. Its payload is read and checked."""
    for shard in index.shards:
        with opened(path, shard) as fd:
            yield from _records(path, index, shard, fd)


def _records(path: str, index: Index, shard: Shard, fd: int) -> Iterator[str]:
    table = read_table(path, index, shard, fd, columns=["source"])
    sources = chain.from_iterable(batch.column("source") for batch in table.extras)
    for row, source in enumerate(sources):
        length, label = int(table.lengths[row]), int(table.labels[row])
        payload = read_piece(path, shard, fd, int(table.begins[row]), length)
        if fault := fault_of(payload, table, row):
            raise PackedDataError(path, fault, shard=shard.name, record=row)
        name = index.classes[label] if 0 <= label < len(index.classes) else ""
        where = f"{os.path.join(path, shard.name)}, record {row} ({source.as_py()})"
        yield f"{where}: {size_text(length)}, label {label} {name}".rstrip()


def _numbers(dtype: str, stored: Any) -> NDArray[Any]:
    """Return the numbers of a row, from the dtype that they are stored as."""
    row = np.asarray(stored)
    if dtype == "bfloat16":  # the upper half of a float32
        return (row.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return row.astype(dtype)


def _text(value: Any) -> str:
    """Return a value as a string, cut off if it is long."""
    if isinstance(value, np.ndarray) and value.ndim:
        first = [f"{one:.4g}" for one in value.flat[:6].tolist()]
        return f"[{' '.join(first)}{' ...' if value.size > len(first) else ''}]"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    text = str(value.item()) if isinstance(value, np.ndarray) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."
