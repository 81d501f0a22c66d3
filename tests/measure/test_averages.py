"""Promises:
- The tutorial's eight rates average to 33.01 with a standard deviation of 8.68. Nothing to average is n/a.
- Quantiles of figures are NumPy's.
"""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest

from fastload.measure.averages import average_line, quantiles_ms
from fastload.measure.repeats import figure

S3_RATES = (36.01, 37.57, 27.94, 38.88, 36.97, 36.96, 38.08, 11.67)
"""The rates that the third seed document averages, to the mean and the deviation that it prints."""


def test_averages_are_the_tutorial_s_and_of_nothing_not_a_number() -> None:
    assert average_line(S3_RATES) == "Average image rate: mean: 33.01, stddev: 8.68"
    assert average_line([3.0]).endswith("mean: 3.00, stddev: 0.00")
    missing = "Average image rate: n/a: no status window ended after step 5"
    assert average_line([]).startswith(missing)
    assert figure(None) == figure(math.nan) == "n/a"
    assert all(map(math.isnan, quantiles_ms([]).values()))


def test_quantiles_are_numpys() -> None:
    values = np.random.default_rng(0).random(101)
    expected = 1000 * np.percentile(values, [50, 95, 99])
    assert quantiles_ms(array("d", values)) == pytest.approx(
        dict(zip(("p50", "p95", "p99"), expected, strict=True))
    )
