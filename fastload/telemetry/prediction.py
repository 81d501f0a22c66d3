"""Which kind of workers would read best, by what was measured while one kind read."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from fastload.telemetry.snapshot import Snapshot, duration, percent, waited_share

HAND_OVER_S = 0.25e-3
"""What a batch costs a loop that takes it from a worker process: some 0.1 ms of CPU time, and a wake-up."""

FEWEST_BATCHES, FEWEST_PROBES = 10, 40
"""Without as many, nothing is predicted."""

LITTLE = 0.05
"""If all workers together hold the GIL for less of the time, threads of the loop's process cost the loop no more."""

ROOM = 1.3
"""Processes for each GIL that is held. It is also the least change that is worth one: in processes, or in speed."""

WAITS = 0.1
"""Share of the loop's time. If it waits longer for batches, it needs all processes. Two threads of Pillow in a process
hold the GIL for 44 % of the time, and read 15 % less than two processes."""


class Kind(NamedTuple):
    """A kind of workers, and why it would read best."""

    kind: str
    """ "thread", "process", or "none" for the loop itself."""
    processes: int
    reason: str


def best_kind(stats: Snapshot) -> Kind | None:
    """Return the kind of workers that would read best: another one only if that is worth it. None if it is not known.

    The loop itself, if it reads a batch faster than it takes one over. Threads, if they hardly use the GIL. Else a
    process for each worker, up to the number of cores, while the loop waits. If it does not, as few as free the GIL.
    """
    if stats.batches < FEWEST_BATCHES or not stats.cores:
        return None
    workers, method = stats.workers_asked, stats.worker_method
    alone_s = _seconds_alone(stats)
    if method == "":
        reads = f"the loop reads a batch in {duration(alone_s)}"
        if alone_s > ROOM * HAND_OVER_S:
            return Kind("process", min(workers, stats.cores), f"{reads}, and takes it over faster")
        return Kind("none", 0, f"{reads}, and would take it over no faster")
    if alone_s < HAND_OVER_S:
        why = f"the loop would read a batch in {duration(alone_s)}, and takes it over no faster"
        return Kind("none", 0, why)
    if method != "process" or (stats.gil and stats.gil_probes < FEWEST_PROBES):
        return None
    held = f"{workers} workers hold the GIL for {percent(stats.gil_held)} of the time"
    if stats.gil_held < LITTLE:
        return Kind("thread", 0, held)
    most = min(workers, stats.cores)
    if waited_share(stats) > WAITS:
        needed, why = most, f"the loop waits {percent(waited_share(stats))} of the time"
    else:
        needed, why = max(1, min(ceil(ROOM * stats.gil_held), most)), held
    if max(needed, stats.processes) < ROOM * min(needed, stats.processes):
        needed = stats.processes
    return Kind("process", needed, why)


def _seconds_alone(stats: Snapshot) -> float:
    """Return in how many seconds one worker alone would read a batch, collate and pin it."""
    stages = (stats.stages.get(name) for name in ("sample", "collate", "pin"))
    return sum(stage.p50_s * stage.count / stats.batches for stage in stages if stage)
