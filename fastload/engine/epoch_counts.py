"""The counts of an epoch: the loop's own, the window's and the recorders', put together as `Stats`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isnan
from time import perf_counter, process_time

from fastload._kit.cores import usable_cores
from fastload.engine.window import Window
from fastload.memory.batch import Batch
from fastload.memory.slots import SlotPool
from fastload.processes.parent import Child
from fastload.processes.segments import Segments
from fastload.settings import Settings
from fastload.telemetry import Recorder, Stats, cores_busy_s, merge


class EpochCounts:
    """The counts of an iterator in one epoch. They outlive it, so that `loader.stats()` answers after the loop.

    Args:
        workers: threads that the iterator starts.
        pools: lend the memory of its batches.
        settings: the loader's.
    """

    def __init__(
        self, workers: int, pools: Sequence[SlotPool | Segments], settings: Settings
    ) -> None:
        self.workers = workers
        self._settings = settings
        self._pools = pools
        self.children: Sequence[Child] = ()
        """The worker processes, whose CPU time counts."""
        self._window: Window[Batch] | None = None
        self._final = NO_STATS

    def begin(self, epoch: int, window: Window[Batch], recorders: list[Recorder]) -> None:
        """Restart the counts at 0. `window` and `recorders` count the rest. `window.recount()` restarts its own."""
        self.epoch = epoch
        self.samples = 0
        self.batches = 0
        self.errors = 0
        self.bytes = 0
        self.retries = 0
        self.served_s = 0.0  # without workers, the loop waits for itself
        self._recorders = recorders
        self._started = perf_counter()
        self._cpu_started, self._cores_started = self._cpu_s(), cores_busy_s()
        self._window = window

    def stats(self) -> Stats:
        """Return a snapshot of the counts. After `end()`, return the final one."""
        window = self._window
        if window is None:
            return self._final
        waits = window.counts()
        measured = merge(self._recorders)
        cpu_s, cores_s = self._cpu_s() - self._cpu_started, cores_busy_s() - self._cores_started
        return Stats(
            epoch=self.epoch,
            workers=self.workers,
            depth=window.depth,
            samples=self.samples,
            batches=self.batches,
            errors=self.errors,
            elapsed_s=perf_counter() - self._started,
            consumer_wait_s=waits.consumer_wait_s + self.served_s,
            worker_wait_s=waits.worker_wait_s,
            occupancy=waits.occupancy if self.workers else 0.0,
            bytes=self.bytes,
            retries=self.retries,
            busy_s=sum(s.seconds for s in measured.stages.values() if s.name in _BUSY),
            slots_in_use=sum(pool.lent for pool in self._pools),
            cores=usable_cores(),
            process_cpu_s=cpu_s,
            others_cpu_s=0.0 if isnan(cores_s) else max(0.0, cores_s - cpu_s),
            workers_asked=self._settings.num_workers,
            worker_method=self._settings.worker_method if self.workers else "",
            worker_reason=self._settings.worker_reason,
            **measured._asdict(),
        )

    def _cpu_s(self) -> float:
        """Return the CPU seconds of this process and of its workers until now."""
        return process_time() + sum(child.cpu_s for child in self.children)

    def end(self) -> None:
        """Store the final counts. Drop the window, because it holds batches in flight."""
        self._final = replace(self.stats(), ended=True)
        self._window = None


NO_STATS = Stats()
_BUSY = ("sample", "collate")
"""The stages in which workers are busy."""
