"""Copies of a set on a node's own disk: once on each node, complete and checked, or not at all.

DST/shard-00000.arrow   complete and checked as soon as it has this name
DST/index.json          written last: without it DST cannot be opened
DST/.staging/           the lock (it stays), and while copying, the future index and incomplete shards
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastload._kit.disk import (
    replace_file,
    sync_folder,
    write_all,
)
from fastload.datasets.manifest import INDEX, REJECTED, STAGING, Index, Shard, dump_index
from fastload.datasets.packed.unfinished import Unfinished, content
from fastload.errors import PackedDataError, in_one_line
from fastload.store.pieces import Pieces, each, parts_elsewhere, read_set
from fastload.store.root import check_name, default_root, in_memory, open_root
from fastload.store.verifying import faults_of


@dataclass(frozen=True)
class Staged:
    """The result of staging. `bytes` counts the set's shards, `copied_bytes` what this call copied."""

    path: str
    bytes: int
    copied_bytes: int
    seconds: float

    def __str__(self) -> str:
        if not self.copied_bytes:
            return f"{self.path}: all {self.bytes:,} bytes were copied before"
        rate = self.copied_bytes / 1e6 / max(self.seconds, 1e-9)
        return (
            f"{self.path}: {self.copied_bytes:,} of {self.bytes:,} bytes copied in {self.seconds:.1f} s, "
            f"{rate:,.1f} MB/s"
        )


def stage(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    verify: bool = False,
    workers: int | None = None,
    progress: bool = False,
    say: Callable[[str], None] | None = None,
) -> Staged:
    """Copy the set at `source` to the folder `target`, unless it is there already.

    Every byte is checked against the checksums of the set as it is copied. Shards that `target` already has are reused
    if their size is right, and with `verify` only if their checksums are right too. So a copy that was killed resumes
    after its last complete shard. If several processes call this at once for one `target`, one copies and the others
    wait. If the first one dies, another resumes.

    A copied set of columns has the id of `source`, and all its parts are in `target`. So the copy of a temporary set,
    or of parts of several nodes, is an ordinary set. For a part without a checksum, only the form is checked.

    Args:
        workers: threads, each of which copies a shard at a time (default: one for each core of this process).
        progress: show a bar on a terminal.
        say: called with a sentence before this waits for another process, and if it leaves out `rejected.txt`.

    Memory: as `verify`.

    Raises FileNotFoundError if `source` is not a set, and `PackedDataError` if it is damaged, or lacks parts of other
    nodes. Raises FileExistsError if `target` has other content, and OSError if it has no room or cannot be written.
    Raises ValueError if `target` is `source` or lies in it, or if a set of columns cannot have its name. After an
    error, `target` cannot be opened, or is the set that it was before.
    """
    began = time.monotonic()
    source, target = os.path.abspath(source), os.path.abspath(target)
    index = _index_of_copy(source, target)
    inner, outer = os.path.realpath(target), os.path.realpath(source)
    if os.path.commonpath((inner, outer)) == outer:
        raise ValueError(
            f"{target}: this is the folder of the set itself, or is inside it. Name another folder for the copy"
        )
    if os.path.dirname(target) == default_root():
        open_root(None)  # for this user alone
    folder = Unfinished(target, STAGING, durable=not in_memory(target))
    copy = _Copy(source, folder, index, {"workers": workers, "progress": progress})
    waiting = f"{target}: waiting for another process that copies into this folder"
    with folder.locked(functools.partial(say, waiting) if say else True):
        copy.claim()
        missing = copy.missing(verify=verify)
        if missing:
            copy.fetch(missing)
        copy.finish(say, changed=bool(missing))
    whole, copied = (sum(shard.bytes for shard in shards) for shards in (index.shards, missing))
    return Staged(target, whole, copied, time.monotonic() - began)


def _index_of_copy(source: str, target: str) -> Index:
    """Return the index of a copy: no part lies on another node, and no process owns it."""
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
    made = {name: value for name, value in index.made.items() if name != "owner"}
    return dataclasses.replace(index, shards=shards, made=made)


@dataclass(frozen=True)
class _Copy:
    """A copy in progress, by the one process that holds its lock."""

    source: str
    folder: Unfinished
    index: Index
    how: dict[str, Any]

    def claim(self) -> None:
        """Check that the folder is empty or has this set. Write down which set will be copied."""
        folder, encoded = self.folder, dump_index(self.index)
        held, begun = content(folder.name(INDEX)), content(folder.note(INDEX))
        shards, reason = folder.shards(), ""
        if held not in (None, encoded):
            reason = "the folder holds another set. Delete that set, or choose another folder"
        elif held is None and begun is None and shards:
            reason = f"the folder holds {shards[0]}, but neither an index nor a stopped copy. Choose another folder"
        if reason:
            raise FileExistsError(errno.EEXIST, reason, folder.path)
        if held is None and begun != encoded:
            for name in shards:  # of a stopped copy of another set, or of an older one
                os.unlink(folder.name(name))
            folder.publish(folder.note(INDEX), encoded)

    def missing(self, *, verify: bool) -> list[Shard]:
        """Return the shards that `target` lacks: missing, of another size or, with `verify`, damaged."""
        there = [shard for shard in self.index.shards if self._has_size(shard)]
        missing = [shard for shard in self.index.shards if shard not in there]
        if verify:
            found = each(
                faults_of, self.folder.path, self.index, there, what="Verifying", **self.how
            )
            missing += [shard for shard, faults in found if faults]
        return missing

    def fetch(self, missing: Sequence[Shard]) -> None:
        """Copy the `missing` shards, if there is room. Meanwhile `target` cannot be opened."""
        folder = self.folder
        if os.path.exists(folder.name(INDEX)):
            os.replace(folder.name(INDEX), folder.note(INDEX))
            if folder.durable:
                sync_folder(folder.path)
        for shard in missing:  # wrong shards, and pieces of a killed copy: they take room
            for path in (folder.name(shard.name), folder.note(shard.name)):
                with suppress(FileNotFoundError):
                    os.unlink(path)
        needed, free = sum(shard.bytes for shard in missing), shutil.disk_usage(folder.path).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"the copy needs {needed:,} bytes, but only {free:,} are free",
                folder.path,
            )
        for _ in each(
            self._copy_shard, self.source, self.index, missing, what="Staging", **self.how
        ):
            pass

    def _copy_shard(self, shard: Shard, pieces: Pieces) -> None:
        """Write a shard. It has a temporary name until it is complete."""
        partial, durable = self.folder.note(shard.name), self.folder.durable
        whole = replace_file(self.folder.name(shard.name), partial=partial, durable=durable)
        with whole as file:
            for piece in pieces(None):
                write_all(file.fileno(), partial, piece)

    def finish(self, say: Callable[[str], None] | None, *, changed: bool) -> None:
        """Write the index: now the folder is a set."""
        if changed or not os.path.exists(self.folder.name(INDEX)):
            rejected = None
            try:
                rejected = content(os.path.join(self.source, REJECTED), follow=False)
            except OSError as error:  # a link may lead to any file of this user
                if say is not None:
                    say(f"{in_one_line(error)}: not copied")
            self.folder.finish(self.index, rejected)
        with suppress(FileNotFoundError):
            os.unlink(self.folder.note(INDEX))

    def _has_size(self, shard: Shard) -> bool:
        try:
            return os.path.getsize(self.folder.name(shard.name)) == shard.bytes
        except FileNotFoundError:
            return False
