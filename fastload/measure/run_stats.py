"""The loader's figures over a run: all epochs together, without the warm-up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastload.telemetry import Stage, Stats

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
    stages = {
        name: stage if name not in before.stages else _stage_less(stage, before.stages[name])
        for name, stage in stats.stages.items()
    }
    slowest: dict[str, Any] = {}
    if stats.slowest_s == before.slowest_s:
        # It was before the snapshot, and the next slowest is unknown.
        slowest = {"slowest_s": 0.0, "slowest": "", "slowest_is_first": False}
    return replace(_sums(stats, before, -1), stages=stages, **slowest)


def _plus(stats: Stats, earlier: Stats) -> Stats:
    """Return the figures of an epoch and of earlier epochs together."""
    stages = {**earlier.stages, **stats.stages}
    for name in stats.stages.keys() & earlier.stages.keys():
        stages[name] = _stage_plus(stats.stages[name], earlier.stages[name])
    slowest = max(stats, earlier, key=lambda part: part.slowest_s)
    return replace(
        _sums(stats, earlier, 1),
        stages=stages,
        slowest_s=slowest.slowest_s,
        slowest=slowest.slowest,
        slowest_is_first=slowest.slowest_is_first,
    )


def _sums(stats: Stats, other: Stats, sign: int) -> Stats:
    """Return `stats` with the sums and means of `other` added, or subtracted with `sign` -1."""

    def mean(value: str, weight: str) -> float:
        total = getattr(stats, weight) + sign * getattr(other, weight)
        weighted = sum(
            factor * getattr(part, value) * getattr(part, weight)
            for part, factor in ((stats, 1), (other, sign))
        )
        return min(1.0, max(0.0, weighted / total)) if total > 0 else 0.0

    sums: dict[str, Any] = {
        name: max(0, getattr(stats, name) + sign * getattr(other, name)) for name in _SUMS
    }
    return replace(
        stats,
        **sums,
        occupancy=mean("occupancy", "batches"),
        gil_pressure=mean("gil_pressure", "gil_probes"),
    )


def _stage_less(stage: Stage, before: Stage) -> Stage:
    return replace(
        stage,
        seconds=max(0.0, stage.seconds - before.seconds),
        count=stage.count - before.count,
        cpu_s=max(0.0, stage.cpu_s - before.cpu_s),
    )


def _stage_plus(stage: Stage, earlier: Stage) -> Stage:
    """Return both stages together. Quantiles are weighted means, which are close if the parts are similar."""
    count = stage.count + earlier.count

    def mean(quantile: str) -> float:
        both = ((part, getattr(part, quantile)) for part in (stage, earlier))
        return sum(value * part.count for part, value in both) / count if count else 0.0

    return Stage(
        stage.name,
        stage.seconds + earlier.seconds,
        count,
        mean("p50_s"),
        mean("p95_s"),
        mean("p99_s"),
        stage.cpu_s + earlier.cpu_s,
    )
