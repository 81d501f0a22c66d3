"""Promise: A worker claims runs of units that last about RUN_SECONDS, by the median cost so far. One outlier changes
the next run by at most a quarter. The tickets of a worker that died go to the next one. No worker sleeps while units
are open, and a batch that the loop left takes no room.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastload.engine.window import Window
from fastload.memory.ticket import Ticket
from fastload.reading.runs import RUN_SECONDS

COSTS_S = [1e-3, 50e-6, 10e-6, 1e-6]  # of a unit
OUTLIERS = {"100 times as long": 100.0, "100 times as short": 0.01}


def runs(cost_s: Callable[[int], float], count: int) -> list[int]:
    """Return the lengths of `count` claims, where the n-th is reported to have cost `cost_s(n)` seconds a unit."""
    window: Window[Ticket] = Window(1)
    lengths: list[int] = []
    window.issue(Ticket(1_000_000_000))  # so many units that their end cuts no run short
    for n in range(count):
        claim = window.claim()
        assert claim is not None
        lengths.append(claim.stop - claim.start)
        assert not window.deliver(claim.ticket, lengths[-1], lengths[-1] * cost_s(n))
    return lengths


def fitting(cost_s: float) -> int:
    """Return how many units of that cost last RUN_SECONDS; one where a single unit lasts longer."""
    return max(1, round(RUN_SECONDS / cost_s))


@pytest.mark.parametrize("cost_s", COSTS_S)
def test_a_run_lasts_about_run_seconds(cost_s: float) -> None:
    assert RUN_SECONDS == 250e-6
    lengths = runs(lambda n: cost_s, 20)
    assert lengths[0] == 1, "while the cost is unknown"
    assert all(abs(length - fitting(cost_s)) <= 1 for length in lengths[1:])


@pytest.mark.parametrize("factor", OUTLIERS.values(), ids=OUTLIERS)
@pytest.mark.parametrize("cost_s", COSTS_S)
def test_one_outlier_changes_the_next_run_by_at_most_a_quarter_and_is_forgotten(
    cost_s: float, factor: float
) -> None:
    lengths = runs(lambda n: cost_s * factor if n == 10 else cost_s, 20)
    expected = fitting(cost_s)
    assert expected / 1.25 - 1 <= lengths[11] <= expected * 1.25
    assert all(abs(length - expected) <= 1 for length in lengths[1:11] + lengths[12:])
    lengths = runs(lambda n: 10e-6 * (factor if n == 0 else 1.0), 40)
    assert lengths[1] == fitting(10e-6 * factor)
    assert all(abs(length - 25) <= 1 for length in lengths[25:])


def test_occupancy_is_the_share_of_tickets_in_flight_that_a_take_finds_ready() -> None:
    window: Window[Ticket] = Window(2)
    window.recount()
    for units in (0, 1):  # the first failed before it could be read, so it is ready
        window.issue(Ticket(units))
    assert window.take(0) is not None
    counts = window.counts()
    assert (counts.consumer_wait_s, counts.occupancy) == (0.0, 0.5)


def test_a_batch_that_the_loop_left_takes_no_room_in_the_next_epoch() -> None:
    window: Window[Ticket] = Window(4, max_bytes=10)
    left, next_one = Ticket(1), Ticket(0)
    window.issue(left)
    window.discard()
    left.nbytes, next_one.nbytes = 100, 1
    window.complete(left)
    window.issue(next_one)  # complete at once
    assert window.has_room()


def test_a_worker_that_leaves_more_runs_than_expected_wakes_another() -> None:
    window: Window[Ticket] = Window(2)
    window.issue(Ticket(2))
    claims = [window.claim(), window.claim()]  # one unit each, while the cost is unknown
    assert claims[0] is not None
    window.deliver(claims[0].ticket, 1, RUN_SECONDS / 125)
    turns = [window._workers[0].join() for _ in range(2)]  # two workers that wait
    window.issue(Ticket(120))  # one run
    window.deliver(claims[0].ticket, 1, 1.0)  # or two, since units cost more than it seemed
    assert [turn.locked() for turn in turns] == [False, True]
    window.claim()
    assert not turns[1].locked()
