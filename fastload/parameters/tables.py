"""`Table`: rows by id, created when they are first changed, with the optimizer's state for each row."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastload._kit.hashing import GOLDEN, finalized, hash64, mix64s
from fastload.errors import ParametersError
from fastload.parameters.optimizer import Optimizer
from fastload.parameters.row_index import RowIndex

_DRAWN = 2**22  # numbers drawn at once: 100 MB
_WIDEST = 2**20
_DEFAULTS = {"uniform": 0.05, "normal": 0.05, "constant": 0.0, "zeros": 0.0}


@dataclass(frozen=True)
class TableInfo:
    """The description of a table.

    Args:
        name: name of the table, or of the layer that uses it.
        dim: number of values in a row.
        initializer: how a new row is drawn. "uniform(0.05)": from -0.05 to 0.05. "normal(0.05)": with this standard
            deviation. "constant(0)" or "zeros". These numbers are the defaults.

    Examples:
        >>> fastload.parameters.TableInfo("user", dim=64, initializer="normal(0.05)").rule()
        ('normal', 0.05)
    """

    name: str
    dim: int
    initializer: str = "uniform"

    def __post_init__(self) -> None:
        named = isinstance(self.name, str) and self.name
        if not named or type(self.dim) is not int or not 1 <= self.dim <= _WIDEST:
            raise ValueError(
                f"a table needs a name and a dim of 1 to {_WIDEST}, got name={self.name!r} and dim={self.dim!r}"
            )
        if not math.isfinite(self.rule()[1]):
            raise ValueError(f"table {self.name!r} has rows of {self.initializer!r}. Give a number")

    def rule(self) -> tuple[str, float]:
        """Return the name of the initializer and its number.

        Raises:
            ValueError: the initializer is unknown.
        """
        found = re.fullmatch(r"(\w+)(?:\(([-+.\deE]+)\))?", self.initializer)
        if found is None or found[1] not in _DEFAULTS:
            raise ValueError(
                f"table {self.name!r} has the initializer {self.initializer!r}: give uniform(0.05), normal(0.05), "
                "constant(0) or zeros"
            )
        return found[1], float(found[2]) if found[2] else _DEFAULTS[found[1]]


def drawn(info: TableInfo, seed: int, ids: NDArray[np.int64]) -> Tensor:
    """Return new rows. A row depends only on the seed, the name of the table, and the id."""
    rows = np.empty((len(ids), info.dim), np.float32)
    at_once = max(1, _DRAWN // info.dim)
    for first in range(0, len(ids), at_once):
        rows[first : first + at_once] = _drawn(info, seed, ids[first : first + at_once])
    return torch.from_numpy(rows)


def _drawn(info: TableInfo, seed: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    kind, scale = info.rule()
    if kind in ("constant", "zeros"):
        return np.full((len(ids), info.dim), scale, np.float32)
    key = np.uint64(hash64(f"{seed}\0{info.name}"))
    columns = info.dim if kind == "uniform" else 2 * info.dim
    steps = np.arange(1, columns + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    bits = finalized(mix64s(ids.view(np.uint64) ^ key)[:, None] + steps)
    uniform = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)  # in [0, 1)
    if kind == "uniform":
        return (uniform * 2 - 1) * np.float32(scale)
    radius = np.sqrt(-2 * np.log1p(-uniform[:, : info.dim]))  # Box and Muller
    rows: NDArray[np.float32] = (
        radius * np.cos(np.float32(2 * np.pi) * uniform[:, info.dim :]) * np.float32(scale)
    )
    return rows


def expect_ids(name: str, ids: Tensor) -> None:
    """Raise ParametersError unless the ids of rows are int64[n]."""
    if ids.dtype != torch.int64 or ids.ndim != 1:
        raise ParametersError(
            f"ids of rows of {name!r} must be int64[n], got {ids.dtype}{list(ids.shape)}"
        )


class Table:
    """The rows of one table that a server has. Not thread-safe.

    Memory: up to twice the size of the rows, because the arrays double when they are full; three times while they grow.
    """

    def __init__(self, info: TableInfo, optimizer: Optimizer, *, seed: int = 0) -> None:
        self.info = info
        self._optimizer = optimizer
        self._seed = seed
        self._index = RowIndex()  # the position of each row in the columns, by its id
        # The values of the rows, and the states of the optimizer.
        widths = {"value": info.dim, **optimizer.row_widths(info.dim)}
        self._columns = {name: torch.zeros(0, width) for name, width in widths.items()}

    def __len__(self) -> int:
        return len(self._index)

    def rows(self, ids: Tensor) -> Tensor:
        """Return a copy of the rows of `ids`, in this order. Missing rows are drawn but not kept."""
        expect_ids(self.info.name, ids)
        places = self._found(ids)
        absent = (places < 0).nonzero()[:, 0]
        if not len(absent):
            return self._columns["value"].index_select(0, places)
        rows = torch.empty(len(ids), self.info.dim)
        known = (places >= 0).nonzero()[:, 0]
        rows[known] = self._columns["value"].index_select(0, places[known])
        rows[absent] = drawn(self.info, self._seed, ids[absent].numpy())
        return rows

    def check(self, ids: Tensor, values: Tensor) -> None:
        """Raise ParametersError unless `values` are one row, or the gradient of one, for each of distinct `ids`."""
        name, wanted = self.info.name, (len(ids), self.info.dim)
        expect_ids(name, ids)
        # Clients send them in ascending order.
        if not (ids[1:] > ids[:-1]).all() and len(np.unique(ids.numpy())) < len(ids):
            raise ParametersError(f"ids of rows of {name!r} must be distinct, but some repeat")
        if values.shape != wanted or not values.is_floating_point():
            raise ParametersError(
                f"table {name!r} takes float32{list(wanted)} for {len(ids)} ids, got {values.dtype}"
                f"{list(values.shape)}. Give one row for each id"
            )

    def set_rows(self, ids: Tensor, values: Tensor) -> None:
        """Set the rows of distinct `ids`."""
        self.check(ids, values)
        places = self.places(ids)  # first: it may replace the arrays
        self._columns["value"].index_copy_(0, places, values.float())

    def apply(self, places: Tensor, gradients: Tensor, lr: float) -> None:
        """Change the rows at distinct `places`, one step each."""
        rows = {name: kept.index_select(0, places) for name, kept in self._columns.items()}
        self._optimizer.step(rows["value"], gradients, rows, lr)
        for name, kept in self._columns.items():
            kept.index_copy_(0, places, rows[name])

    def columns(self) -> dict[str, Tensor]:
        """Return ids, values and optimizer state of all rows, as views that are valid until the next change."""
        rows = {name: kept[: len(self)] for name, kept in self._columns.items()}
        return {"id": torch.from_numpy(self._index.ids), **rows}

    def add(self, columns: dict[str, Tensor]) -> None:
        """Add rows from `columns()` of another table. Raise ValueError if they are of another optimizer."""
        if columns.keys() != {"id", *self._columns}:
            raise ValueError(
                f"table {self.info.name!r} was saved with the columns {', '.join(sorted(columns))}, but the optimizer "
                f"{self._optimizer.name!r} has the columns {', '.join(sorted({'id', *self._columns}))}. Use "
                "the optimizer that the checkpoint was made with"
            )
        first = self._grow(columns["id"])
        for name, kept in self._columns.items():
            kept[first : len(self)] = columns[name]

    def places(self, ids: Tensor) -> Tensor:
        """Return the positions of the rows of `ids`. Missing rows are created."""
        new = torch.unique(ids[self._found(ids) < 0])
        if len(new):
            values = drawn(self.info, self._seed, new.numpy())
            first = self._grow(new)  # which may replace the arrays
            self._columns["value"][first : len(self)] = values
        return self._found(ids)

    def _found(self, ids: Tensor) -> Tensor:
        """Return the positions of the rows of `ids`, or -1 for missing rows."""
        return torch.from_numpy(self._index.find(ids.numpy()))

    def _grow(self, ids: Tensor) -> int:
        """Add rows of zeros, and return the position of the first. If memory is missing, nothing changes."""
        first = len(self)
        count = first + len(ids)
        if count > (room := len(self._columns["value"])):
            room = max(count, 2 * room, 16)
            self._columns = {n: _grown(kept, first, room) for n, kept in self._columns.items()}
        self._index.add(ids.numpy())
        return first


def _grown(array: Tensor, filled: int, room: int) -> Tensor:
    new = array.new_zeros(room, array.shape[1])
    new[:filled] = array[:filled]
    return new
