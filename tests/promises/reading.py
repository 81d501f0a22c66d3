"""Datasets that note how they are read, and how tests read; for child processes too."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fastload import DataLoader
from tests.fakes import Numbers, fastload_threads

DEADLINE_S = 30.0  # only a deadlock waits that long


class Reads(Numbers):
    """Its own indices; counts the calls, each of which takes `seconds` without the GIL."""

    fastload_per_worker = ()  # one count for all workers

    def __init__(self, length: int = 1000, seconds: float = 0.0) -> None:
        super().__init__(length)
        self.seconds, self.calls = seconds, 0

    def __getitem__(self, index: int) -> int:
        self.calls += 1
        if self.seconds:
            time.sleep(self.seconds)
        return index


class Stuck(Reads):
    """From index `first` on, a call reads a pipe that nobody writes to."""

    fastload_per_worker = ()

    def __init__(self, length: int = 1000, first: int = 8) -> None:
        super().__init__(length)
        self.first, self.stuck, self.pipe = first, threading.Semaphore(0), os.pipe()

    def __getitem__(self, index: int) -> int:
        if index >= self.first:
            self.stuck.release()
            self.read_for_ever()
        return super().__getitem__(index)

    def read_for_ever(self) -> None:
        os.read(self.pipe[0], 1)


class Watched(Numbers):
    """Its own indices; notes what was read, and when. Those in `stalled` wait for `release()`."""

    fastload_per_worker = ()  # one for all workers, to be looked at

    def __init__(self, length: int, stalled: tuple[int, ...] = ()) -> None:
        super().__init__(length)
        self.stalled, self.released = stalled, False
        self.reads: list[int] = []
        self.moments: list[float] = []
        self.turn = threading.Condition()  # owns reads, moments, released

    def __getitem__(self, index: int) -> Any:
        with self.turn:
            self.reads.append(index)
            self.moments.append(time.monotonic())
            self.turn.notify_all()
            if index in self.stalled:
                assert self.turn.wait_for(lambda: self.released, DEADLINE_S)
        return index

    def release(self) -> None:
        with self.turn:
            self.released = True
            self.turn.notify_all()

    def wait_for_reads(self, wanted: int | Iterable[int]) -> None:
        """Wait until so many reads have begun, or those of the indices that are `wanted`."""
        with self.turn:
            if isinstance(wanted, int):
                begun = self.turn.wait_for(lambda: len(self.reads) >= wanted, DEADLINE_S)
            else:
                begun = self.turn.wait_for(lambda: {*wanted} <= {*self.reads}, DEADLINE_S)
            assert begun, f"read: {self.reads}, wanted: {wanted}"


def in_batches(order: Sequence[int], batch_size: int) -> list[list[int]]:
    return [[*order[at : at + batch_size]] for at in range(0, len(order), batch_size)]


def drain(loop: Iterable[Any]) -> list[Any]:
    """Return what each `next()` of one epoch gave, batches as lists, exceptions as they are."""
    iterator, outcomes = iter(loop), list[Any]()
    while len(outcomes) < 10_000:
        try:
            batch = next(iterator)
        except StopIteration:
            return outcomes
        except (KeyboardInterrupt, SystemExit, Exception) as error:
            outcomes.append(error)
        else:
            outcomes.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
    raise AssertionError("the epoch does not end")


def wait_until(condition: Callable[[], object], what: str, seconds: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s; {fastload_threads()}"
        time.sleep(0.001)


def fill(loader: DataLoader[Any]) -> None:
    """Wait until the workers of an epoch just begun have filled the window and can do no more."""
    dataset: Any = loader.dataset
    full = min(len(dataset), loader.stats().depth * (loader.batch_size or 1))
    wait_until(lambda: dataset.calls >= full, "the window is full")
