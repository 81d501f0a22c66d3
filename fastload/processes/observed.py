"""What the workers of a process measure while they read. The loop's process adds it to its own recorders."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from fastload.processes.beside import Beside
from fastload.telemetry.recorder import PROBE_EVERY_S, Recorder, bucket, delayed_s, switches


class Observed(Recorder):
    """What one worker measures of one batch. It keeps sums, so that stages in each sample leave an answer small."""

    __slots__ = ("_read", "_sums")

    def __init__(self) -> None:
        self.running = []
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
        samples, before, computed = self._read
        self._read = samples + units, before + seconds, computed + cpu_seconds

    def read(self, worker: int) -> tuple[Any, ...]:
        """Return what was measured: worker, samples, seconds, CPU seconds, and observations as `add` takes them."""
        stages = [
            (stage, seconds / count, int(count), cpu_s)
            for (stage, _), (count, seconds, cpu_s) in self._sums.items()
            if count
        ]
        return worker, *self._read, stages


class Looks:
    """Looks, at most every `PROBE_EVERY_S`, at what a worker's thread waited for.

    Args:
        beside: has the CPU seconds of the process, and the probes of its GIL.
    """

    def __init__(self, beside: Beside) -> None:
        self._beside = beside
        self._batches = 0
        self._next = 0.0
        self._seen = delayed_s(), switches()

    def look(self) -> tuple[float, int, float, tuple[int, int]] | None:
        """Return `Outcome.waits`. Call it after each batch: it returns None between looks."""
        self._batches += 1
        now = perf_counter()
        if now < self._next:
            return None
        self._next = now + PROBE_EVERY_S
        seen = delayed_s(), switches()
        delayed, blocked = (a - b for a, b in zip(seen, self._seen, strict=True))
        stops = max(0, int(blocked) - self._batches)  # the wait for each ticket is a switch
        self._batches, self._seen = 0, seen
        return delayed, stops, self._beside.cpu_s(), self._beside.gil.probes
