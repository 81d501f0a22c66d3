"""Keeps blocks of objects in a folder of this machine, which processes share. No kill leaves wrong bytes there.

Two sparse files stand for an object that has one ETag: its bytes, and a table with an entry for each block. An entry
is the block's CRC-32 and the second of its last use. It is written after the block, so a block without one isn't there.
Readers hold a shared lock on their blocks, of the kind that belongs to an open file and ends with its processes.
To delete a block takes its exclusive lock. A block that is locked is left.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import struct
import threading
import time
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload._kit.disk import Descriptor, locked_path, preadv
from fastload.errors import UsageError
from fastload.remote.cache_room import ENTRY, lock_block, make_room, private_folder, remove
from fastload.remote.store import Store

BLOCK = 1 << 20
"""Bytes that are fetched, checked and given up together."""

_FILLED_TOGETHER = 16
"""How many blocks a thread holds in memory while it fills them."""

Range = tuple[int, int]

_lock = threading.Lock()
"""Owns what all caches of this process count, and what their objects fill. A forked child has its own."""


class Cache:
    """A folder with blocks of objects. It may be shared by threads and processes, and pickled.

    Args:
        folder: its path. None: a temporary one, which goes with this process.
        most_bytes: the disk space that it may take, about. 0: nothing is kept.
    """

    fastload_per_worker = ()  # workers share it

    def __init__(self, folder: str | os.PathLike[str] | None, most_bytes: int) -> None:
        if most_bytes < 0:
            raise UsageError(f"cache_bytes must be 0 or more, got {most_bytes}")
        self._private = folder is None
        self.most_bytes = most_bytes
        self._free = 0  # may be written before the next look at the folder
        self.off = most_bytes == 0
        self._folder = "" if folder is None else os.path.abspath(folder)
        if not self.off:
            self._make()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_free": 0}

    def _make(self) -> None:
        """Create the folder if it is missing."""
        if not self._private:
            os.makedirs(self._folder, exist_ok=True)
        elif not os.path.isdir(self._folder):
            self._folder, owner = private_folder()
            self.most_bytes = min(self.most_bytes, shutil.disk_usage(self._folder).free // 2)
            weakref.finalize(self, remove, self._folder, owner, os.getpid())

    def files(self, url: str, etag: str) -> tuple[int, int]:
        """Open the files of an object, and create them if they are missing: its bytes, and its table."""
        self._make()
        name = hashlib.sha256(f"{url}\0{etag}\0{BLOCK}".encode()).hexdigest()[:40]
        path = os.path.join(self._folder, name)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        data = os.open(f"{path}.data", flags, 0o666)
        try:
            return data, os.open(f"{path}.table", flags, 0o666)
        except BaseException:
            os.close(data)
            raise

    def room(self, nbytes: int) -> bool:
        """Make room for `nbytes`, by deleting the least recently used blocks. Return whether there is room."""
        if self.off or nbytes > self.most_bytes:
            return False
        with _lock:
            self._free -= nbytes
            if self._free >= 0:
                return True
        with locked_path(os.path.join(self._folder, "lock")):
            free = make_room(self._folder, self.most_bytes, nbytes, BLOCK) - nbytes
        with _lock:
            # Others write too, so it looks again soon.
            self._free = min(free, self.most_bytes // 32)
        return free >= 0

    def fail(self, error: OSError) -> None:
        """Keep nothing more in this process, and warn once."""
        with _lock:
            failed, self.off = self.off, True
        if not failed:
            warnings.warn(
                f"{self._folder}: the cache cannot be written ({error.strerror}). This process reads on without it, so "
                f"each read asks the store. Make room, or name another cache_dir",
                RuntimeWarning,
                stacklevel=2,
            )


class Known:
    """What a process knows of an object: the blocks whose CRC it has compared, and what is announced and not read."""

    def __init__(self, size: int) -> None:
        self.seen = np.zeros(-(-size // BLOCK), np.bool_)
        self.announced: set[Range] = set()

    def forget(self, store: Store, url: str) -> None:
        """Cancel what was announced and not read yet."""
        with _lock:
            announced, self.announced = self.announced, set()
        store.forget([(url, *span) for span in announced])


class CachedObject:
    """An object as a local file, whose blocks are filled before they are read. For one process.

    `known` survives this object, for another one that opens the same again.

    `fd` is that file, to be read where `held` says that it can be. It is -1 if the object has no ETag, or if nothing is
    kept. Then, and if there is no room, `read_into` reads the object itself.
    """

    def __init__(
        self,
        cache: Cache,
        store: Store,
        url: str,
        size: int,
        etag: str | None,
        known: Known | None = None,
    ) -> None:
        self._cache, self._store, self._url, self.size = cache, store, url, size
        self.fd = self._table = -1
        if etag is not None and not cache.off:
            try:
                self._open(etag)
            except OSError as error:
                cache.fail(error)
        self._known = known or Known(size)
        self._holders: Counter[int] = Counter()
        self._filling: dict[int, threading.Event] = {}
        self._left = False

    def _open(self, etag: str) -> None:
        fd, table = self._cache.files(self._url, etag)
        self._files = Descriptor(fd), Descriptor(table)
        # Several processes may do this at once: neither file ever shrinks.
        os.truncate(fd, self.size)
        entries = -(-self.size // BLOCK) * ENTRY.itemsize
        if os.fstat(table).st_size < entries:
            os.truncate(table, entries)
        self.fd, self._table = fd, table

    def read_into(self, buffer: memoryview, at: int) -> int:
        """Fill a buffer with the object's bytes from `at` on. Return how many these are: all, or it raises."""
        stop = at + len(buffer)
        with self.held([(at, stop)]) as ready:
            if ready and preadv(self.fd, buffer, at) == len(buffer):
                return len(buffer)
        with _lock:
            self._known.announced.discard((at, stop))
        buffer[:] = self._store.read(self._url, at, stop)
        return len(buffer)

    @contextmanager
    def held(self, ranges: Iterable[Range]) -> Iterator[bool]:
        """Fill what lacks of these ranges, and keep it in the block. Yield False if they aren't all in the file.

        Raises what the store does.
        """
        blocks, locked = _blocks(ranges), list[int]()
        try:
            yield not self.direct and self._lock_all(blocks, locked) and self._fill(blocks)
        finally:
            self._unlock(locked)

    @property
    def direct(self) -> bool:
        """Whether nothing is kept of it."""
        if self.fd >= 0 and self._cache.off:
            with _lock:
                left, self._left = self._left, True
            if not left:
                self.forget()  # those are blocks, and exact ranges are read from now on
        return self.fd < 0 or self._cache.off

    def announce(self, ranges: Iterable[Range]) -> None:
        """Begin to fetch ranges that will be read soon, as far as they aren't here or on their way."""
        direct = self.direct
        if not direct:
            there = self._entries()["used"] != 0
            ranges = [self._span(block) for block in _blocks(ranges) if not there[block]]
        with _lock:
            new = [
                r
                for r in ranges
                if r not in self._known.announced and r[0] // BLOCK not in self._filling
            ]
            self._known.announced.update(new)
        for neighbours in [new] * bool(new) if direct else _runs(new):
            # Runs one by one: together, what lies between them would be read too, and not kept.
            self._store.will_read([(self._url, *span) for span in neighbours])

    def forget(self) -> None:
        """Cancel what was announced and not read yet."""
        self._known.forget(self._store, self._url)

    # ---- blocks ----

    def _span(self, block: int) -> Range:
        return block * BLOCK, min(self.size, (block + 1) * BLOCK)

    def _entries(self) -> NDArray[Any]:
        content = bytearray(len(self._known.seen) * ENTRY.itemsize)
        preadv(self._table, memoryview(content), 0)
        return np.frombuffer(content, ENTRY)

    def _write_entry(self, block: int, crc: int, used: int) -> None:
        os.pwrite(self._table, struct.pack("<II", crc, used), block * ENTRY.itemsize)

    def _lock_all(self, blocks: Sequence[int], locked: list[int]) -> bool:
        """Keep others from deleting blocks. Return False, with some of them locked, if that is not possible."""
        try:
            with _lock:
                for block in blocks:
                    if not self._holders[block]:
                        lock_block(self._table, block, fcntl.F_RDLCK)
                    self._holders[block] += 1
                    locked.append(block)
        except BlockingIOError:  # another process deletes it now
            return False
        except OSError as error:  # a file system without locks
            self._cache.fail(error)
            return False
        return True

    def _unlock(self, blocks: Sequence[int]) -> None:
        with _lock:
            for block in blocks:
                self._holders[block] -= 1
                if not self._holders[block]:
                    del self._holders[block]
                    lock_block(self._table, block, fcntl.F_UNLCK)

    def _fill(self, blocks: Sequence[int]) -> bool:
        """Fetch those of these locked blocks that aren't there. Return whether all are."""
        try:
            self._check(blocks)
        except OSError as error:
            self._cache.fail(error)
            return False
        done = threading.Event()
        with _lock:
            entries = self._entries()
            there = {block for block in blocks if entries["used"][block]}
            known = [span for b in there if (span := self._span(b)) in self._known.announced]
            self._known.announced.difference_update(known)  # another process has fetched them
            waits = {b: self._filling[b] for b in blocks if b not in there and b in self._filling}
            mine = [b for b in blocks if b not in there and b not in waits]
            self._filling |= dict.fromkeys(mine, done)
            self._known.announced.difference_update(map(self._span, mine))
        try:
            if known:
                self._store.forget([(self._url, *span) for span in known])
            self._use(sorted(there), entries)
            good = self._fetch(mine)
        finally:
            with _lock:
                for block in mine:
                    del self._filling[block]
            done.set()
        for event in waits.values():
            event.wait()
        return good and (not waits or bool(self._entries()["used"][[*waits]].all()))

    def _check(self, blocks: Sequence[int]) -> None:
        """Compare blocks with their CRC at their first use in this process. A wrong one counts as not there."""
        unseen = [block for block in blocks if not self._known.seen[block]]
        if not unseen:
            return
        entries = self._entries()
        for block in unseen:
            crc, used = entries[block].tolist()
            if used:
                start, stop = self._span(block)
                data = memoryview(bytearray(stop - start))
                if preadv(self.fd, data, start) == stop - start and zlib.crc32(data) == crc:
                    self._known.seen[block] = True
                else:
                    self._write_entry(block, 0, 0)

    def _use(self, blocks: Sequence[int], entries: NDArray[Any]) -> None:
        """Note when blocks were used, and that no request was needed."""
        now = _now()
        self._store.count_hits(len(blocks))
        with suppress(OSError):  # then they are given up earlier
            for block in blocks:
                crc, used = entries[block].tolist()
                if used != now:
                    self._write_entry(block, crc, now)

    def _fetch(self, blocks: Sequence[int]) -> bool:
        """Fetch blocks and write them. Return False if that is not possible here."""
        for first in range(0, len(blocks), _FILLED_TOGETHER):
            some = blocks[first : first + _FILLED_TOGETHER]
            spans = [(self._url, *self._span(block)) for block in some]
            try:
                if not self._cache.room(len(some) * BLOCK):
                    self._store.forget(spans)
                    return False
            except OSError as error:
                self._cache.fail(error)
                return False
            for block, data in zip(some, self._store.read_many(spans), strict=True):
                try:
                    _write(self.fd, data, block * BLOCK)
                    self._write_entry(block, zlib.crc32(data), _now())
                except OSError as error:
                    self._cache.fail(error)
                    return False
                self._known.seen[block] = True
        return True


def _blocks(ranges: Iterable[Range]) -> list[int]:
    """Return the blocks of ranges, in order."""
    found = {
        block
        for start, stop in ranges
        if start < stop
        for block in range(start // BLOCK, -(-stop // BLOCK))
    }
    return sorted(found)


def _runs(spans: Iterable[Range]) -> list[list[Range]]:
    """Divide ordered ranges where one does not begin at the end of the one before."""
    found: list[list[Range]] = []
    for span in spans:
        if found and found[-1][-1][1] == span[0]:
            found[-1].append(span)
        else:
            found.append([span])
    return found


def _write(fd: int, data: bytes, at: int) -> None:
    with memoryview(data) as rest:
        done = 0
        while done < len(rest):
            done += os.pwrite(fd, rest[done:], at + done)


def _now() -> int:
    return int(time.time())


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
