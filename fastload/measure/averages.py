"""Averages and quantiles of measured times."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np


def average(values: Sequence[float]) -> str:
    """Return mean and population standard deviation as text, or "n/a" if there are no values."""
    return f"mean: {np.mean(values):.2f}, stddev: {np.std(values):.2f}" if values else "n/a"


class Quantiles:
    """Quantiles of added values. Memory: 8 bytes per value."""

    def __init__(self) -> None:
        self._values = array("d")

    def add(self, value: float) -> None:
        """Add a value."""
        self._values.append(value)

    def at(self, *percentages: float) -> list[float]:
        """Return the interpolated percentiles, or NaN for each if no value was added."""
        if not self._values:
            return [math.nan] * len(percentages)
        found: list[float] = np.percentile(self._values, percentages).tolist()
        return found


def figure(value: float | None, form: str = ".2f") -> str:
    """Return a figure as text, or "n/a" for None and NaN."""
    return "n/a" if value is None or math.isnan(value) else format(value, form)
