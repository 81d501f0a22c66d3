"""Promise: averages, quantiles and rows of stats.csv are what they say; nothing to average is n/a."""

from __future__ import annotations

import csv
import math
import statistics
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.harness.rates import (
    Average,
    Quantiles,
    StatsFileError,
    append_row,
    check_table,
    figure,
)

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


# ---- stats.csv ----


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_follow_one_header(tmp_path: Path) -> None:
    path = tmp_path / "new" / "stats.csv"
    append_row(path, {"world_size": 1, "model": "a, b", "loss": None})
    append_row(path, {"world_size": 2, "model": 'say "c"', "loss": 0.5})
    assert rows(path) == [
        {"world_size": "1", "model": "a, b", "loss": ""},
        {"world_size": "2", "model": 'say "c"', "loss": "0.5"},
    ]


def test_a_file_with_other_columns_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "stats.csv"
    path.write_text("world_size,old\n4,1\n")
    for write in (
        lambda: append_row(path, {"world_size": 1, "new": 2}),
        lambda: check_table(path, ["world_size", "new"]),
    ):
        with pytest.raises(
            StatsFileError, match=r"stats\.csv.*only there: old; only here: new.*move"
        ):
            write()
    assert path.read_text() == "world_size,old\n4,1\n"


def test_a_row_that_a_crash_cut_off_stays_alone_on_its_line(tmp_path: Path) -> None:
    path = tmp_path / "stats.csv"
    path.write_text("a,b\n1,2\n3,")
    append_row(path, {"a": 5, "b": 6})
    assert path.read_text() == "a,b\n1,2\n3,\n5,6\n"


def test_rows_written_at_once_are_whole_and_have_one_header(tmp_path: Path) -> None:
    path, writers, each = tmp_path / "stats.csv", 8, 20
    start = threading.Barrier(writers)

    def write(number: int) -> None:
        start.wait()
        for row in range(each):
            append_row(path, {"writer": number, "row": row, "long": "x" * 5000})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = rows(path)
    assert {(row["writer"], row["row"]) for row in found} == {
        (str(writer), str(row)) for writer in range(writers) for row in range(each)
    }
    assert len(found) == writers * each
    assert {row["long"] for row in found} == {"x" * 5000}
