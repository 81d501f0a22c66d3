"""A packed set is copied next to the processor: once on each node, whole, checked, or not at all.

DST/shard-00000.arrow   complete and right as soon as it has this name
DST/index.json          written last: without it there is no set
DST/.staging/           the lock (it stays); while copying, the index to come and shards that are not whole
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Dataset
from tqdm import tqdm

from fastload.cores import usable_cores
from fastload.datasets.manifest import INDEX, REJECTED, Index, Shard, dump_index
from fastload.datasets.packed.format import preadv, read_packed_index, read_table
from fastload.disk import locked, replace_file, sync_folder, write_all
from fastload.errors import PackedDataError
from fastload.loader import DataLoader

_WORK = ".staging"


@dataclass(frozen=True)
class Staged:
    """What staging did: `bytes` are those of the set's shards, `copied_bytes` those that were not there yet."""

    path: str
    bytes: int
    copied_bytes: int
    seconds: float

    def __str__(self) -> str:
        if not self.copied_bytes:
            return f"{self.path}: {self.bytes:,} bytes, all there already"
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
    """Copy the packed set at `source` to the directory `target`, or find it there.

    Every byte that is copied is held against the set's checksums before it is written. What is in `target` already, of
    the same set, is kept: a shard whose size is right, and with `verify` its checksums too. So a copy that was killed
    goes on behind its last complete shard. Of several processes that call this at once for one `target`, one copies and
    the others wait for it; a process that dies while it copies hands over to one of them.

    Args:
        workers: threads, each of which copies a shard at a time; by default one for each core of this process.
        progress: show a bar on a terminal.
        say: called with a sentence before waiting for another process.

    Memory: for each worker a record batch, which is 16 MiB or one record, and 29 bytes for each record of a shard.

    Raises FileNotFoundError where `source` is no set, `PackedDataError` where it is damaged, FileExistsError where
    `target` holds something else, OSError where it has no room or cannot be written, ValueError if `target` is
    `source` or lies in it. In no case is there a set then that is not whole.
    """
    began = time.monotonic()
    source, target = os.path.abspath(source), os.path.abspath(target)
    index = read_packed_index(source)
    inner, outer = os.path.realpath(target), os.path.realpath(source)
    if os.path.commonpath((inner, outer)) == outer:
        raise ValueError(
            f"{target}: the set lies there, or around it; name another directory for its copy"
        )
    if workers is None:
        workers = usable_cores()
    work = os.path.join(target, _WORK)
    os.makedirs(work, exist_ok=True)
    whole = sum(shard.bytes for shard in index.shards)
    with _alone_in(target, say):
        _claim(target, index)
        missing = [shard for shard in index.shards if not _has_size(target, shard)]
        if verify:
            there = _Pass(target, index, [shard for shard in index.shards if shard not in missing])
            right = _each(there, workers=workers, progress=progress, what="Verifying")
            missing += [
                shard for shard, is_right in zip(there.shards, right, strict=True) if not is_right
            ]
        needed = sum(shard.bytes for shard in missing)
        if missing:
            _copy(source, target, index, missing, workers=workers, progress=progress)
        if missing or not os.path.exists(os.path.join(target, INDEX)):
            with suppress(FileNotFoundError), open(os.path.join(source, REJECTED), "rb") as file:
                _publish(target, REJECTED, file.read())
            _publish(target, INDEX, dump_index(index))
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(work, INDEX))
    return Staged(target, whole, needed, time.monotonic() - began)


@contextmanager
def _alone_in(target: str, say: Callable[[str], None] | None) -> Iterator[None]:
    """Have the block to this process alone, of all that stage into `target`.

    The kernel wakes who waits, and lets go of the lock when its holder dies. Its file is never deleted: who waits has
    it open, and whoever came later would lock another one.
    """
    waiting = f"{target}: another process copies into it; waiting for it"
    wait = functools.partial(say, waiting) if say else True
    try:
        with open(os.path.join(target, _WORK, "lock"), "ab") as file, locked(file, wait=wait):
            yield
    except OSError as error:
        error.filename = error.filename or target  # neither flock nor fsync says
        raise


def _claim(target: str, index: Index) -> None:
    """See that what is in `target` is this set or nothing; note which one comes into being."""
    note = os.path.join(target, _WORK, INDEX)
    held, begun = (_content(name) for name in (os.path.join(target, INDEX), note))
    encoded = dump_index(index)
    if held is not None and held != encoded:
        raise FileExistsError(
            errno.EEXIST,
            "there is another packed set: delete it, or choose another directory",
            target,
        )
    shards = [name for name in os.listdir(target) if name.endswith(".arrow")]
    if held is None and begun is None and shards:
        raise FileExistsError(
            errno.EEXIST,
            f"there is {shards[0]}, but no index and no copy that was stopped: choose another directory",
            target,
        )
    if held is None and begun != encoded:
        for name in shards:  # of a copy of another set, or of an older one, that was stopped
            os.unlink(os.path.join(target, name))
        _publish(target, os.path.join(_WORK, INDEX), encoded)


