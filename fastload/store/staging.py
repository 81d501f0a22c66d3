"""Copying a set of columns to the node's own disk or memory, for `fastload set stage`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from fastload.datasets.manifest import Index
from fastload.datasets.packed.staging import Staged, copy_set
from fastload.errors import PackedDataError
from fastload.store.pieces import parts_elsewhere, pieces, read_columns_index
from fastload.store.root import check_name, default_root, in_memory, open_root


def stage(source: str | os.PathLike[str], target: str | os.PathLike[str], **how: Any) -> Staged:
    """Copy the set of columns at `source` to the folder `target`, or reuse a valid copy there.

    `fastload.store.get(target)` opens the copy. It has the id of `source`, and all its parts are in `target`. So the
    copy of a temporary set, or of parts of several nodes, is an ordinary set.

    See `fastload.datasets.packed.staging.stage` for the arguments in `how`, for resuming a copy, and for the
    errors. For a part without a checksum, only the form is checked, and not the values.
    Raise `PackedDataError` if some parts of `source` are only on other nodes, and ValueError if a set cannot have the
    name of `target`. Memory: 4 MiB per worker.
    """
    source, target = os.path.abspath(source), os.path.abspath(target)
    index = read_columns_index(source)
    elsewhere = parts_elsewhere(source, index)
    if elsewhere:
        count = sum(len(shards) for shards in elsewhere.values())
        raise PackedDataError(
            source,
            f"{count} of {len(index.shards)} parts are not here, but on {', '.join(elsewhere)}. "
            "Copy the set from a folder that has all its parts",
        )
    root, name = os.path.split(target)
    check_name(name)
    if root == default_root():
        open_root(None)  # for this user alone
    copied, durable = _index_of_copy(index), not in_memory(target)
    return copy_set(source, target, copied, pieces, durable=durable, **how)


def _index_of_copy(index: Index) -> Index:
    """Return the index of a copy: no part lies on another node, and no process owns it."""
    shards = tuple(dataclasses.replace(shard, node="") for shard in index.shards)
    made = {name: value for name, value in index.made.items() if name != "owner"}
    return dataclasses.replace(index, shards=shards, made=made)
