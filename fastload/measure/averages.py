"""Averages and quantiles of measured times."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fastload.measure import WARMUP_STEPS

QUANTILES = (50, 95, 99)


def average_line(rates: Sequence[float]) -> str:
    """Return the tutorial's last line: mean and population standard deviation of rates, or why they are missing."""
    if rates:
        return f"Average image rate: mean: {np.mean(rates):.2f}, stddev: {np.std(rates):.2f}"
    return (
        f"Average image rate: n/a: no status window ended after step {WARMUP_STEPS}. Use more steps (--nsteps), or "
        "shorter windows (--status-print-interval)"
    )


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return the interpolated quantiles "p50", "p95" and "p99" in milliseconds, each NaN if there are no values."""
    found = np.percentile(seconds, QUANTILES).tolist() if seconds else [math.nan] * len(QUANTILES)
    return {f"p{percent}": value * 1000 for percent, value in zip(QUANTILES, found, strict=True)}
