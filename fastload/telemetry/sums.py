"""Sums and differences of a loader's figures: all epochs together, a run without its warm-up, the latest seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from fastload.telemetry.snapshot import RemoteReads
from fastload.telemetry.stats import Stats

_SUMS = (
    *("samples", "batches", "errors", "retries", "bytes", "elapsed_s", "consumer_wait_s"),
    *("worker_wait_s", "busy_s", "sample_cpu_s", "core_wait_s", "gil_probes"),
    *("blocked", "process_cpu_s", "others_cpu_s"),
)
_STAGE_SUMS = ("seconds", "count", "cpu_s")
_REMOTE_SUMS = (
    *("requests", "bytes_wanted", "bytes_fetched", "seconds", "retries", "throttled", "cache_hits"),
)


def less(stats: Stats, before: Stats) -> Stats:
    """Return the figures between two snapshots of one epoch, or of all epochs. Quantiles cover all of the later one."""
    slowest: dict[str, Any] = {}
    if stats.slowest_s == before.slowest_s:
        # It was before the snapshot, and the next slowest is unknown.
        slowest = {"slowest_s": 0.0, "slowest": "", "slowest_is_first": False}
    return replace(_summed(stats, before, -1), **slowest)


def plus(stats: Stats, earlier: Stats) -> Stats:
    """Return the figures of an epoch and of earlier epochs together.

    Figures that are neither sums nor means are those of the latest epoch, and so are quantiles.
    """
    if earlier.epoch < 0 or stats.epoch < 0:
        return stats if earlier.epoch < 0 else earlier
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

    def mean(name: str, weight: str) -> float:
        one, two = getattr(stats, weight), sign * getattr(other, weight)
        total = getattr(stats, name) * one + getattr(other, name) * two
        return max(0.0, total / (one + two)) if one + two > 0 else 0.0

    stages = dict(stats.stages)
    for name in stats.stages.keys() & other.stages.keys():
        one, two = stats.stages[name], other.stages[name]
        stages[name] = replace(one, **_sums(_STAGE_SUMS, one, two, sign))
    return replace(
        stats,
        **_sums(_SUMS, stats, other, sign),
        stages=stages,
        remote=_summed_remote(stats.remote, other.remote, sign),
        occupancy=min(1.0, mean("occupancy", "batches")),
        gil_pressure=min(1.0, mean("gil_pressure", "gil_probes")),
        gil_held=mean("gil_held", "gil_probes"),
    )


def _summed_remote(
    one: RemoteReads | None, two: RemoteReads | None, sign: int
) -> RemoteReads | None:
    if one is None or two is None:
        return one or (two if sign > 0 else None)
    return replace(one, **_sums(_REMOTE_SUMS, one, two, sign))


def _sums(names: Sequence[str], one: Any, two: Any, sign: int) -> dict[str, Any]:
    values = attrgetter(*names)
    pairs = zip(values(one), values(two), strict=True)
    return {name: max(0, a + sign * b) for name, (a, b) in zip(names, pairs, strict=True)}
