"""Promises:
- The tutorial's eight rates average to 33.01 with a standard deviation of 8.68. Nothing to average is n/a.
- Quantiles of figures are NumPy's.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from fastload.measure.averages import Quantiles, average, figure

S3_RATES = (36.01, 37.57, 27.94, 38.88, 36.97, 36.96, 38.08, 11.67)
"""The rates that the third seed document averages, to the mean and the deviation that it prints."""


def test_averages_are_the_tutorial_s_and_of_nothing_not_a_number() -> None:
    assert average(S3_RATES) == "mean: 33.01, stddev: 8.68"
    assert average([3.0]) == "mean: 3.00, stddev: 0.00"
    assert average([]) == "n/a"
    assert figure(None) == figure(math.nan) == "n/a"
    assert all(map(math.isnan, Quantiles().at(50, 95, 99)))


def test_quantiles_are_numpys() -> None:
    values = np.random.default_rng(0).random(101)
    quantiles = Quantiles()
    for value in values:
        quantiles.add(value)
    assert quantiles.at(50, 95, 99) == pytest.approx(np.percentile(values, [50, 95, 99]))
