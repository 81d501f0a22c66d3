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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fastload._kit.disk import (
    locked_path,
    open_file,
    own_folder,
    replace_file,
    sync_folder,
    write_all,
    write_file,
)
from fastload.datasets.manifest import INDEX, REJECTED, STAGING, Index, Shard, dump_index
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
    how = {"workers": workers, "progress": progress}
    copy = _Copy(source, target, index, how, not in_memory(target), say)
    with _alone_in(target, say):
        copy.claim()
        missing = copy.missing(verify=verify)
        if missing:
            copy.fetch(missing)
        copy.finish(changed=bool(missing))
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


@contextmanager
def _alone_in(target: str, say: Callable[[str], None] | None) -> Iterator[None]:
    """Hold the lock of `target` in the block: only one process at a time stages into it.

    The kernel frees the lock if its holder dies, and wakes a process that waits. The file of the lock stays, because
    processes that wait have it open.
    """
    waiting = f"{target}: waiting for another process that copies into this folder"
    wait = functools.partial(say, waiting) if say else True
    try:
        with locked_path(os.path.join(own_folder(target, STAGING), "lock"), wait=wait):
            yield
    except OSError as error:
        error.filename = error.filename or target  # neither flock nor fsync names the file
        raise


@dataclass(frozen=True)
class _Copy:
    """A copy in progress, by the one process that holds its lock."""

    source: str
    target: str
    index: Index
    how: dict[str, Any]
    durable: bool
    say: Callable[[str], None] | None

    def claim(self) -> None:
        """Check that `target` is empty or has this set. Write down which set will be copied."""
        held, begun = (_content(self._name(name)) for name in (INDEX, os.path.join(STAGING, INDEX)))
        encoded = dump_index(self.index)
        if held is not None and held != encoded:
            raise FileExistsError(
                errno.EEXIST,
                "the folder holds another set. Delete that set, or choose another folder",
                self.target,
            )
        shards = [name for name in os.listdir(self.target) if name.endswith(".arrow")]
        if held is None and begun is None and shards:
            raise FileExistsError(
                errno.EEXIST,
                f"the folder holds {shards[0]}, but neither an index nor a copy that was stopped. Choose another "
                "folder",
                self.target,
            )
        if held is None and begun != encoded:
            for name in shards:  # of a stopped copy of another set, or of an older one
                os.unlink(self._name(name))
            self._publish(os.path.join(STAGING, INDEX), encoded)

    def missing(self, *, verify: bool) -> list[Shard]:
        """Return the shards that `target` lacks: missing, of another size or, with `verify`, damaged."""
        there = [shard for shard in self.index.shards if self._has_size(shard)]
        missing = [shard for shard in self.index.shards if shard not in there]
        if verify:
            found = each(faults_of, self.target, self.index, there, what="Verifying", **self.how)
            missing += [shard for shard, faults in found if faults]
        return missing

    def fetch(self, missing: Sequence[Shard]) -> None:
        """Copy the `missing` shards, if there is room. Meanwhile `target` cannot be opened."""
        if os.path.exists(self._name(INDEX)):
            os.replace(self._name(INDEX), self._name(STAGING, INDEX))
            if self.durable:
                sync_folder(self.target)
        for shard in missing:  # wrong shards, and pieces of a killed copy: they take room
            for folder in ("", STAGING):
                with suppress(FileNotFoundError):
                    os.unlink(self._name(folder, shard.name))
        needed, free = sum(shard.bytes for shard in missing), shutil.disk_usage(self.target).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"the copy needs {needed:,} bytes, but only {free:,} are free",
                self.target,
            )
        for _ in each(
            self._copy_shard, self.source, self.index, missing, what="Staging", **self.how
        ):
            pass

    def _copy_shard(self, shard: Shard, pieces: Pieces) -> None:
        """Write a shard. It has a temporary name until it is complete."""
        partial = self._name(STAGING, shard.name)
        whole = replace_file(self._name(shard.name), partial=partial, durable=self.durable)
        with whole as file:
            for piece in pieces(None):
                write_all(file.fileno(), partial, piece)

    def finish(self, *, changed: bool) -> None:
        """Write the index: now `target` is a set."""
        if changed or not os.path.exists(self._name(INDEX)):
            try:
                rejected = _content(os.path.join(self.source, REJECTED), follow=False)
            except OSError as error:  # a link may lead to any file of this user
                rejected = None
                if self.say is not None:
                    self.say(f"{in_one_line(error)}: not copied")
            if rejected is not None:
                self._publish(REJECTED, rejected)
            self._publish(INDEX, dump_index(self.index))
        with suppress(FileNotFoundError):
            os.unlink(self._name(STAGING, INDEX))

    def _name(self, *names: str) -> str:
        return os.path.join(self.target, *names)

    def _has_size(self, shard: Shard) -> bool:
        try:
            return os.path.getsize(self._name(shard.name)) == shard.bytes
        except FileNotFoundError:
            return False

    def _publish(self, name: str, content: bytes) -> None:
        """Write a file that exists completely or not at all."""
        partial = self._name(STAGING, "partial")
        write_file(self._name(name), content, partial=partial, durable=self.durable)


def _content(name: str, *, follow: bool = True) -> bytes | None:
    try:
        with open_file(name, follow=follow) as file:
            return file.read()
    except FileNotFoundError:
        return None
