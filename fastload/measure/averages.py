"""Averages and quantiles: what a run makes of what it has timed."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np


def average(values: Sequence[float]) -> str:
    """Mean and population standard deviation in words; "n/a" if there are no values."""
    return f"mean: {np.mean(values):.2f}, stddev: {np.std(values):.2f}" if values else "n/a"


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
