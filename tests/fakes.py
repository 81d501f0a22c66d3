"""What tests of several files read or look at: datasets, and threads in a forced order."""

from __future__ import annotations

import copy
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset[int]):
    """Its own indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Draws(Numbers):
    """An index and a number drawn for it."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(())


class OwnIterator(IterableDataset[int]):
    """Its own iterator, never rewound: what was read is gone, for this copy."""

    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.at - 1


def fastload_threads() -> list[str]:
    """The names of fastload's threads that are alive, sorted."""
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("fastload-"))


@contextmanager
def _limited(kind: int, most: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def limited_files(nbytes: int) -> AbstractContextManager[None]:
    """Limit the files of this process to `nbytes`. A write beyond that fails with EFBIG, much as on a full disk."""
    return _limited(resource.RLIMIT_FSIZE, nbytes)


def no_descriptors() -> AbstractContextManager[None]:
    """Let this process open no more files."""
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    return _limited(resource.RLIMIT_NOFILE, free)


@contextmanager
def hasty() -> Iterator[None]:
    """Let threads take turns as often as they can. Under coverage, Python 3.11 then kills some that start.

    It refuses to trace a thread while it begins to trace another.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval if threading.gettrace() else 1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


DEADLINE_S = 30.0


class SlowDataset(Dataset[int]):
    """`length` samples, each its own index, each after a simulated read of `seconds` that releases the GIL."""

    def __init__(self, length: int, *, seconds: float) -> None:
        self.length = length
        self.seconds = seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


class FailingDataset(Dataset[Any]):
    """`dataset`, except that reading an index in `failures` raises a copy of its exception."""

    def __init__(self, dataset: Any, *, failures: Mapping[int, BaseException]) -> None:
        self.dataset = dataset
        self.failures = dict(failures)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if index in self.failures:
            # A copy: a raised exception holds the frames of the loop, and the workers hold this dataset. So an
            # iterator in such a frame would never be collected.
            raise copy.copy(self.failures[index])
        return self.dataset[index]


class Sequencer:
    """Forces the order in which threads pass the numbered places of a test.

    `with sequencer(n):` waits until threads have left the blocks 0 to n-1. Use every number once. A wait of 30 s, which
    only a deadlock can cause, raises TimeoutError.
    """

    fastload_per_worker = ()  # one for all workers

    def __init__(self) -> None:
        self._next = 0
        self._turn = threading.Condition()  # owns _next

    def __call__(self, place: int) -> _Place:
        """Return a context manager that waits for the turn of `place`, runs the block, and lets the next place pass."""
        return _Place(self, place)

    def _enter(self, place: int) -> None:
        with self._turn:
            if not self._turn.wait_for(lambda: self._next == place, DEADLINE_S):
                raise TimeoutError(f"place {place} waited {DEADLINE_S:g} s for place {self._next}")

    def _leave(self) -> None:
        with self._turn:
            self._next += 1
            self._turn.notify_all()


class _Place:
    def __init__(self, sequencer: Sequencer, place: int) -> None:
        self._sequencer = sequencer
        self._place = place

    def __enter__(self) -> None:
        self._sequencer._enter(self._place)

    def __exit__(self, *_: object) -> None:
        self._sequencer._leave()