def _copy(
    source: str,
    target: str,
    index: Index,
    missing: Sequence[Shard],
    *,
    workers: int,
    progress: bool,
) -> None:
    """Copy the `missing` shards, if there is room; meanwhile `target` is no set."""
    work = os.path.join(target, _WORK)
    if os.path.exists(os.path.join(target, INDEX)):
        os.replace(os.path.join(target, INDEX), os.path.join(work, INDEX))
        sync_folder(target)
    for shard in missing:  # wrong ones, and pieces that a kill has left: they take room
        for folder in (target, work):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, shard.name))
    needed, free = sum(shard.bytes for shard in missing), shutil.disk_usage(target).free
    if needed > free:
        raise OSError(
            errno.ENOSPC, f"the copy needs {needed:,} bytes, and {free:,} are free", target
        )
    copies = _Pass(source, index, missing, target=target)
    for _ in _each(copies, workers=workers, progress=progress, what="Staging"):
        pass


class _Pass(Dataset[bool]):
    """Sample k: whether shard k of `path` is right; with a `target`, it is copied there, or raises.

    The copy has a name of which nobody reads until it is whole and on the disk. Once `stopped` is set, what is in
    progress ends with the piece that it is at.
    """

    fastload_per_worker = ()

    def __init__(
        self, path: str, index: Index, shards: Sequence[Shard], *, target: str | None = None
    ) -> None:
        self.path, self.index, self.shards, self.target = path, index, shards, target
        self.stopped = False

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, number: int) -> bool:
        shard = self.shards[number]
        if self.target is not None:
            self._copy(shard, self.target)
            return True
        try:
            for _ in self._pieces(shard):
                pass
        except PackedDataError:
            return False
        return True

    def _copy(self, shard: Shard, target: str) -> None:
        partial = os.path.join(target, _WORK, shard.name)
        with replace_file(os.path.join(target, shard.name), partial=partial) as file:
            for piece in self._pieces(shard):
                write_all(file.fileno(), partial, piece)

    def _pieces(self, shard: Shard) -> Iterator[memoryview]:
        for piece in _pieces(self.path, self.index, shard):
            if self.stopped:
                raise InterruptedError(errno.EINTR, "stopped", os.path.join(self.path, shard.name))
            yield piece


def _pieces(path: str, index: Index, shard: Shard) -> Iterator[memoryview]:
    """The bytes of a shard, in order; no payload before it was held against its checksum.

    Raises `PackedDataError`, with the record, where a byte is wrong or missing: for those between the payloads behind
    the last piece at the latest.
    """
    try:
        fd = os.open(os.path.join(path, shard.name), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise PackedDataError(path, "the file is missing", shard=shard.name) from error
    try:
        table = read_table(path, index, shard, fd)
        checksum = at = row = 0
        for number, (start, length) in enumerate((*shard.payload, (shard.bytes, 0))):
            columns = _read(path, shard, fd, at, start - at)
            checksum = zlib.crc32(columns, checksum)
            yield columns
            payload = _read(path, shard, fd, start, length)
            end = int(table.batch_ends[number]) if number < len(shard.payload) else row
            for record in range(row, end):
                begin = int(table.begins[record]) - start
                found = zlib.crc32(payload[begin : begin + int(table.lengths[record])])
                if found != table.checksums[record]:
                    reason = (
                        f"the payload has checksum {found:#010x}, expected "
                        f"{int(table.checksums[record]):#010x}: damaged"
                    )
                    raise PackedDataError(path, reason, shard=shard.name, record=record)
            yield payload
            at, row = start + length, end
        if checksum != shard.checksum:
            raise PackedDataError(path, "the file changed while it was read", shard=shard.name)
    finally:
        os.close(fd)


def _read(path: str, shard: Shard, fd: int, offset: int, length: int) -> memoryview:
    piece = np.empty(length, np.uint8).data
    try:
        found = preadv(fd, piece, offset)
    except OSError as error:
        error.filename = os.path.join(path, shard.name)
        raise
    if found < length:
        reason = f"the file ends before byte {offset + length:,}: cut off"
        raise PackedDataError(path, reason, shard=shard.name)
    return piece


def _each(work: _Pass, *, workers: int, progress: bool, what: str) -> Iterator[bool]:
    """The samples of `work`, by threads, with a bar that goes on by each shard's bytes."""
    loader: DataLoader[bool] = DataLoader(
        work, batch_size=None, num_workers=min(workers, len(work))
    )
    with (
        loader,
        tqdm(
            desc=what,
            total=sum(shard.bytes for shard in work.shards),
            unit="B",
            unit_scale=True,
            leave=False,
            disable=None if progress else True,  # None: hidden unless standard error is a terminal
        ) as bar,
    ):
        try:
            for shard, result in zip(work.shards, loader, strict=True):
                bar.update(shard.bytes)
                yield result
        finally:
            work.stopped = True


def _has_size(path: str, shard: Shard) -> bool:
    try:
        return os.path.getsize(os.path.join(path, shard.name)) == shard.bytes
    except FileNotFoundError:
        return False


def _content(name: str) -> bytes | None:
    try:
        with open(name, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _publish(target: str, name: str, content: bytes) -> None:
    """Write a file that is there whole or not at all, also after a loss of power."""
    partial = os.path.join(target, _WORK, "partial")
    with replace_file(os.path.join(target, name), partial=partial) as file:
        write_all(file.fileno(), partial, content)
