"""The loader's figures over a run: all epochs together, without the warm-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from fastload.telemetry import Stats

_SUMS = (
    *("samples", "batches", "errors", "retries", "bytes", "elapsed_s", "consumer_wait_s"),
    *("worker_wait_s", "busy_s", "sample_cpu_s", "core_wait_s", "gil_probes"),
    *("blocked", "process_cpu_s", "others_cpu_s"),
)


class RunStats:
    """Adds up a loader's `stats`, which cover one epoch each."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats
        self._begin: Stats | None = None
        self._ended: Stats | None = None

    def begin(self) -> None:
        """Forget everything up to now: the warm-up."""
        self._begin, self._ended = self._stats(), None

    def epoch_ended(self) -> None:
        """Record the figures of the epoch that has ended, before those of the next one replace them."""
        self._ended = self.now()

    def now(self) -> Stats:
        """Return the figures since `begin()`. Figures that are neither sums nor means are those of the latest epoch."""
        stats = self._stats()
        if self._begin is not None and self._begin.epoch == stats.epoch:
            stats = less(stats, self._begin)
        return stats if self._ended is None else _plus(stats, self._ended)


def less(stats: Stats, before: Stats) -> Stats:
    """Return the figures between two snapshots of one epoch. Quantiles cover the whole epoch."""
    slowest: dict[str, Any] = {}
    if stats.slowest_s == before.slowest_s:
        # It was before the snapshot, and the next slowest is unknown.
        slowest = {"slowest_s": 0.0, "slowest": "", "slowest_is_first": False}
    return replace(_summed(stats, before, -1), **slowest)


def _plus(stats: Stats, earlier: Stats) -> Stats:
    """Return the figures of an epoch and of earlier epochs together. Quantiles are those of the latest."""
    both = _summed(stats, earlier, 1)
    slowest = max(stats, earlier, key=lambda part: part.slowest_s)
    return replace(
        both,
        stages={**earlier.stages, **both.stages},
        slowest_s=slowest.slowest_s,
        slowest=slowest.slowest,
        slowest_is_first=slowest.slowest_is_first,
    )


def _summed(stats: Stats, other: Stats, sign: int) -> Stats:
    """Return `stats` with the sums and means of `other` added, or subtracted with `sign` -1."""

    def sums(names: Iterable[str], one: Any, two: Any) -> dict[str, Any]:
        return {name: max(0, getattr(one, name) + sign * getattr(two, name)) for name in names}

    def mean(name: str, weight: str) -> float:
        return _mean(
            *(getattr(stats, name), getattr(stats, weight)),
            *(getattr(other, name), sign * getattr(other, weight)),
        )

    stages = dict(stats.stages)
    for name in stats.stages.keys() & other.stages.keys():
        one, two = stats.stages[name], other.stages[name]
        stages[name] = replace(one, **sums(("seconds", "count", "cpu_s"), one, two))
    return replace(
        stats,
        **sums(_SUMS, stats, other),
        stages=stages,
        occupancy=min(1.0, max(0.0, mean("occupancy", "batches"))),
        gil_pressure=min(1.0, max(0.0, mean("gil_pressure", "gil_probes"))),
        gil_held=max(0.0, mean("gil_held", "gil_probes")),
    )


def _mean(one: float, weight: float, two: float, other_weight: float) -> float:
    total = weight + other_weight
    return (one * weight + two * other_weight) / total if total > 0 else 0.0
