"""The figures of a run, as pure values."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastload.bench.plan import Run
from fastload.errors import FastloadError


class BenchError(FastloadError):
    """Raised if a benchmark cannot run with these arguments, or if a run gave wrong samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one run. "Steady" is the time from the end of the warm-up steps to the end of the last step.

    `together` combines the figures of several ranks.
    """

    rate: float
    """Samples per second of all ranks together, in the steady time."""
    rank_rates: list[float]
    """Samples per second of each rank, in its own steady time."""
    window_rates: list[float]
    """Samples per second of each status window that ended after the warm-up. Their mean is the printed average."""
    first_batch_s: float
    """Seconds from `iter()` to the first batch. They include the start of threads or processes, but not imports."""
    steady_s: float
    """Seconds of steady running."""
    wait_share: float
    """Share (0 to 1) of the steady seconds in which the loop waited for the loader. Near 1, the loader is the limit."""
    cpu_s_per_1000: float | None
    """Steady CPU seconds (user + system, with children) per 1,000 samples, or None if unknown."""
    total_s: float
    """Seconds from `iter()` to the end of the last step."""
    close_s: float
    """Seconds that closing the loader took, with work in flight."""
    samples: int
    """Samples delivered, in exactly the planned order. Any other order is an error."""
    unique_samples: int
    """Different samples among them, by the index that the dataset returned."""
    intraop_threads: int
    """Threads within an operation of torch in the process of the loop: 1, as in each worker of any loader."""
    start_method: str | None
    """Start method of the worker processes, or None for loaders without processes."""
    loader_stats: dict[str, Any] | None
    """`fastload.DataLoader.stats()` of the steady time, or None for torch's loader."""
    finding: str | None
    """A sentence on what limits the run, from those stats, or None without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The figures of one rank of a run."""

    figures: Figures
    steady_from_s: float
    """`time.monotonic()`, which is one clock for all processes of a machine."""
    steady_to_s: float
    delivered: list[int]
    """The index of each sample, in order."""


_SLOWEST = ("first_batch_s", "total_s", "close_s")


def together(parts: Sequence[Part]) -> Figures:
    """Combine the figures of all ranks of a run (at least one) into those of one run.

    The rate counts all samples over the time from the first rank's warm-up to the last rank's end. So it is never more
    than the sum of the ranks' rates. Times are the longest of any rank, because a training step waits for the slowest
    one. CPU and waiting are means, because all ranks load the same number of samples. Windows, stats and finding are
    those of rank 0.
    """
    first, ranks = parts[0].figures, [part.figures for part in parts]
    if len(parts) == 1:
        return first
    steady_s = max(part.steady_to_s for part in parts) - min(part.steady_from_s for part in parts)
    cpu = [figures.cpu_s_per_1000 for figures in ranks if figures.cpu_s_per_1000 is not None]
    return replace(
        first,
        rate=sum(figures.rate * figures.steady_s for figures in ranks) / steady_s,
        rank_rates=[figures.rate for figures in ranks],
        steady_s=steady_s,
        wait_share=statistics.fmean(figures.wait_share for figures in ranks),
        cpu_s_per_1000=statistics.fmean(cpu) if len(cpu) == len(ranks) else None,
        samples=sum(figures.samples for figures in ranks),
        unique_samples=len(set().union(*(part.delivered for part in parts))),
        **{name: max(getattr(figures, name) for figures in ranks) for name in _SLOWEST},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run and its result: figures, or an error in one line."""

    run: Run
    figures: Figures | None
    error: str | None
    peak_bytes: int | None
    """The largest memory seen of all processes, or None if unknown."""
    cached_share: float | None
    """Share (0 to 1) of the run's bytes that were in the page cache when it started, or None if unknown."""
    others_share: float | None
    """Share (0 to 1) of this process's cores that other processes used during the run. The more, the less reliable."""
    messages: str
    """Standard error of the run: warnings and tracebacks."""
