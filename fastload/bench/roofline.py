"""The most that a configuration could load, from what one thread was seen to take: pure values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastload.bench.figures import Outcome


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The bound of a number of workers in a number of ranks."""

    ranks: int
    workers: int
    rate: float
    """Samples per second, of all ranks together."""
    by: Literal["workers", "cores", "step"]
    """Which of the three bounds is the lowest."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """An estimate of what no loader exceeds: the least of three rates (Williams et al., "Roofline", CACM 2009).

    workers: each keeps the pace of one alone: workers x ranks / `sample_s`.
    cores: all cores do nothing but compute samples: cores / `sample_cpu_s`.
    step: no batch is ever waited for: batch x ranks / step. Only where the step is simulated. It is also the rate on
    data that is in memory already, as a simulated step is all that a loop over such data does.

    A measured rate can lie a little above: `sample_s` was measured in another run, at another moment.
    """

    source: str
    """The configuration that the two times of a sample were measured in, each in its fastest run: that of the fewest
    workers."""
    sample_s: float
    """Seconds of one thread for a sample, its share of collating included."""
    sample_cpu_s: float
    """Those of them in which it computed, collating left out."""
    cores: int | None
    ceilings: tuple[Ceiling, ...]
    """One for each number of workers and of ranks, by ranks, then workers."""


def roofline(outcomes: Sequence[Outcome], *, cores: int | None) -> Roofline | None:
    """The roofline of what was measured; None where no run of fastload's loader has figures.

    `cores`: those that may be used; None leaves their bound out.
    """
    seen = [
        (outcome.run, stats)
        for outcome in outcomes
        if outcome.figures is not None and (stats := outcome.figures.loader_stats) is not None
        if "sample" in stats["stages"]
    ]
    if not seen:
        return None
    # One thread is the loader's own way to run; the serial loop may use several threads within an operation.
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
    """A figure of a stage for each time it was met; 0 where it was not."""
    met = stats["stages"].get(stage)
    return float(met[field]) / met["count"] if met and met["count"] else 0.0


def _seconds(stats: dict[str, Any], batch_size: int) -> float:
    return _each(stats, "sample", "seconds") + _each(stats, "collate", "seconds") / batch_size
