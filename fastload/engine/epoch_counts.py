"""The counts of an epoch: the loop's own, the window's and the recorders', put together as `Stats`, and reported."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan
from time import perf_counter, process_time
from typing import Any

from fastload._kit.cores import usable_cores
from fastload._kit.user_errors import annotate, file_note, shown
from fastload.engine.choice import Chosen, learn
from fastload.engine.window import Window
from fastload.errors import TooManyErrorsError
from fastload.memory.batch import Batch
from fastload.memory.slots import SlotPool
from fastload.order.sampler_state import single_sampler
from fastload.processes.child import Child
from fastload.processes.segments import Segments
from fastload.settings import Settings
from fastload.telemetry import Recorder, Stats, cores_busy_s, merge
from fastload.telemetry.recorder import gil_is_on
from fastload.telemetry.remote_reads import Counts, between, read_so_far
from fastload.telemetry.sums import plus

NO_STATS = Stats()

TELL_SECONDS = 10.0
"""The time between two calls of `on_stats` within an epoch."""

_log = logging.getLogger("fastload")

_BUSY = ("sample", "collate")
"""The stages in which workers are busy."""


@dataclass(slots=True)
class Counted:
    """What the loop has received in one epoch, and how the clocks stood at its beginning. Only the loop writes."""

    epoch: int
    recorders: list[Recorder]
    started: float
    told: float  # when `on_stats` was last called
    cpu_started: float
    cores_started: float
    idle_started: float
    remote_started: Sequence[Counts]
    samples: int = 0
    batches: int = 0
    errors: int = 0
    handled: int = 0  # of the errors, by `on_error`
    bytes: int = 0
    retries: int = 0
    served_s: float = 0.0  # without workers, the loop waits for itself
    earlier: Stats = NO_STATS  # of all epochs before this one
    window: Window[Batch] | None = None  # None after the epoch, which then has its final figures
    final: Stats = NO_STATS


class EpochCounts:
    """The counts of an iterator in one epoch. They outlive it, so that `loader.stats()` answers after the loop.

    The loop's thread also reports them: by the log, `on_stats` and `max_errors`.

    Args:
        who: kind and number of the workers.
        pools: lend the memory of the batches.
    """

    _settings: Settings  # of the epoch

    def __init__(self, who: Chosen, pools: Sequence[SlotPool | Segments]) -> None:
        self._pid = os.getpid()
        self._who = who
        self._pools = pools
        self.children: Sequence[Child] = ()
        """The worker processes, whose CPU time counts."""
        self.now = Counted(-1, [], 0.0, 0.0, 0.0, 0.0, 0.0, [])

    def begin(
        self, settings: Settings, epoch: int, window: Window[Batch], recorders: list[Recorder]
    ) -> None:
        """Restart the counts at 0. `window` and `recorders` count the rest."""
        self._settings = settings
        clocks = (self._cpu_s(), cores_busy_s(), self._idle_s(), self._remote())
        earlier = self.total()
        window.recount()
        # One object, which is replaced: another thread may call `stats` at any time.
        now = perf_counter()
        self.now = Counted(epoch, recorders, now, now, *clocks, earlier=earlier, window=window)

    def stats(self) -> Stats:
        """Return a snapshot of the counts. After `end()`, return the final one."""
        return self._measured(self.now)

    def total(self) -> Stats:
        """Return the figures of all epochs of the loader together, until now. A fork counts anew."""
        now = self.now
        return plus(self._measured(now), now.earlier) if self._pid == os.getpid() else NO_STATS

    def _measured(self, now: Counted) -> Stats:
        window = now.window
        if window is None:
            return now.final
        waits = window.counts()
        measured = merge(now.recorders)
        sampler = single_sampler(self._settings.sampler)
        plan = sampler if hasattr(sampler, "useful_share") else self._settings.dataset
        cpu_s, cores_s = self._cpu_s() - now.cpu_started, cores_busy_s() - now.cores_started
        return replace(
            measured,
            epoch=now.epoch,
            workers=self._who.number,
            processes=len(self.children),
            depth=window.depth,
            samples=now.samples,
            batches=now.batches,
            errors=now.errors,
            elapsed_s=perf_counter() - now.started,
            consumer_wait_s=waits.consumer_wait_s + now.served_s,
            worker_wait_s=waits.worker_wait_s + self._idle_s() - now.idle_started,
            occupancy=waits.occupancy if self._who.number else 0.0,
            bytes=now.bytes,
            retries=now.retries,
            gil=gil_is_on(),
            busy_s=sum(s.seconds for s in measured.stages.values() if s.name in _BUSY),
            slots_in_use=sum(pool.lent for pool in self._pools),
            cores=usable_cores(),
            process_cpu_s=cpu_s,
            others_cpu_s=0.0 if isnan(cores_s) else max(0.0, cores_s - cpu_s),
            workers_asked=self._settings.num_workers,
            worker_method=self._who.kind if self._who.number else "",
            worker_reason=self._who.reason,
            useful_share=getattr(plan, "useful_share", None),
            remote=between(now.remote_started, self._remote()),
            **self._held(),
        )

    def learn(self) -> None:
        """Let the next choice know what this epoch shows, if there may be another one."""
        # In a fork, another thread may have held a lock.
        if self._who.adapts and self._pid == os.getpid():
            learn(self._settings, self.stats())

    def _cpu_s(self) -> float:
        """Return the CPU seconds of this process and of its workers until now."""
        return process_time() + sum(child.remote.cpu_s for child in self.children)

    def _held(self) -> dict[str, Any]:
        """Return what worker processes saw of their GILs, as fields of `Stats`."""
        probes = [child.remote.probes for child in self.children]
        number = sum(probed for probed, _ in probes)
        held = sum(held / probed for probed, held in probes if probed)
        return {"gil_held": held, "gil_probes": number} if number else {}

    def _remote(self) -> list[Counts]:
        """Return what this process and each worker process have read from object stores until now."""
        return [read_so_far(), *(child.remote.fetched for child in self.children)]

    def _idle_s(self) -> float:
        """Return the seconds in which workers of processes had no batch to read, added up."""
        return sum(child.remote.idle_s() for child in self.children)

    def end(self) -> None:
        """Store the final counts. Drop the window, because it holds batches in flight."""
        now = self.now
        now.final = replace(self.stats(), ended=True)
        now.window = None

    # ---- reports ----

    def count(self, batch: Batch) -> None:
        """Count a batch that the loop takes, and log what `on_error="skip"` left out of it."""
        # A callable on_error has seen the errors already.
        told = self._settings.on_error == "skip"
        for k, exc in sorted(batch.handled.items()) if told else ():
            index, text = batch.indices[k], shown(exc, str)
            file = file_note(self._settings.dataset, index, exc)
            if file.partition(": ")[2] in text:
                file = ""
            name = type(exc).__name__
            _log.warning(
                "fastload: skipped sample index %s: %s: %s%s", shown(index), name, text, file
            )
        counts = self.now
        counts.batches += not batch.left_out
        counts.errors += len(batch.handled) + (batch.error is not None)
        counts.retries += len(batch.retries)
        counts.handled += len(batch.handled)
        most = self._settings.max_errors
        if batch.handled and most is not None and counts.handled > most:
            last = batch.handled[max(batch.handled)]
            batch.error = TooManyErrorsError(
                f"failed samples of epoch {batch.epoch}: {counts.handled}, but max_errors allows "
                f"only {most}. Fix these samples, or raise max_errors"
            )
            batch.error.__cause__ = last
            batch.data = None
        batch.handled.clear()  # the errors refer to the batch by their tracebacks
        if batch.error is None and not batch.left_out:
            counts.samples += batch.size - len(batch.skipped)
            counts.bytes += batch.nbytes
        declared = self._settings.declared_length
        if declared is not None and not batch.left_out and counts.batches > declared:
            warnings.warn(
                f"Length of IterableDataset {self._settings.dataset} was reported to be {declared} (when accessing "
                f"len(dataloader)), but {counts.batches} samples have been fetched.",
                stacklevel=4,
            )

    def tell(self) -> None:
        """Call `on_stats`."""
        self.now.told = perf_counter()
        if self._settings.on_stats is None:
            return
        try:
            self._settings.on_stats(self.stats())
        except BaseException as exc:
            annotate(exc, f"epoch {self.now.epoch}; stage: on_stats; no batch is lost")
            raise

    def tell_if_due(self) -> None:
        """Call `on_stats` if its last call was `TELL_SECONDS` ago."""
        if perf_counter() - self.now.told > TELL_SECONDS:
            self.tell()
