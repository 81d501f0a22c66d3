"""Promises:
- Packing puts every item into one row, and no row over its length, with as many rows as best-fit decreasing one by one.
- A plan of packing is a function of lengths, length of a row and seed. The seed mixes items of equal length, and rows.
- Rows of a plan are the same integers on every machine and in every version of NumPy.
"""

from __future__ import annotations

from collections import Counter
from hashlib import sha256

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastload.sequences.packing import best_fit


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Return how full each row is, by best-fit decreasing, item by item."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [k for k, used in enumerate(rows) if used + length <= capacity]
        if fitting:
            rows[max(fitting, key=rows.__getitem__)] += length
        else:
            rows.append(length)
    return rows


def contents(lengths: list[int], capacity: int, seed: int = 0) -> list[list[int]]:
    """Return the items in each row."""
    items, begins = best_fit(np.array(lengths, np.int64), capacity, seed)
    assert (begins[0], begins[-1]) == (0, len(items))
    return [part.tolist() for part in np.split(items, begins[1:-1])] if len(items) else []


CAPACITIES = st.integers(1, 40)
CASES = CAPACITIES.flatmap(
    lambda most: st.tuples(st.lists(st.integers(1, most), max_size=150), st.just(most))
)


@given(CASES, st.integers(-(2**70), 2**70))
def test_rows_are_those_of_best_fit_one_by_one(case: tuple[list[int], int], seed: int) -> None:
    lengths, capacity = case
    rows = contents(lengths, capacity, seed)
    assert sorted(item for row in rows for item in row) == [*range(len(lengths))]
    used = [sum(lengths[item] for item in row) for row in rows]
    assert max(used, default=0) <= capacity
    assert sorted(used) == sorted(one_by_one(lengths, capacity))


def test_the_seed_decides_which_equal_items_share_a_row() -> None:
    lengths = [50] * 1000
    one, again, other = (contents(lengths, 100, seed) for seed in (1, 1, 2))
    assert one == again != other
    assert len({*map(frozenset, one)} & {*map(frozenset, other)}) < 20
    neighbours = sum(abs(a - b) == 1 for a, b in one)
    assert neighbours < 20


def test_the_seed_decides_the_order_of_the_rows() -> None:
    places = [contents([*range(1, 101)], 100, seed) for seed in range(50)]
    assert {frozenset(map(tuple, rows)) for rows in places} == {frozenset(map(tuple, places[0]))}
    firsts = Counter(rows[0][0] for rows in places)
    assert len(firsts) > 20


def test_a_plan_is_the_same_everywhere() -> None:
    """NumPy 1.26 and 2.4 wrote this hash. More items than are hashed at once."""
    lengths = (np.arange(100_000, dtype=np.int64) * 7_919) % 4_096 % 2_999 + 1
    items, begins = best_fit(lengths, 4_096, 7)
    written = sha256(items.astype("<u4").tobytes() + begins.astype("<i8").tobytes()).hexdigest()
    assert (len(begins) - 1, written[:16]) == (30_372, "3769f20989e6b1ed")


def test_many_items_of_few_capacities() -> None:
    lengths = np.random.default_rng(0).integers(1, 4_097, 200_000)
    items, begins = best_fit(lengths, 4_096)
    sums = np.add.reduceat(lengths[items], begins[:-1])
    assert sums.max() <= 4_096
    assert np.array_equal(np.sort(items), np.arange(len(lengths)))
    assert len(begins) - 1 <= 1.01 * lengths.sum() / 4_096
