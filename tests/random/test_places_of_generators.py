"""Promises:
- A generator draws its own numbers in any place of the dataset that holds it. No two draw alike by accident.
- A generator that `worker_init_fn` makes is keyed.
- A generator that a sample makes and keeps is named in a warning.
"""

from __future__ import annotations

import copy
import enum
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

import fastload


def drawn(make: Callable[[], Any], workers: int, **options: Any) -> list[tuple[float, ...]]:
    """Return what the samples of two epochs draw."""
    loader = fastload.DataLoader(
        make(), batch_size=None, num_workers=workers, **{"seed": 7, **options}
    )
    return [tuple(sample) for _ in range(2) for sample in loader]


class Holds(Dataset[Any]):
    """Each sample is a draw from each generator that `find` finds in what the dataset holds."""

    def __init__(self, held: Any, find: Callable[[Any], list[Any]]) -> None:
        self.held, self.find = held, find

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> list[float]:
        return [float(g.random()) for g in self.find(self.held)]


SEEDS = itertools.count(1)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class CopiesItself:
    """Has a `__deepcopy__` of its own, as some transforms have."""

    def __init__(self) -> None:
        self.first, self.second = np.random.default_rng(), random.Random()

    def __deepcopy__(self, memo: Any) -> Any:
        mine = type(self).__new__(type(self))
        memo[id(self)] = mine
        vars(mine).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return mine


class Reduced:
    """Is made again of what it holds."""

    def __init__(self, first: Any, second: Any) -> None:
        self.pair = first, second

    def __reduce__(self) -> Any:
        return type(self), self.pair


class Loud(np.random.Generator):
    """Draws what only this class draws: a copy of another class would draw other numbers."""

    def random(self, *args: Any, **options: Any) -> Any:
        return super().random(*args, **options) + 10


class OldLoud(np.random.RandomState):
    """Is another such class."""

    def random(self, *args: Any) -> Any:
        return super().random(*args) + 30


def two() -> list[Any]:
    """Return two generators of new seeds: those that are seeded alike draw alike."""
    return [np.random.RandomState(next(SEEDS)), random.Random(next(SEEDS))]


def values(held: dict[Any, Any]) -> list[Any]:
    return list(held.values())


def with_defaults(first: Any, second: Any) -> Callable[[], list[Any]]:
    def found(a: Any = first, b: Any = second) -> list[Any]:
        return [a, b]

    return found


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], list[Any]]]] = {
    "a dict with keys of an enumeration": (lambda: dict(zip(Colour, two(), strict=True)), values),
    "a dict with pairs as keys": (lambda: dict(zip([(0, 1), (0, 2)], two(), strict=True)), values),
    "keys of a dict": (lambda: dict.fromkeys(two()), list),
    "defaults of a function": (lambda: with_defaults(*two()), lambda f: f()),
    "a class that is reduced": (lambda: Reduced(*two()), lambda r: list(r.pair)),
    "a class that copies itself": (CopiesItself, lambda c: [c.first, c.second]),
    "such a class, and beside it": (
        lambda: (lambda c: [c, c.first, c.second])(CopiesItself()),
        lambda held: held[1:],
    ),
    "a closure": (lambda: (lambda found: lambda: found)(two()), lambda f: f()),
    "bound methods": (lambda: [g.random for g in two()], lambda ms: [m.__self__ for m in ms]),
    "classes of the user's": (
        lambda: [Loud(np.random.PCG64(next(SEEDS))), OldLoud(next(SEEDS))],
        list,
    ),
    "a class": (lambda: type("Own", (), {"R": two()[0], "S": two()[1]})(), lambda x: [x.R, x.S]),
}


def generators_of_all(held: dict[str, Any]) -> list[Any]:
    return [g for name, (_, find) in HELD.items() for g in find(held[name])]


def test_each_place_draws_its_own_numbers_for_any_number_of_workers() -> None:
    def holds() -> Holds:
        return Holds({name: make() for name, (make, _) in HELD.items()}, generators_of_all)

    expected = drawn(holds, 0)
    assert {len(sample) for sample in expected} == {2 * len(HELD)}
    assert len({number for sample in expected for number in sample}) == 48 * 2 * len(HELD)
    for workers in (1, 4):
        assert drawn(holds, workers) == expected


class Seeded(Dataset[Any]):
    """Has a generator only after `worker_init_fn`, or after its first sample."""

    def __init__(self) -> None:
        self.rng: Any = None

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> list[float]:
        if self.rng is None:
            self.rng = np.random.default_rng(0)
        return [self.rng.random()]


def seed_worker(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)


@pytest.mark.parametrize("seed", [7, None])
def test_a_generator_that_worker_init_fn_makes_is_keyed(seed: int | None) -> None:
    def run(workers: int) -> list[tuple[float, ...]]:
        torch.manual_seed(3)
        return drawn(Seeded, workers, seed=seed, worker_init_fn=seed_worker)

    expected = run(1)
    assert len(set(expected)) == len(expected)
    assert run(3) == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_a_generator_that_a_sample_makes_and_keeps_is_named(workers: int) -> None:
    said = r"^fastload: Seeded seems to make the generator `dataset\.rng` while a sample is read"
    with pytest.warns(UserWarning, match=said):
        drawn(Seeded, workers)
