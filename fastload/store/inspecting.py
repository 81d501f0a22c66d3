"""Descriptions of sets of columns, for `fastload inspect`, `fastload store info` and `fastload store ls`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import accumulate, islice
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from fastload.datasets.manifest import INDEX, Index, read_index
from fastload.datasets.packed.packing import counted, size_text
from fastload.errors import PackedDataError
from fastload.store.columns import shape_of, torch_dtype
from fastload.store.dataset import SetDataset
from fastload.store.parts import is_here, open_part
from fastload.store.root import is_alive

_LONGEST = 60
"""Maximum number of characters of a value."""


def inspect(path: str | os.PathLike[str], *, records: int = 5) -> str:
    """Describe the set of columns at `path` in lines: rows, columns, parts, how it was made, first rows.

    Raise FileNotFoundError and `PackedDataError` if the set, or a part with one of these rows, cannot be read.
    """
    path = os.path.abspath(path)
    index = read_index(path)
    size = sum(shard.bytes for shard in index.shards)
    checked = sum(shard.checksum is not None for shard in index.shards)
    made = {name: value for name, value in index.made.items() if name != "owner"}
    lines = [
        f"{path}: {counted(index.rows, 'row')}, mode {index.mode}, {counted(len(index.classes), 'class', 'classes')}",
        f"{counted(len(index.shards), 'part')}, {size_text(size)}, {checked:,} with checksums; {_places(path, index)}",
        *(f"column {name}: {kind}" for name, kind in columns_of(path, index).items()),
        f"id: {index.id}",
        "made: " + (", ".join(f"{name} {_text(value)}" for name, value in made.items()) or "-"),
        *([f"temporary: {ownership(index)}"] if ownership(index) else []),
        f"index: {os.path.join(path, INDEX)}",
        *_first_rows(path, index, records),
    ]
    return "\n".join(lines)


def columns_of(path: str, index: Index) -> dict[str, str]:
    """Return dtype and row shape of each column; its Arrow type if it has no dtype, or if no part is here to ask."""
    here = _first_here(path, index)
    kinds = dict(index.schema)
    if here is not None:
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
    nodes: dict[str, int] = {}
    for shard in index.shards:
        nodes[shard.node] = nodes.get(shard.node, 0) + 1
    named = ", ".join(f"{node} {count:,}" for node, count in nodes.items() if node)
    return f"{here:,} here" + (f"; by node: {named}" if named else "")


def _first_here(path: str, index: Index) -> int | None:
    numbers = range(len(index.shards))
    return next((k for k in numbers if is_here(path, index.shards[k])), None)


def _kind(field: pa.Field) -> str:
    dtype = torch_dtype(field)
    if dtype is None:
        return str(field.type)
    return str(dtype).removeprefix("torch.") + (
        str(list(shape_of(field))) if shape_of(field) else ""
    )


def _first_rows(path: str, index: Index, records: int) -> list[str]:
    """Return a line for each of the first rows of the first part that is here."""
    number = _first_here(path, index)
    if number is None or not records:
        return []
    begin = [0, *accumulate(shard.rows for shard in index.shards)][number]
    rows = np.arange(begin, begin + min(records, index.shards[number].rows))
    names = [name for name, _ in index.schema]
    dataset = SetDataset(path, data=names, rows=rows)
    lines = []
    for row, sample in zip(rows.tolist(), dataset.__getitems__(range(len(rows))), strict=True):
        values = [sample] if len(names) == 1 else sample
        texts = (f"{name} {_text(value)}" for name, value in zip(names, values, strict=True))
        lines.append(f"row {row:,}: " + ", ".join(texts))
    return lines


def _text(value: Any) -> str:
    """Return a value as a string, cut off if it is long."""
    if isinstance(value, torch.Tensor) and value.dim():
        first = [f"{one:.4g}" for one in islice(value.flatten().tolist(), 6)]
        return f"[{' '.join(first)}{' ...' if value.numel() > len(first) else ''}]"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    text = str(value.item()) if isinstance(value, torch.Tensor) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."
