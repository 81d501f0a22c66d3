"""Promise: The summary of a run names the rank that waited most, and adds up the rates of all ranks."""

from __future__ import annotations

from fastload.train.summary import AllRanks, _waits


def ranks(rates: list[float | None], waits: list[float | None]) -> AllRanks:
    return AllRanks(rates=rates, wait_shares=waits, samples=0, unique_samples=0)


def test_the_rank_that_waited_most_is_named() -> None:
    assert ranks([1.0] * 3, [0.1, 0.4, 0.2]).worst_wait == 0.4
    assert "at most 40 % (rank 1)" in _waits(ranks([1.0] * 3, [0.1, 0.4, 0.2]))
    assert ranks([1.0, None], [None, 0.2]).worst_wait == 0.2
    assert ranks([None], [None]).worst_wait is None


def test_the_rate_of_all_ranks_is_known_if_that_of_each_is() -> None:
    assert ranks([10.0, 30.0], [None, None]).global_rate == 40.0
    assert ranks([10.0, 30.0], [None, None]).mean_rate == 20.0
    assert ranks([10.0, None], [None, None]).global_rate is None
    assert ranks([10.0, None], [None, None]).mean_rate == 10.0
