"""The figures of a run of `fastload train` or `fastload bench`."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from fastload.telemetry.diagnosis import bound
from fastload.telemetry.snapshot import waited_share

if TYPE_CHECKING:
    from fastload.measure.loop_timer import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one rank, or of all ranks of a run together.

    "Steady" is the time from the end of the warm-up steps to the end of the last step. Figures of it are None if the
    run ended in its warm-up.
    """

    rate: float | None
    """Samples per second of all ranks together, in the steady time."""
    rank_rates: list[float | None]
    """Samples per second of each rank, in its own steady time."""
    wait_shares: list[float | None]
    """Share (0 to 1) of each rank's steady time in which its loop waited. Near 1, the loader is the limit."""
    window_rates: list[float]
    """Samples per second of each status window that ended after the warm-up. Their mean is the printed average."""
    first_batch_s: float
    """Seconds from `iter()` to the first batch. They include the start of threads or processes, but not imports."""
    steady_s: float
    """Seconds of steady running."""
    cpu_s_per_1000: float | None
    """Steady CPU seconds (user + system, with children) per 1,000 samples, or None if unknown."""
    total_s: float
    """Seconds from `iter()` to the end of the last step."""
    samples: int
    """Samples delivered."""
    unique_samples: int
    """Different samples among them, by the index that the dataset returned."""
    loader_stats: dict[str, Any] | None
    """`fastload.DataLoader.stats()` of the steady time, or None for torch's loader."""
    finding: str | None
    """A sentence on what limits the run, from those stats, or None without them."""
    cause: str | None
    """The same in one word."""

    @classmethod
    def of(cls, measured: Measured, *, unique_samples: int) -> Self:
        """Return the figures of one rank."""
        stats, cpu_s, share = measured.stats, measured.steady_cpu_s, measured.wait_share
        found = bound(stats) if stats else None
        if share is not None and stats is not None:
            share = waited_share(stats)  # as the sentence counts it
        return cls(
            rate=measured.rate,
            rank_rates=[measured.rate],
            wait_shares=[share],
            window_rates=measured.window_rates,
            first_batch_s=measured.first_batch_s,
            steady_s=measured.steady_s,
            cpu_s_per_1000=cpu_s and cpu_s * 1000 / measured.steady_samples,
            total_s=measured.training_s,
            samples=measured.samples,
            unique_samples=unique_samples,
            loader_stats=asdict(stats) if stats else None,
            finding=found and found.sentence,
            cause=found and found.cause,
        )

    def values(self) -> dict[str, float | None]:
        """Return one number for each figure, by its name in stats.csv and in the table of `fastload bench`."""
        rates = [rate for rate in self.rank_rates if rate is not None]
        return {
            "rate_global": self.rate,
            "rate_rank_mean": statistics.fmean(rates) if rates else None,
            "rate_rank_min": min(rates, default=None),
            "rate_rank_max": max(rates, default=None),
            "wait_share_max": max((w for w in self.wait_shares if w is not None), default=None),
            "first_batch_s": self.first_batch_s,
            "cpu_s_per_1000": self.cpu_s_per_1000,
        }
