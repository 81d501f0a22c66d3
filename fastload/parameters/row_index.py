"""`RowIndex`: the positions of rows in a table's arrays, by id. It is a hash table in NumPy, without a loop per row."""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class RowIndex:
    """The positions of ids, counted from 0 in the order in which they were added.

    The hash table uses open addressing with linear probing, and is at most half full. Memory: 16 to 32 bytes per row,
    and 8 to 16 for its id.
    """

    def __init__(self) -> None:
        self._ids: Ids = np.empty(16, np.int64)
        self._count = 0
        self._cells: Ids = np.full(64, -1, np.int64)  # a position, or -1
        # It spreads neighbouring ids. It is secret, so that no client can choose ids that all fall on one cell.
        self._factor = np.uint64(secrets.randbits(64) | 1)

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> Ids:
        """The ids, in the order of their positions."""
        return self._ids[: self._count]

    def find(self, ids: Ids) -> Ids:
        """Return the position of each id, or -1 for an unknown id."""
        places = np.full(len(ids), -1, np.int64)
        cells = self._first_cells(ids)
        left = np.arange(len(ids))
        while len(left):
            found = self._cells[cells]
            is_it = (found >= 0) & (self._ids[found] == ids[left])
            places[left[is_it]] = found[is_it]
            go_on = ~is_it & (found >= 0)
            left, cells = left[go_on], self._next(cells[go_on])
        return places

    def add(self, ids: Ids) -> None:
        """Add distinct new ids. If memory is missing, nothing changes."""
        first, count = self._count, self._count + len(ids)
        if count > len(self._ids):
            self._ids = np.resize(self._ids, max(count, 2 * len(self._ids)))
        self._ids[first:count] = ids
        if 2 * count > len(self._cells):
            self._cells = np.full(1 << (4 * count).bit_length(), -1, np.int64)
            first = 0
        self._count = count
        self._insert(np.arange(first, count))

    def _insert(self, places: Ids) -> None:
        cells = self._first_cells(self._ids[places])
        while len(places):
            free = self._cells[cells] < 0
            self._cells[cells[free]] = places[free]  # if several want one cell, one wins
            go_on = self._cells[cells] != places
            places, cells = places[go_on], self._next(cells[go_on])

    def _first_cells(self, ids: Ids) -> Ids:
        shift = np.uint64(64 - (len(self._cells) - 1).bit_length())
        return ((ids.view(np.uint64) * self._factor) >> shift).view(np.int64)

    def _next(self, cells: Ids) -> Ids:
        return (cells + 1) & (len(self._cells) - 1)
