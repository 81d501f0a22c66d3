"""Promises:
- With `seed=`, a generator in an object that a module, a class or a closure holds draws the same for any number of
  workers, and again in the next loader. It has its old state afterwards.
- Looking for such generators reads no long container of plain values.
- One that a sample makes and keeps in a module is named in a warning.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from itertools import chain
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import fastload
from fastload.safety import Survey


class Draws:
    """Has a generator of each kind, as a transform has."""

    def __init__(self) -> None:
        self.rng, self.py, self.torch = np.random.default_rng(), random.Random(), torch.Generator()

    def __call__(self) -> list[float]:
        return [self.rng.random(), self.py.random(), torch.rand((), generator=self.torch).item()]


class Slotted:
    __slots__ = ("own",)

    def __init__(self) -> None:
        self.own = Draws()

    def __call__(self) -> list[float]:
        return self.own()


def decorated() -> Callable[[], list[float]]:
    held = Draws()

    def drawn(_: Any) -> Callable[[], list[float]]:
        return functools.wraps(in_a_decorator)(lambda: held())

    return drawn(None)


def in_a_decorator() -> list[float]:
    raise AssertionError


def of_a_factory() -> type:
    class Made:
        held = Draws()

        @staticmethod
        def draw() -> list[float]:
            return Made.held()

    return Made


OBJECT, LIST, DICT, SLOTTED, MADE = (
    Draws(),
    [1, Draws()],
    {"a": [Draws()]},
    Slotted(),
    of_a_factory(),
)
BOUND = Draws().__call__
in_a_decorator = decorated()  # noqa: F811


class Samples(Dataset[Any]):
    held = Draws()

    def __len__(self) -> int:
        return 24

    def draw(self) -> list[float]:
        return OBJECT()

    def __getitem__(self, index: int) -> list[float]:
        return self.draw()


class OfAList(Samples):
    def draw(self) -> list[float]:
        return LIST[1]()  # type: ignore[operator]


class OfADict(Samples):
    def draw(self) -> list[float]:
        return DICT["a"][0]()


class OfSlots(Samples):
    def draw(self) -> list[float]:
        return SLOTTED()


class OfAClass(Samples):
    def draw(self) -> list[float]:
        return self.held()


class OfAMethod(Samples):
    def draw(self) -> list[float]:
        return BOUND()


class OfADecorator(Samples):
    def draw(self) -> list[float]:
        return in_a_decorator()


class OfAFactory(Samples):
    def draw(self) -> list[float]:
        return MADE.draw()  # type: ignore[attr-defined,no-any-return]


def of_a_closure() -> Dataset[Any]:
    held = Draws()

    class Inner:
        def __call__(self) -> list[float]:
            return held()

    class Own(Samples):
        inner = Inner()

        @property
        def drawn(self) -> list[float]:
            return self.inner()

        def draw(self) -> list[float]:
            return self.drawn

    return Own()


MAKES: list[Callable[[], Dataset[Any]]] = [
    *(Samples, OfAList, OfADict, OfSlots, OfAClass, OfAMethod, OfADecorator, OfAFactory),
    of_a_closure,
]


def drawn(dataset: Dataset[Any], workers: int, **options: Any) -> list[list[float]]:
    """Return what the samples of two epochs draw."""
    with fastload.DataLoader(
        dataset,
        batch_size=2,
        num_workers=workers,
        seed=5,
        collate_fn=list,
        worker_method="process",
        **options,
    ) as loader:
        return [row for _ in range(2) for batch in loader for row in batch]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_draws_are_those_of_the_sample_for_any_number_of_workers(
    make: Callable[[], Dataset[Any]],
) -> None:
    dataset = make()
    first = drawn(dataset, 0)
    assert len(set(chain(*first))) == 2 * 24 * 3
    assert all(drawn(dataset, workers) == first for workers in (0, 1, 2, 3))


def test_spawned_processes_draw_the_same() -> None:
    for make in (Samples, OfAClass):
        spawned = drawn(make(), 1, multiprocessing_context="spawn")
        assert spawned == drawn(make(), 0)


def test_the_states_are_put_back() -> None:
    before = OBJECT.rng.bit_generator.state, OBJECT.py.getstate(), OBJECT.torch.get_state().tolist()
    drawn(Samples(), 0)
    after = OBJECT.rng.bit_generator.state, OBJECT.py.getstate(), OBJECT.torch.get_state().tolist()
    assert before == after


def test_long_containers_of_plain_values_are_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("of_a_user")
    module.__dict__.update(
        numbers=[*range(1_000_000)],
        rows=[{"path": str(k), "label": k} for k in range(200_000)],
        by_name={str(k): (k, k) for k in range(200_000)},
        objects=np.array([str(k) for k in range(200_000)], object),
        own=Draws(),
    )
    monkeypatch.setitem(sys.modules, "of_a_user", module)
    calls = 0

    def counted(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    survey = Survey(Samples())
    survey.generators()
    sys.setprofile(counted)
    try:
        found = dict(survey.generators())
    finally:
        sys.setprofile(before)
    assert "of_a_user.own.rng" in found
    assert calls < 1_000_000  # of all modules that pytest holds, too


LAZY: list[Draws] = []


class MakesIts(Samples):
    def draw(self) -> list[float]:
        if not LAZY:
            LAZY.append(Draws())
        return LAZY[0]()


@pytest.mark.filterwarnings("ignore:fastload. MakesIts seems")
def test_one_that_a_sample_makes_and_keeps_in_a_module_is_named() -> None:
    with pytest.warns(UserWarning, match=r"seems to make the generator `.*LAZY\[0\]"):
        drawn(MakesIts(), 1)
