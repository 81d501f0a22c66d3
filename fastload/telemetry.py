"""What the loader counts while it runs. Snapshots are frozen; nothing is timed that does not wait anyway."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter


class WaitClock:
    """Adds up the seconds that any number of threads wait, those that still wait included.

    Not locked: it belongs to the lock of whoever waits.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._since = perf_counter()
        self._seconds = 0.0

    def _advance(self) -> None:
        now = perf_counter()
        self._seconds += self._waiting * (now - self._since)
        self._since = now

    def start(self) -> None:
        """One more thread waits."""
        self._advance()
        self._waiting += 1

    def stop(self) -> None:
        """One thread waits no longer."""
        self._advance()
        self._waiting -= 1

    def restart(self) -> None:
        """Begin again at 0 seconds; threads that wait go on waiting."""
        self._advance()
        self._seconds = 0.0

    def seconds(self) -> float:
        """Thread-seconds waited since the last restart."""
        self._advance()
        return self._seconds


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of one epoch of a loader, the latest that was begun.

    Read it as a balance: where `consumer_wait_s` is a large share of `elapsed_s` the loader bounds
    the run; where `worker_wait_s` is a large share of `workers * elapsed_s` the training step does.
    """

    epoch: int
    """The epoch's number, which keys its order; -1 before the first `iter()`."""
    workers: int
    """Worker threads; 0 means that the loop's own thread reads."""
    depth: int
    """Batches that may be in flight at most: what bounds the memory."""
    samples: int
    """Samples handed to the loop."""
    batches: int
    """Batches handed to the loop, those that raised in their place included."""
    errors: int
    """Samples that raised and were skipped or replaced by `on_error`, plus batches that raised."""
    elapsed_s: float
    """Seconds from `iter()` to the end of the epoch, or until now."""
    consumer_wait_s: float
    """Seconds that the loop waited in `next()` for a batch that was not ready."""
    worker_wait_s: float
    """Seconds that workers had nothing to claim (no room in the window, or the order given out), summed over the
    workers."""
    occupancy: float
    """Mean share (0 to 1) of the batches in flight that were ready when the loop asked for one.

    Near 0: the loop takes batches as fast as they come, the loader bounds the run; more workers may
    help. Near 1: the loader is ahead, the training step bounds the run.
    """
