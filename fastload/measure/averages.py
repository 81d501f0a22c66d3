"""Averages and quantiles: what a run makes of what it has timed."""

from __future__ import annotations

import math
from array import array

import numpy as np


class Average:
    """Mean and population standard deviation of the values added, by Welford's update.

    (B. P. Welford, "Note on a Method for Calculating Corrected Sums of Squares and Products",
    Technometrics 4, 1962.) A sum of squares would cancel where the values are alike.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = math.nan
        self._squares = 0.0

    def add(self, value: float) -> None:
        """Count one more value."""
        self.count += 1
        before = self.mean if self.count > 1 else value
        self.mean = before + (value - before) / self.count
        self._squares += (value - before) * (value - self.mean)

    @property
    def stddev(self) -> float:
        """Population standard deviation; NaN where nothing was added."""
        return math.sqrt(self._squares / self.count) if self.count else math.nan

    def __str__(self) -> str:
        return f"mean: {self.mean:.2f}, stddev: {self.stddev:.2f}" if self.count else "n/a"


class Quantiles:
    """The median, and what 95 and 99 of a hundred values do not exceed. Memory: 8 bytes a value."""

    def __init__(self) -> None:
        self._values = array("d")

    def add(self, value: float) -> None:
        """Count one more value."""
        self._values.append(value)

    def at(self, *percentages: float) -> list[float]:
        """The values below which so many per cent lie, interpolated; NaN where nothing was added."""
        if not self._values:
            return [math.nan] * len(percentages)
        found: list[float] = np.percentile(self._values, percentages).tolist()
        return found


def figure(value: float | None, form: str = ".2f") -> str:
    """A figure in words; "n/a" where there is none (None or NaN)."""
    return "n/a" if value is None or math.isnan(value) else format(value, form)
