"""The memory of batches that worker processes write and the loop reads: memfd segments, sent once and lent again.

They have no name in /dev/shm: once the processes that map a segment are gone, so is the segment.

A segment is lent again only if no process can still see the batch that it held:

- no alias lives in the loop's process: every tensor, array and view of a batch keeps the loan alive;
- the worker that had it has answered, and its dataset keeps no alias. If it dies, its segment is never lent again;
- it was not on loan during a fork: the forked process would see the next batch in the same pages.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import torch

from fastload.memory.layout import aligned
from fastload.memory.slots import SlotPool

_PAGES = 64 * 1024
_REMEDY = "A batch in flight takes a file descriptor: raise `ulimit -n`, or lower prefetch_batches"
_forks = 0
"""Counts forks of this process: once before and once after each, so that a loan that spans one sees it."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(before=_count_fork, after_in_parent=_count_fork)


def rounded(nbytes: int) -> int:
    """Return a size for a segment that holds `nbytes` bytes: some room more, in whole pages."""
    return -(-(nbytes + nbytes // 16) // _PAGES) * _PAGES


class Segment:
    """Memory that several processes map. `key` names it in messages."""

    def __init__(self, key: tuple[int, int], descriptor: int, nbytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.descriptor = descriptor
        # Not mmap.mmap, which keeps a descriptor of its own: a loop may keep thousands of batches.
        try:
            mapped = torch.from_file(
                f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8
            )
        except RuntimeError as exc:
            raise OSError(f"the memory of a batch cannot be mapped: {exc}. {_REMEDY}") from exc
        self._memory = mapped.numpy()

    def view(self) -> np.ndarray:
        """Return another array over the memory, uint8[nbytes]. Further views of it refer to this array."""
        return np.frombuffer(self._memory.data, np.uint8)

    @classmethod
    def new(cls, key: tuple[int, int], nbytes: int) -> Segment:
        """Create a segment. Raise OSError if memory or descriptors run out."""
        try:
            descriptor = os.memfd_create("fastload-batch", os.MFD_CLOEXEC)
        except OSError as exc:
            raise OSError(exc.errno, f"{exc.strerror}. {_REMEDY}") from None
        try:
            os.ftruncate(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(key, descriptor, nbytes)  # it closes the descriptor, also if mapping it fails

    def forget(self, close: Callable[[int], None] = os.close) -> None:
        """Close the descriptor. The memory lives as long as it is mapped."""
        # `close` is an argument because this also runs while the interpreter shuts down and modules are gone.
        if self.descriptor >= 0:
            close(self.descriptor)
            self.descriptor = -1

    __del__ = forget


class Segments:
    """The segments of one iterator, in the loop's process. Any thread may call any method.

    No lock: `_returned` runs wherever the last alias of a batch dies, also inside a garbage collection. Appending to
    and popping from a deque, and setting and popping a key of a dict, are atomic.
    """

    def __init__(self) -> None:
        self.limit = 0
        self._nbytes = 0  # what the largest batch so far took
        self._numbers = count()
        self.retired = 0
        """Grows if segments are never lent again. A race may lose a step; the next one makes up for it."""
        self._idle: deque[Segment] = deque()
        self._loans: dict[int, _Loan] = {}
        self._alive: weakref.WeakValueDictionary[tuple[int, int], Segment] = (
            weakref.WeakValueDictionary()
        )

    def lend(self) -> Segment | None:
        """Return a segment for a worker's next batch, or None if the size of a batch is not known yet."""
        while self._nbytes:
            try:
                segment = self._idle.pop()
            except IndexError:
                segment = Segment.new((-1, next(self._numbers)), self._nbytes)
                self._alive[segment.key] = segment
                return segment
            if segment.nbytes >= self._nbytes:
                return segment
            self.retire(segment)
        return None

    def adopt(self, segment: Segment) -> None:
        """Take over a segment that a worker created."""
        self._alive[segment.key] = segment

    def has(self, key: tuple[int, int]) -> bool:
        """Return whether a segment may still be lent, or is in use."""
        return key in self._alive

    def loan(self, segment: Segment, *, again: bool = True) -> np.ndarray:
        """Return the memory of a batch as uint8[nbytes]. When its last alias dies, the segment is lent `again`."""
        lent = segment.view()
        loan = _Loan(lent, self._returned)
        loan.segment, loan.forks = segment, _forks if again else -1
        self._loans[id(loan)] = loan
        if len(self._loans) > self.limit:
            segment.forget()  # the loop keeps many batches, and descriptors are few
        return lent

    def give_back(self, segment: Segment) -> None:
        """Let a segment be lent again. No alias of its batch lives."""
        if len(self._idle) + len(self._loans) < self.limit and segment.descriptor >= 0:
            self._idle.append(segment)
        else:
            self.retire(segment)

    def retire(self, segment: Segment) -> None:
        """Never lend a segment again. Its memory lives as long as a batch in it."""
        self._alive.pop(segment.key, None)
        self.retired += 1

    def needs(self, nbytes: int) -> None:
        """Let the segments lent from now on have room for a batch of `nbytes`."""
        if nbytes > self._nbytes:
            self._nbytes = rounded(nbytes)

    @property
    def lent(self) -> int:
        """Number of segments whose batch is alive."""
        return len(self._loans)

    def _returned(self, loan: weakref.ref[np.ndarray]) -> None:
        ended = self._loans.pop(id(loan))
        if ended.forks == _forks:
            self.give_back(ended.segment)
        else:
            self.retire(ended.segment)


class _Loan(weakref.ref[np.ndarray]):
    __slots__ = ("forks", "segment")
    segment: Segment
    forks: int


class ProcessMemory(SlotPool):
    """The memory of the batches that a worker process makes: segments that came with tickets, or new ones.

    Its readers share it. Each says by `use` for which batch it acquires.

    Args:
        process: a number that no other process of the loader has, for the keys of segments that it creates.
        channels_last: see `SlotPool`.
    """

    def __init__(self, process: int, *, channels_last: bool) -> None:
        super().__init__(channels_last=channels_last)
        self._process = process
        self._created = count()
        self._aliases: weakref.WeakValueDictionary[tuple[int, int], np.ndarray] = (
            weakref.WeakValueDictionary()
        )
        self._thread = threading.local()

    def begin(self, segment: Segment | None) -> TicketMemory:
        """Return the memory of a batch, in `segment`. Nothing in this process sees what it held: `let_go` said so."""
        memory = TicketMemory(self)
        if segment is not None:
            memory.take_up(segment)
        return memory

    def use(self, memory: TicketMemory) -> None:
        """Let the calling thread acquire from the memory of a batch."""
        self._thread.memory = memory

    def acquire(self, nbytes: int) -> np.ndarray:
        """See `SlotPool`."""
        memory: TicketMemory = self._thread.memory
        return memory.acquire(nbytes)

    def new(self, nbytes: int) -> Segment:
        """Create a segment."""
        return Segment.new((self._process, next(self._created)), rounded(nbytes))

    def view(self, segment: Segment) -> np.ndarray:
        """Return an array over a segment. `sees` is true while it, or a view of it, lives."""
        memory = self._aliases[segment.key] = segment.view()
        return memory

    def sees(self, segment: Segment) -> bool:
        """Return whether something in this process still sees the memory of a segment."""
        return segment.key in self._aliases


class TicketMemory:
    """The memory of one batch. One thread at a time acquires: the first that needs a slot, then the one that packs."""

    def __init__(self, process: ProcessMemory) -> None:
        self._process = process
        self._taken: list[tuple[Segment, np.ndarray, int]] = []
        self.created: list[Segment] = []
        """Those that came with no ticket. Not all whose descriptor is open: the next batch may have one before it is
        closed here."""

    def take_up(self, segment: Segment) -> None:
        """Acquire from a segment from now on."""
        self._taken.append((segment, self._process.view(segment), 0))

    def acquire(self, nbytes: int) -> np.ndarray:
        """See `SlotPool`."""
        if not self._taken or aligned(self._taken[-1][2]) + nbytes > self._taken[-1][0].nbytes:
            self.created.append(self._process.new(nbytes))
            self.take_up(self.created[-1])
        segment, memory, used = self._taken[-1]
        start = aligned(used)
        self._taken[-1] = segment, memory, start + nbytes
        return memory[start : start + nbytes]

    def let_go(self) -> bool:
        """Let go of the batch's memory. Return whether something else in this process still sees it."""
        segments = [segment for segment, _ in self.used]
        self._taken = []
        return any(map(self._process.sees, segments))

    def find(self, part: np.ndarray) -> tuple[int, int, int] | None:
        """Return which segment of this batch the array lies in, its first byte and its end; None if in none."""
        address = _address(part)
        for k, (_, memory, used) in enumerate(self._taken):
            start = address - _address(memory)
            if start >= 0 and start + part.nbytes <= used:
                return k, start, start + part.nbytes
        return None

    @property
    def used(self) -> list[tuple[Segment, int]]:
        """The segments of this batch, and how many bytes of each it takes."""
        return [(segment, used) for segment, _, used in self._taken]


def _address(part: np.ndarray[Any, Any]) -> int:
    address: int = part.__array_interface__["data"][0]
    return address
