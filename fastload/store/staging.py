"""Copies of a set on a node's own disk: once on each node, complete and checked, or not at all.

ROOT/.unsealed/NAME/                     the copy until it is complete
ROOT/.unsealed/NAME/index.json           which set is copied
ROOT/.unsealed/NAME/shard-00000.arrow    complete and checked as soon as it has this name
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from fastload._kit.disk import write_file
from fastload.datasets.manifest import INDEX, Index, Shard, dump_index
from fastload.datasets.packed.unfinished import content, expect_free, preparing
from fastload.errors import PackedDataError, UsageError
from fastload.store.root import check_name, default_root, open_root, seal
from fastload.store.shard_bytes import copy_shards, parts_elsewhere, pieces, read_set


@dataclass(frozen=True)
class Staged:
    """The result of staging. `bytes` counts the set's shards, `copied_bytes` what this call copied."""

    path: str
    bytes: int
    copied_bytes: int

    def __str__(self) -> str:
        if not self.copied_bytes:
            return f"{self.path}: all {self.bytes:,} bytes were copied before"
        return f"{self.path}: {self.copied_bytes:,} of {self.bytes:,} bytes copied"


def stage(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    workers: int | None = None,
    progress: bool = False,
    say: Callable[[str], None] | None = None,
) -> Staged:
    """Copy the set at `source` to the folder `target`, unless it is there already.

    Every byte is checked against the checksums of the set as it is copied. A copy that was killed resumes after its
    last complete shard. If several processes call this at once for one `target`, one copies and the others wait. If
    the first one dies, another resumes.

    A copied set of columns has the id of `source`, and all its parts are in `target`. For a part without a
    checksum, only the form is checked. A `rejected.txt` stays where it is.

    Args:
        workers: threads, each of which copies a shard at a time (default: one for each core of this process).
        progress: show a bar on a terminal.
        say: called with a sentence before this waits for another process.

    Memory: as `verify`.

    Raises FileNotFoundError if `source` is not a set, and `PackedDataError` if it is damaged, lacks parts of other
    nodes, or is replaced meanwhile. Raises FileExistsError if `target` has other content, or lacks a shard, and OSError
    if there is no room or it cannot be written. Raises UsageError if `target` is `source` or lies in it, or if a set of
    columns cannot have its name. After an error, `target` is what it was before.
    """
    source, target = os.path.abspath(source), os.path.abspath(target)
    index = _index_of_copy(source, target)
    inner, outer = os.path.realpath(target), os.path.realpath(source)
    if os.path.commonpath((inner, outer)) == outer:
        raise UsageError(
            f"{target}: this is the folder of the set itself, or is inside it. Name another folder for the copy"
        )
    root, name = os.path.split(target)
    if root == default_root():
        open_root(None)  # for this user alone
    waiting = f"{target}: waiting for another process that copies into this folder"
    missing: list[Shard] = []
    with preparing(root, name, wait=functools.partial(say, waiting) if say else True) as folder:
        if _is_there(target, index):
            shutil.rmtree(folder)
        else:
            expect_free(target)
            missing = _missing(folder, index)
            read = functools.partial(pieces, source, index)
            copy_shards(folder, read, missing, workers=workers, progress=progress)
            if _index_of_copy(source, target) != index:
                raise PackedDataError(source, "was replaced while it was copied. Copy it again")
            seal(folder, root, name, index)
    whole, copied = (sum(shard.bytes for shard in shards) for shards in (index.shards, missing))
    return Staged(target, whole, copied)


def _index_of_copy(source: str, target: str) -> Index:
    """Return the index of a copy, of which no part lies on another node."""
    index = read_set(source)
    if index.mode != "columns":
        return index
    check_name(os.path.basename(target))
    if elsewhere := parts_elsewhere(source, index):
        count = sum(len(shards) for shards in elsewhere.values())
        raise PackedDataError(
            source,
            f"{count} of {len(index.shards)} parts are not here, but on {', '.join(elsewhere)}. "
            "Copy the set from a folder that has all its parts",
        )
    shards = tuple(dataclasses.replace(shard, node="") for shard in index.shards)
    return dataclasses.replace(index, shards=shards)


def _is_there(target: str, index: Index) -> bool:
    """Return True if the copy is complete. Raise FileExistsError if it lacks a shard, or a part of it."""
    if content(os.path.join(target, INDEX)) != dump_index(index):
        return False
    for shard in index.shards:
        if not _has(target, shard):
            reason = f"this copy lacks {shard.name}, or a part of it. Delete it, and copy again"
            raise FileExistsError(errno.EEXIST, reason, target)
    return True


def _missing(folder: str, index: Index) -> list[Shard]:
    """Return the shards that a stopped copy lacks. Delete all that is not of this set."""
    note, encoded = os.path.join(folder, INDEX), dump_index(index)
    if content(note) != encoded:
        shutil.rmtree(folder)
        os.mkdir(folder)
        write_file(note, encoded)
    return [shard for shard in index.shards if not _has(folder, shard)]


def _has(folder: str, shard: Shard) -> bool:
    try:
        return os.path.getsize(os.path.join(folder, shard.name)) == shard.bytes
    except FileNotFoundError:
        return False
