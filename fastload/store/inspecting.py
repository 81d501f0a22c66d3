"""Descriptions of sets, for `fastload set inspect` and `fastload set ls`. Need no torch."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pyarrow as pa

from fastload._kit.texts import counted, size_text
from fastload.datasets.manifest import INDEX, Index
from fastload.errors import PackedDataError
from fastload.store.fields import dtype_of, shape_of
from fastload.store.parts import is_here, open_part
from fastload.store.shard_bytes import read_set

_LONGEST = 60
"""Maximum number of characters of a value."""


def inspect(path: str | os.PathLike[str]) -> str:
    """Describe the set at `path` in lines: rows, parts, columns, and how it was made.

    Raise FileNotFoundError and `PackedDataError` if its index cannot be read.
    """
    path = os.path.abspath(path)
    index = read_set(path)
    size = sum(shard.bytes for shard in index.shards)
    checked = sum(shard.checksum is not None for shard in index.shards)
    made = ", ".join(f"{name} {_text(value)}" for name, value in index.made.items())
    lines = [
        f"{path}: {counted(index.rows, 'row')}, mode {index.mode}, {counted(len(index.classes), 'class')}",
        f"{counted(len(index.shards), 'part')}, {size_text(size)}, {checked:,} with checksums; {_places(path, index)}",
        *(f"column {name}: {kind}" for name, kind in columns_of(path, index).items()),
        *([f"id: {index.id}"] if index.id else []),
        f"made: {made or '-'}",
        f"index: {os.path.join(path, INDEX)}",
    ]
    return "\n".join(lines)


def columns_of(path: str, index: Index) -> dict[str, str]:
    """Return the dtype and the row shape of each column, or its Arrow type if it has no dtype or no part is here."""
    here = next((shard for shard in index.shards if is_here(path, shard)), None)
    kinds = dict(index.schema)
    if here is not None and index.mode == "columns":
        try:
            batch, _ = open_part(path, here)
        except (PackedDataError, OSError):
            return kinds
        kinds.update({field.name: _kind(field) for field in batch.schema})
    return kinds


def _places(path: str, index: Index) -> str:
    """Return how many parts are here, and how many each node has."""
    here = sum(is_here(path, shard) for shard in index.shards)
    nodes = Counter(shard.node for shard in index.shards)
    named = ", ".join(f"{node} {count:,}" for node, count in nodes.items() if node)
    return f"{here:,} here" + (f"; by node: {named}" if named else "")


def _kind(field: pa.Field) -> str:
    dtype = dtype_of(field)
    return str(field.type) if dtype is None else dtype + str(list(shape_of(field)) or "")


def _text(value: Any) -> str:
    """Return a value as a string, cut off if it is long."""
    text = " ".join(str(value).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."
