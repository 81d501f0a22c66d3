"""Fakes for tests of loaders and of code around them: slow datasets, failing ones, and threads in a forced order."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

_DEADLINE_SECONDS = 30.0


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

        >>> order, sequencer = [], Sequencer()
        >>> def second() -> None:
        ...     with sequencer(1):
        ...         order.append("second")
        >>> thread = threading.Thread(target=second)
        >>> thread.start()
        >>> with sequencer(0):
        ...     order.append("first")
        >>> thread.join()
        >>> order
        ['first', 'second']
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
            if not self._turn.wait_for(lambda: self._next == place, _DEADLINE_SECONDS):
                raise TimeoutError(
                    f"place {place} waited {_DEADLINE_SECONDS:g} s for place {self._next}"
                )

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
