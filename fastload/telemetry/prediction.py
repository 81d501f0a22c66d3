"""Which kind of workers would read best, judged by what was measured while one kind read."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from fastload.telemetry.snapshot import (
    Snapshot,
    duration,
    percent,
    seconds_in,
    share_of_workers,
    waited_share,
)

HAND_OVER_S = 0.25e-3
"""What it costs the loop to take a batch over from a worker process: some 0.1 ms of CPU time, and a wake-up."""

FEWEST_BATCHES, FEWEST_PROBES = 10, 40
"""With fewer of either, nothing is predicted."""

LITTLE = 0.05
"""Share of the time. If all workers together hold the GIL for less, threads cost the loop no more than processes."""

ROOM = 1.3
"""Processes for each GIL that is held. A change of processes or of speed by a smaller factor is not worth it."""

PRESSURE = 0.07
"""GIL pressure: a wait of a third of a millisecond each time that a thread wants the GIL."""

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
    """Return the kind of workers that would read best, or None if that is not known. Stay if a change is not worth it.

    - The loop itself, if it reads a batch faster than it takes one over.
    - Else threads, if they hardly use the GIL.
    - Else a process for each worker, up to the number of cores, if the loop waits.
    - Else as few processes as free the GIL while workers are as busy as now.
    - Threads that wait for the GIL become processes.
    """
    if stats.batches < FEWEST_BATCHES or not stats.cores:
        return None
    most = min(stats.workers_asked, stats.cores)
    alone_s = _seconds_alone(stats)
    alone = duration(alone_s) if alone_s else "no measurable time"
    read = f"a batch in {alone}, and takes one over"
    if not stats.worker_method:  # the loop itself reads
        if alone_s > ROOM * HAND_OVER_S:
            return Kind("process", most, f"the loop reads {read} faster")
        return Kind("none", 0, f"the loop reads {read} no faster")
    if alone_s < HAND_OVER_S:
        return Kind("none", 0, f"the loop would read {read} no faster")
    if stats.gil and stats.gil_probes < FEWEST_PROBES:
        return None
    if stats.worker_method == "thread":
        why = f"threads wait for the GIL (pressure {stats.gil_pressure:.2f})"
        return Kind("process", most, why) if stats.gil_pressure > PRESSURE else None
    held = (
        f"{stats.workers_asked} busy workers hold the GIL for {percent(stats.gil_held)} of the time"
    )
    if stats.gil_held < LITTLE:
        return Kind("thread", 0, held)
    if (waited := waited_share(stats)) > WAITS:
        needed, why = most, f"the loop waits {percent(waited)} of the time"
    else:
        in_use = stats.gil_held * share_of_workers(stats.busy_s, stats)
        needed, why = max(1, min(ceil(ROOM * in_use), most)), held
    if max(needed, stats.processes) < ROOM * min(needed, stats.processes):
        needed = stats.processes
    return Kind("process", needed, why)


def _seconds_alone(stats: Snapshot) -> float:
    """Return the seconds in which one worker alone would read a batch, collate it and pin it.

    The slowest sample does not count, which may have imported modules, nor do waits for a core. On full cores most of
    these waits lie outside of samples, so what samples computed counts in any case.
    """
    seconds = sum(seconds_in(stats, x) for x in ("sample", "collate", "pin")) - stats.core_wait_s
    return max(0.0, max(seconds, stats.sample_cpu_s) - stats.slowest_s) / stats.batches
