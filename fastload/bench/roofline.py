"""The highest rate that a configuration could reach, estimated from the fastest worker of all runs, as pure values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastload.bench.figures import Figures, Outcome
from fastload.bench.plan import Run


@dataclass(frozen=True, slots=True)
class Pace:
    """The least time that a sample took in any run with the same transform.

    A time is that of fastload's own clocks, or what the rate of a run implies if that is less: each of 2 workers that
    load 200 samples per second together takes at most 10 ms. So no measured rate exceeds its bound, even if other
    processes disturbed the runs whose samples were timed.
    """

    plan: bool
    """True for the runs with a plan, False for those with torchvision's transforms."""
    sample_s: float
    """Seconds of one worker per sample, with its share of collating."""
    sample_cpu_s: float
    """CPU seconds per sample, without collating. 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The highest possible rate of a number of workers in a number of ranks, with or without a plan."""

    plan: bool
    ranks: int
    workers: int
    rate: float
    """Samples per second of all ranks together."""
    by: Literal["workers", "cores", "step"]
    """The lowest of the three bounds."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """An estimate of the highest rate: the lowest of three bounds (Williams et al., "Roofline", CACM 2009).

    workers: each worker is as fast as the fastest: workers x ranks / `sample_s`.
    cores: all cores do nothing but compute samples: cores / `sample_cpu_s`.
    step: the loop never waits for a batch: batch x ranks / step. Only with a simulated step. It is also the rate on
    data in memory, because a loop over such data does nothing else than this step.
    """

    cores: int | None
    paces: tuple[Pace, ...]
    ceilings: tuple[Ceiling, ...]
    """One for each number of ranks and workers: first without a plan, then with one."""


def roofline(outcomes: Sequence[Outcome], *, cores: int | None) -> Roofline | None:
    """Return the roofline of the measured runs, or None if no run of fastload's loader has figures.

    `cores`: number of usable cores. None: their bound is left out.
    """
    paces: list[Pace] = []
    ceilings: list[Ceiling] = []
    for plan in (False, True):
        measured = [
            (outcome.run, outcome.figures)
            for outcome in outcomes
            if outcome.figures is not None and (outcome.run.loader == "plan") is plan
        ]
        pace = _pace(measured, plan=plan, cores=cores)
        if pace is not None:
            configurations = {(run.ranks, run.workers): run for run, _ in measured if run.workers}
            paces.append(pace)
            ceilings += [
                _ceiling(configurations[key], pace, cores) for key in sorted(configurations)
            ]
    return Roofline(cores, tuple(paces), tuple(ceilings)) if paces else None


def _pace(measured: Sequence[tuple[Run, Figures]], *, plan: bool, cores: int | None) -> Pace | None:
    """Return the pace of the fastest worker, or None if no run timed its samples."""
    timed = [
        (run, figures.loader_stats)
        for run, figures in measured
        if figures.loader_stats is not None and "sample" in figures.loader_stats["stages"]
    ]
    if not timed:
        return None
    sample_s = [_seconds(stats, run.workload.batch_size) for run, stats in timed]
    sample_s += [max(1, run.workers) * run.ranks / figures.rate for run, figures in measured]
    cpu_s = [_each(stats, "sample", "cpu_s") for _, stats in timed] + [min(sample_s)]
    if cores:
        cpu_s += [cores / figures.rate for _, figures in measured]
    return Pace(plan, min(sample_s), min(cpu_s))


def _ceiling(run: Run, pace: Pace, cores: int | None) -> Ceiling:
    work = run.workload
    bounds: dict[Literal["workers", "cores", "step"], float] = {
        "workers": run.workers * run.ranks / pace.sample_s
    }
    if cores and pace.sample_cpu_s > 0:
        bounds["cores"] = cores / pace.sample_cpu_s
    if work.step_ms > 0:
        bounds["step"] = work.batch_size * run.ranks / (work.step_ms / 1000)
    lowest = min(bounds, key=lambda name: bounds[name])
    return Ceiling(pace.plan, run.ranks, run.workers, bounds[lowest], lowest)


def _each(stats: dict[str, Any], stage: str, field: str) -> float:
    """Return a figure of a stage per sample that passed it, or 0 if none did."""
    met = stats["stages"].get(stage)
    return float(met[field]) / met["count"] if met and met["count"] else 0.0


def _seconds(stats: dict[str, Any], batch_size: int) -> float:
    return _each(stats, "sample", "seconds") + _each(stats, "collate", "seconds") / batch_size
