"""The highest rate that a configuration could reach, estimated from the times of one thread, as pure values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastload.bench.figures import Outcome


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The highest possible rate of a number of workers in a number of ranks."""

    ranks: int
    workers: int
    rate: float
    """Samples per second of all ranks together."""
    by: Literal["workers", "cores", "step"]
    """The lowest of the three bounds."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """An estimate of the highest rate: the lowest of three bounds (Williams et al., "Roofline", CACM 2009).

    workers: each worker is as fast as one alone: workers x ranks / `sample_s`.
    cores: all cores do nothing but compute samples: cores / `sample_cpu_s`.
    step: the loop never waits for a batch: batch x ranks / step. Only with a simulated step. It is also the rate on
    data in memory, because a loop over such data does nothing else than this step.

    A measured rate can be slightly higher, because `sample_s` was measured in another run. The two times are those of
    torchvision's transforms, so the bound does not hold for a plan.
    """

    source: str
    """The configuration in which the two times of a sample were measured: that with the fewest workers. Each time is
    from its fastest run."""
    sample_s: float
    """Seconds of one thread per sample, with its share of collating."""
    sample_cpu_s: float
    """CPU seconds of one thread per sample, without collating."""
    cores: int | None
    ceilings: tuple[Ceiling, ...]
    """One for each number of ranks and workers, sorted by ranks, then workers."""


def roofline(outcomes: Sequence[Outcome], *, cores: int | None) -> Roofline | None:
    """Return the roofline of the measured runs, or None if no run of fastload's loader without a plan has figures.

    `cores`: number of usable cores. None: their bound is left out.
    """
    seen = [
        (outcome.run, stats)
        for outcome in outcomes
        if outcome.figures is not None and (stats := outcome.figures.loader_stats) is not None
        if "sample" in stats["stages"] and outcome.run.loader != "plan"
    ]
    if not seen:
        return None
    # One worker thread is preferred to serial loading, which may use several threads within an operation.
    fewest, _ = min(seen, key=lambda pair: (pair[0].ranks, pair[0].workers or 1, -pair[0].workers))
    work = fewest.workload
    typical = [stats for run, stats in seen if run.name == fewest.name]
    sample_s = min(_seconds(stats, work.batch_size) for stats in typical)
    cpu_s = min(_each(stats, "sample", "cpu_s") for stats in typical)

    def ceiling(ranks: int, workers: int) -> Ceiling:
        bounds: dict[Literal["workers", "cores", "step"], float] = {
            "workers": workers * ranks / sample_s
        }
        if cores and cpu_s > 0:
            bounds["cores"] = cores / cpu_s
        if work.step_ms > 0:
            bounds["step"] = work.batch_size * ranks / (work.step_ms / 1000)
        lowest = min(bounds, key=lambda name: bounds[name])
        return Ceiling(ranks, workers, bounds[lowest], lowest)

    measured = (outcome.run for outcome in outcomes if outcome.figures is not None)
    places = sorted({(run.ranks, run.workers) for run in measured if run.workers})
    return Roofline(
        source=fewest.name,
        sample_s=sample_s,
        sample_cpu_s=cpu_s,
        cores=cores,
        ceilings=tuple(ceiling(ranks, workers) for ranks, workers in places),
    )


def _each(stats: dict[str, Any], stage: str, field: str) -> float:
    """Return a figure of a stage per sample that passed it, or 0 if none did."""
    met = stats["stages"].get(stage)
    return float(met[field]) / met["count"] if met and met["count"] else 0.0


def _seconds(stats: dict[str, Any], batch_size: int) -> float:
    return _each(stats, "sample", "seconds") + _each(stats, "collate", "seconds") / batch_size
