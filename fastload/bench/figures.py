"""What a run yields, as pure values."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastload.bench.plan import Run
from fastload.errors import FastloadError
from fastload.measure.averages import average
from fastload.measure.processes import PeakMemory


class BenchError(FastloadError):
    """A benchmark cannot be run as asked, or a run did not do what it was asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one run measured. "Steady" is the time from the end of the warm-up steps to the end of the last step.

    Of several ranks, what `together` makes of them.
    """

    rate: float
    """Samples per second, steady; of all ranks together."""
    rank_rates: list[float]
    """Samples per second of each rank, in its own steady time."""
    window_rates: list[float]
    """Samples per second of each status window that ended after the warm-up: what the printed average is over."""
    first_batch_s: float
    """Seconds from `iter()` to the first batch in hand: starting threads or processes is in it, imports are not."""
    steady_s: float
    """Seconds of steady running."""
    wait_share: float
    """Share (0 to 1) of the steady seconds that the loop waited for the loader; near 1 the loader bounds the run."""
    cpu_s_per_1000: float | None
    """CPU seconds (user + system, children included) per 1,000 samples, steady; None where it cannot be known."""
    total_s: float
    """Seconds from `iter()` to the end of the last step."""
    close_s: float
    """Seconds that stopping the loader took, with work in flight."""
    samples: int
    """Samples delivered, in exactly the order that was asked for (anything else is an error)."""
    unique_samples: int
    """Different samples among them, by the index that the dataset itself returned."""
    intraop_threads: int
    """torch's intra-op threads in the loop's process; torch's worker processes have one each."""
    start_method: str | None
    """How worker processes were started; None for loaders that have none."""
    loader_stats: dict[str, Any] | None
    """`fastload.DataLoader.stats()` at the last step; None for torch's loader, which has none."""
    finding: str | None
    """What bounds the run, by those stats, in a sentence; None without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank of a run measured."""

    figures: Figures
    steady_from_s: float
    """`time.monotonic()`, which is one clock for all processes of a machine."""
    steady_to_s: float
    delivered: list[int]
    """The index of each sample, in order."""


def together(parts: Sequence[Part]) -> Figures:
    """The figures of all ranks of a run (at least one) as those of one run.

    The rate is that of all samples over the time from the first rank's warm-up to the last rank's end, so it is never
    more than the sum of the ranks' own. What a training step of all ranks waits for is that of the slowest: times are
    the longest. CPU and waiting are means, as the ranks load equally much. Windows, stats and finding are rank 0's.
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
        first_batch_s=max(figures.first_batch_s for figures in ranks),
        steady_s=steady_s,
        wait_share=statistics.fmean(figures.wait_share for figures in ranks),
        cpu_s_per_1000=statistics.fmean(cpu) if len(cpu) == len(ranks) else None,
        total_s=max(figures.total_s for figures in ranks),
        close_s=max(figures.close_s for figures in ranks),
        samples=sum(figures.samples for figures in ranks),
        unique_samples=len(set().union(*(part.delivered for part in parts))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run and what came of it: figures, or an error in one line."""

    run: Run
    figures: Figures | None
    error: str | None
    memory: PeakMemory | None
    cached_share: float | None
    """Share (0 to 1) of the run's bytes that were in the page cache when it started; None where that is not known."""
    others_share: float | None
    """Share (0 to 1) of the machine's cores that other processes took meanwhile: the more, the less a figure means."""
    messages: str
    """What the run wrote on standard error: warnings, tracebacks."""


def average_line(rates: Sequence[float], *, warmup_steps: int) -> str:
    """The line that sums up a run: mean and population standard deviation of its windows, or what is missing."""
    missing = (
        ""
        if rates
        else f": no status window ended after step {warmup_steps}; take more steps (--nsteps) or shorter windows "
        "(--status-print-interval)"
    )
    return f"Average image rate: {average(rates)}{missing}"
