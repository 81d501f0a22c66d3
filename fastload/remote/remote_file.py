"""A seekable binary file over an object, which reads ahead while it is read in order."""

from __future__ import annotations

import io
import os
from collections import deque
from typing import Any

_FIRST, _MOST = 1 << 18, 1 << 22
"""Bytes of the first part that is read at a position, and of the longest. Each is twice as long as the one before."""
_AHEAD = 4
"""How many parts are fetched ahead."""
BUFFER = 1 << 16
"""Bytes that a buffered reader of such a file copies at a time."""


class RemoteFile(io.RawIOBase):
    """An object as a raw binary file. Its position is its own, so one thread reads it at a time.

    It holds one part of the object. A read elsewhere fetches a short part there. As soon as reads go on in order, the
    parts grow, and the next ones are fetched meanwhile.

    Args:
        store: the `Store` that reads.
        path: path or URL of the object.
        until: no part that begins there or later is fetched ahead. None: the object's end.
    """

    def __init__(self, store: Any, path: str, until: int | None = None) -> None:
        self._store, self._path, self.name = store, path, path
        self._size = store.size(path)
        self._until = self._size if until is None else min(until, self._size)
        self._at = self._begin = self._next = 0
        self._length = _FIRST
        self._part: bytes = b""
        self._ahead: deque[tuple[int, int]] = deque()

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position, and return it. Nothing is fetched."""
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise ValueError(f"cannot seek to {at}")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer what is held at the position, and fetch a part if nothing is. Return how many bytes."""
        to = memoryview(buffer).cast("B")
        if not self._begin <= self._at < self._begin + len(self._part):
            if self._at >= self._size or not to:
                return 0
            self._fetch(len(to))
        found = memoryview(self._part)[self._at - self._begin :][: len(to)]
        to[: len(found)] = found
        self._at += len(found)
        return len(found)

    def close(self) -> None:
        """Close it, and forget what was read ahead."""
        if not self.closed:
            self._forget(len(self._ahead))
            self._part = b""
        super().close()

    def _fetch(self, wanted: int) -> None:
        """Read the part at the position, of which `wanted` bytes are needed, and announce the next parts."""
        end = self._begin + len(self._part)
        is_next = self._at == end > 0
        self._forget(sum(stop <= self._at for _, stop in self._ahead))
        if not self._ahead or self._at < self._ahead[0][0]:
            self._forget(len(self._ahead))
            self._go_to(self._at, is_next, wanted)
        begin, stop = self._ahead.popleft()
        until = self._until if is_next else min(self._at + wanted, self._size)
        while self._next < until and len(self._ahead) < _AHEAD:
            self._plan()
            # One by one: together, neighbours would become one request.
            self._store.will_read([(self._path, *self._ahead[-1])])
        self._part, self._begin = self._store.read(self._path, begin, stop), begin

    def _go_to(self, at: int, is_next: bool, wanted: int) -> None:
        """Plan the part at a position where none is planned."""
        if not is_next:
            # The end of a file may be an index, which is read in several steps.
            at = min(at, max(0, self._size - _FIRST))
            self._length = _FIRST
        self._length = max(self._length, min(wanted, _MOST))
        self._next = at
        self._plan()

    def _plan(self) -> None:
        """Plan the part after those that are planned."""
        begin, self._next = self._next, min(self._next + self._length, self._size)
        self._length = min(2 * self._length, _MOST)
        self._ahead.append((begin, self._next))

    def _forget(self, count: int) -> None:
        if count:
            first = [self._ahead.popleft() for _ in range(count)]
            self._store.forget([(self._path, *part) for part in first])
