"""The plan of packing: which items share a row. It counts items of equal length, so no Python code runs for each item.

Integers alone decide it, so it is the same on all machines, with any version of NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload._kit.hashing import mix64, mix64s

MOST_ITEMS = (1 << 32) - 1
_ROWS = 0x726F_7773_0000_0000  # separates the order of the rows from that of the items
_CHUNK = 1 << 16  # items hashed at a time: their hashes stay in the cache of a core


def best_fit(
    lengths: NDArray[Any], capacity: int, seed: int = 0
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the rows of best-fit decreasing: the longest item is next, and goes to the fullest row that has room.

    Row `r` has the items `items[begins[r] : begins[r + 1]]`, the longest first. Returns the numbers of the items,
    uint32[items], and `begins`, int64[rows + 1].

    Args:
        lengths: integers of any dtype, each from 1 to `capacity`, at most `MOST_ITEMS`. `capacity` is below 2**31.
        seed: decides which of the items of equal length share a row, and the order of the rows.

    Beside `lengths` it takes at most 16 bytes of memory for each item, and 48 for each row.
    """
    items, counts = _longest_first(lengths, capacity, mix64(seed))
    steps = [*_steps(zip(range(capacity, -1, -1), counts.tolist(), strict=True), capacity)]
    rows = 1 + max((int(at[-1]) for at, _ in steps), default=-1)
    sizes = np.zeros(rows, np.int64)
    for at, each in steps:
        sizes[at] += each
    order, _ = _longest_first(np.broadcast_to(np.int64(0), rows), 0, mix64(seed ^ _ROWS))
    begins = np.concatenate([[0], np.cumsum(sizes[order])])
    ends = np.empty(rows, np.int64)  # of what each row has so far
    ends[order] = begins[:-1]
    placed = np.empty(len(items), np.uint32)
    done = 0
    for at, each in steps:
        count = len(at) * each
        placed[(ends[at][:, None] + np.arange(each)).ravel()] = items[done : done + count]
        ends[at] += each
        done += count
    return placed, begins


def _longest_first(
    lengths: NDArray[Any], capacity: int, key: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the items in the order of their lengths, the longest first, and how many have `capacity`, one less, ... 0.

    `key` shuffles the items of equal length. The numbers to sort have the length in their highest bits, then a hash,
    then the item. So no two are equal, and every sort gives the same order.
    """
    n = len(lengths)
    of_item, of_both = n.bit_length(), 64 - capacity.bit_length()
    keys = np.empty(n, np.uint64)
    for begin in range(0, n, _CHUNK):
        item = np.arange(begin, min(n, begin + _CHUNK), dtype=np.uint64)
        spare = (capacity - lengths[begin : begin + _CHUNK].astype(np.int64)).astype(np.uint64)
        mixed = mix64s(item ^ np.uint64(key)) >> np.uint64(64 - of_both + of_item)
        keys[begin : begin + _CHUNK] = (
            spare << np.uint64(of_both) | mixed << np.uint64(of_item) | item
        )
    keys.sort()
    firsts = np.searchsorted(keys, np.arange(capacity + 1, dtype=np.uint64) << np.uint64(of_both))
    keys &= np.uint64((1 << of_item) - 1)
    return keys, np.diff(firsts, append=n)


class _Bins:
    """Rows as bins, indexed by their remaining capacity. Full bins are dropped."""

    def __init__(self, capacity: int) -> None:
        self._rows: list[list[NDArray[np.uint32]]] = [[] for _ in range(capacity + 1)]
        self._present = 0  # bit `r` is set if a row has `r` left

    def smallest(self, length: int) -> int:
        """Return the least remaining capacity of a row that is at least `length`, or 0."""
        fitting = self._present >> length
        return length + (fitting & -fitting).bit_length() - 1 if fitting else 0

    def put(self, rows: NDArray[np.uint32], left: int) -> None:
        """Add rows that have this remaining capacity."""
        if left:
            self._rows[left].append(rows)
            self._present |= 1 << left

    def take(self, left: int, most: int) -> NDArray[np.uint32]:
        """Remove rows that have this remaining capacity, at most `most` of them, and return them."""
        rows, taken = self._rows[left], []
        while rows and most:
            some = rows.pop()
            if len(some) > most:
                rows.append(some[most:])
            taken.append(some[:most])
            most -= len(taken[-1])
        if not rows:
            self._present ^= 1 << left
        return np.concatenate(taken)


def _steps(
    counts: Iterable[tuple[int, int]], capacity: int
) -> Iterator[tuple[NDArray[np.uint32], int]]:
    """Yield rows, and how many of the next items each of them takes. All rows are different; new ones have new numbers.

    Args:
        counts: pairs of a length and of the number of items that have it, the largest length first.
    """
    bins, opened = _Bins(capacity), 0
    for length, left in counts:
        while left:
            room = bins.smallest(length)
            # A row that has taken one item is still the fullest that has room.
            each = (room or capacity) // length
            needed = -(-left // each)
            if room:
                rows = bins.take(room, needed)
            else:
                room = capacity
                rows = np.arange(opened, opened + needed, dtype=np.uint32)
                opened += needed
            count = min(left, len(rows) * each)
            full, rest = divmod(count, each)
            for some, taken in ((rows[:full], each), (rows[full:], rest)):
                if len(some):
                    bins.put(some, room - taken * length)
                    yield some, taken
            left -= count
