"""Promise: averages and quantiles are what they say; nothing to average is n/a."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.measure.averages import Average, Quantiles, figure

S3_RATES = (36.01, 37.57, 27.94, 38.88, 36.97, 36.96, 38.08, 11.67)
"""The rates that the third seed document averages, to the mean and the deviation that it prints."""


def averaged(*values: float) -> Average:
    average = Average()
    for value in values:
        average.add(value)
    return average


def test_the_tutorials_rates_have_the_mean_and_deviation_that_it_prints() -> None:
    assert str(averaged(*S3_RATES)) == "mean: 33.01, stddev: 8.68"


def test_nothing_to_average_is_not_a_number_and_says_so() -> None:
    assert str(averaged()) == "n/a"
    assert figure(None) == figure(math.nan) == "n/a"
    assert all(map(math.isnan, Quantiles().at(50, 95, 99)))


def test_one_value_deviates_from_nothing() -> None:
    assert str(averaged(3.0)) == "mean: 3.00, stddev: 0.00"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.sampled_from([0.0, 1e9]))
def test_the_average_is_the_exact_one_far_from_zero_too(values: list[float], base: float) -> None:
    values = [base + value for value in values]
    average = averaged(*values)
    assert average.mean == pytest.approx(statistics.fmean(values), rel=1e-12, abs=1e-6)
    assert average.stddev == pytest.approx(statistics.pstdev(values), rel=1e-6, abs=1e-4)


def test_quantiles_are_numpys() -> None:
    values = np.random.default_rng(0).random(101)
    quantiles = Quantiles()
    for value in values:
        quantiles.add(value)
    assert quantiles.at(50, 95, 99) == pytest.approx(np.percentile(values, [50, 95, 99]))
