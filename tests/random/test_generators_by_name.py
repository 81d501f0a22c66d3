"""Promises:
- With `seed=`, a generator in an object that a module, a class or a closure holds draws the same for any number of
  workers, and again in the next loader. It has its old state afterwards.
- Looking for such generators reads only what samples name, and no long container of plain values.
- One that a sample makes and keeps in a module is named in a warning.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import fastload
import tests.random.held_by_a_module
from fastload.safety import Survey
from tests.children import run_python
from tests.random.held_by_a_module import Draws


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


class OfAProperty(Samples):
    @property
    def drawn(self) -> list[float]:
        return OBJECT()

    def draw(self) -> list[float]:
        return self.drawn


@functools.cache
def cached() -> Draws:
    return OBJECT


@functools.lru_cache
def made_once() -> Draws:
    return Draws()


made_once()


class OfACachesResult(Samples):
    def draw(self) -> list[float]:
        return made_once()()


class Unhashable(type):
    def __eq__(cls, other: object) -> bool:
        return cls is other


class Odd(metaclass=Unhashable):
    pass


ODD = Odd()


class BesideOddObjects(Samples):
    @property
    @functools.cache  # noqa: B019
    def drawn(self) -> Draws:
        return OBJECT

    def draw(self) -> list[float]:
        return self.drawn() if ODD else []


class OfACache(Samples):
    def draw(self) -> list[float]:
        return cached()()


class OfAClassInAnAttribute(Samples):
    def __init__(self) -> None:
        self.kinds: list[Any] = [MADE]

    def draw(self) -> list[float]:
        return self.kinds[0].draw()  # type: ignore[no-any-return]


class OfAModuleOfItsOwn(Samples):
    def draw(self) -> list[float]:
        from tests.random import held_by_a_module

        return held_by_a_module.HELD()


class OfAModulesModule(Samples):
    def draw(self) -> list[float]:
        return tests.random.held_by_a_module.HELD()


class OfANoGrad(Samples):
    @torch.no_grad()
    def draw(self) -> list[float]:
        return OBJECT()


def by_name(_: Any = None) -> list[float]:
    return OBJECT()


def by_default(_: Any = None, held: Draws = OBJECT) -> list[float]:
    return held()


class Bound:
    def drawn(self, _: Any = None) -> list[float]:
        return OBJECT()


class OfTransforms(Samples):
    """Has functions in attributes, in all the ways in which transforms are passed."""

    def __init__(self) -> None:
        self.transforms: Any = [by_name, by_default, lambda _: OBJECT(), Bound().drawn]
        self.transforms += [functools.partial(by_name), {"a": by_name}["a"], Compose([by_name])]

    def draw(self) -> list[float]:
        drawn = [number for transform in self.transforms for number in transform(None)]
        return [sum(drawn[k::3]) for k in range(3)]


class Compose:
    """As that of torchvision."""

    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, x: Any) -> Any:
        for transform in self.transforms:
            x = transform(x)
        return x


class OfABase(OfAClass):
    def draw(self) -> list[float]:
        return super().draw()


MAKES: list[Callable[[], Dataset[Any]]] = [
    *(Samples, OfAList, OfADict, OfSlots, OfAClass, OfAMethod, OfADecorator, OfAFactory),
    *(OfAProperty, OfACache, OfAClassInAnAttribute, OfANoGrad, OfABase),
    *(OfTransforms, OfACachesResult, BesideOddObjects),
    *(OfAModuleOfItsOwn, OfAModulesModule),
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


NUMBERS = [*range(1_000_000)]
ROWS = [{"path": str(k), "label": k} for k in range(20_000)]
BY_NAME = {str(k): (k, k) for k in range(20_000)}
OBJECTS = np.array([str(k) for k in range(20_000)], object)


class OfMany(Samples):
    def draw(self) -> list[float]:
        return [*OBJECT(), NUMBERS[0], ROWS[0], BY_NAME["1"], OBJECTS[0]]  # type: ignore[list-item]


def test_long_containers_of_plain_values_are_not_walked() -> None:
    survey, calls = Survey(OfMany()), 0

    def counted(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        found = dict(survey.generators())
    finally:
        sys.setprofile(before)
    assert f"{__name__}.OBJECT.rng" in found
    assert f"{__name__}.DICT['a'][0].rng" not in found  # samples do not name it
    assert calls < 10_000


def test_a_variable_and_an_attribute_of_one_path_draw_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("dataset")
    exec(OF_A_MODULE_DATASET, module.__dict__)
    monkeypatch.setitem(sys.modules, "dataset", module)
    assert all(one != other for one, other in drawn(module.Own(), 0))


OF_A_MODULE_DATASET = """
import numpy as np
rng = np.random.default_rng()
class Own:
    def __init__(self): self.rng = np.random.default_rng()
    def __len__(self): return 24
    def __getitem__(self, index): return [rng.random(), self.rng.random()]
"""


def test_spawned_processes_of_a_script_draw_the_same(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python(str(tmp_path / "script.py"), cwd=tmp_path, timeout=100.0)
    assert done.stdout == "True 8\n", done.stderr


SCRIPT = """
import numpy as np
import fastload
class Noise:
    def __init__(self): self.rng = np.random.default_rng()
    def __call__(self): return self.rng.random()
NOISE = Noise()
class Own:
    def __len__(self): return 8
    def __getitem__(self, index): return NOISE()
def drawn(**options):
    return [x for b in fastload.DataLoader(Own(), 2, seed=1, collate_fn=list, **options) for x in b]
if __name__ == "__main__":
    spawned = drawn(num_workers=2, worker_method="process", multiprocessing_context="spawn")
    print(spawned == drawn(), len(set(spawned)))
"""


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
