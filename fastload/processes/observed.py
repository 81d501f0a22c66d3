"""What a worker process measures while it reads one batch. The loop's process adds it to its own recorders."""

from __future__ import annotations

from collections.abc import Callable
from resource import RUSAGE_THREAD, getrusage
from time import perf_counter, process_time
from typing import Any

from fastload.telemetry.recorder import PROBE_EVERY_S, Recorder, bucket, delayed_s


class Observed(Recorder):
    """A recorder of one batch after another. It keeps sums, so that stages in each sample leave an answer small.

    Args:
        of_process: count the CPU time of the process. Else another reader does.
    """

    __slots__ = (
        "_cpu_now",
        "_cpu_s",
        "_delayed_s",
        "_next_look",
        "_read",
        "_sums",
        "_switches_seen",
        "batches",
    )

    def __init__(self, *, of_process: bool) -> None:
        super().__init__()
        self._cpu_now = process_time if of_process else float
        self.batches = 0
        self._next_look = 0.0
        self._delayed_s, self._switches_seen = delayed_s(), _switches()
        self._cpu_s = self._cpu_now()
        self._clear()

    def _clear(self) -> None:
        self._read = 0, 0.0, 0.0
        self._sums: dict[tuple[str, int], list[float]] = {}

    def add(self, stage: str, seconds: float, count: int = 1, *, cpu_seconds: float = 0.0) -> None:
        """See `Recorder`. Durations of one bucket of a histogram become their mean."""
        sums = self._sums.setdefault((stage, bucket(seconds)), [0, 0.0, 0.0])
        sums[0] += count
        sums[1] += seconds * count
        sums[2] += cpu_seconds

    def run(self, units: int, seconds: float, cpu_seconds: float, where: Callable[[], Any]) -> None:
        """See `Recorder`. The loop's process finds the slowest sample."""
        self.running.clear()
        self._read = units, seconds, cpu_seconds

    def take(self) -> tuple[tuple[int, float, float], list[tuple[str, float, int, float]]]:
        """Return the run, and the observations of stages, since the last call."""
        observed = [
            (stage, seconds / count, int(count), cpu_s)
            for (stage, _), (count, seconds, cpu_s) in self._sums.items()
            if count
        ]
        read = self._read
        self._clear()
        return read, observed

    def waits(self) -> tuple[float, int, float]:
        """Return the seconds without a core, how often this thread blocked in a sample, and CPU seconds, since last."""
        self.batches += 1
        now = perf_counter()
        if now < self._next_look:
            return 0.0, 0, 0.0
        self._next_look = now + PROBE_EVERY_S
        delayed, switches, cpu_s = delayed_s(), _switches(), self._cpu_now()
        found = (
            delayed - self._delayed_s,
            max(0, switches - self._switches_seen - self.batches),  # each wait for a ticket is one
            cpu_s - self._cpu_s,
        )
        self.batches = 0
        self._delayed_s, self._switches_seen, self._cpu_s = delayed, switches, cpu_s
        return found


def _switches() -> int:
    return getrusage(RUSAGE_THREAD).ru_nvcsw
