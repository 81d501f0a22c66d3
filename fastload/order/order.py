"""What the orders of all datasets have in common: the batches of one epoch, and which of them the loop has received."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from fastload._kit.hashing import mix64
from fastload.memory.batch import Batch
from fastload.order.state import State
from fastload.settings import Settings
from fastload.telemetry import Recorder

MAX_AHEAD = 2
"""How many of the latest batches a state can leave out."""


def draw_seed(settings: Settings) -> int:
    """Draw the seed of an epoch as torch draws that of its workers."""
    drawn = torch.empty((), dtype=torch.int64).random_(generator=settings.generator)
    return int(drawn.item())


class Order(ABC):
    """The batches of one epoch, and which of them the loop has received.

    Args:
        initial: the loader's state at the beginning of the epoch.
        workers: how many read it, 0 if the loop does.

    Only `state` may run in any thread. All else runs on the loop's thread, as in torch, so that a sampler, which is
    user code, never races.
    """

    seed: int
    """That of the random streams."""
    progress: Any
    """What was delivered. A delivery replaces it, and changes nothing in it."""

    def __init__(self, initial: State, *, workers: int) -> None:
        self.initial = initial
        self.epoch = initial.epoch
        # One for each worker, or for the loop that reads, and then for the collector and for the loop.
        self.recorders = [Recorder() for _ in range(max(1, workers) + 2)]
        self.exhausted = False  # whether the sampler has ended
        # `progress` before the latest batches, the latest first
        self._past: tuple[Any, ...] = ()

    @property
    def worker_seed(self) -> int:
        """What `get_worker_info().seed` of worker 0 is, if workers start in this epoch."""
        keyed = self.initial.seed is not None
        return mix64(mix64(self.seed) ^ self.epoch) >> 1 if keyed else self.seed

    @abstractmethod
    def __next__(self) -> Batch:
        """Return the next batch to read. At the end set `exhausted` and raise StopIteration."""

    def is_ready(self) -> bool:
        """Return False if `next()` would have to wait, for example for the next lease of shards."""
        return True

    @abstractmethod
    def delivered(self, batch: Batch) -> None:
        """Record that the loop received `batch`: its data, its error, or nothing if it was left out."""

    @abstractmethod
    def end(self) -> None:
        """Record that the loop has seen the end of the epoch."""

    @abstractmethod
    def state(self, ahead: int = 0) -> dict[str, Any]:
        """Return what was delivered before the last `ahead` batches, as JSON values; see `DataLoader.state_dict`.

        Any thread may call this. It needs no lock: a delivery replaces tuples.
        """

    def count(self, batch: Batch) -> Callable[[], None]:
        """Record that the loop receives `batch`, as `delivered` does. Return what takes this back."""
        had, past = self.progress, self._past
        # First: in between, `_before` in another thread would count a batch that the loop holds.
        if batch.error is None and not batch.left_out:  # the loop holds nothing else
            self._past = (had, *past[: MAX_AHEAD - 1])
        self.delivered(batch)
        now = self.progress

        def take_back() -> None:
            if self.progress is now:  # no other thread has taken a batch since
                self.progress, self._past = had, past

        return take_back

    def _before(self, ahead: int) -> Any:
        """Return `progress` before the last `ahead` batches of this epoch."""
        past = (self.progress, *self._past)
        return past[min(ahead, len(past) - 1)]
