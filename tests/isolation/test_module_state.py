"""Promises:
- A module-level instance is each worker's own, by any way that code reaches it. After the loaders ended it is as
  before.
- `isinstance`, `super()`, pickling and dataclasses work as usual while a loader runs. See also
  `tests/compat/test_module_level.py`.
- Outside of the workers, only `type(x)` of a module-level instance `x` differs.
"""

from __future__ import annotations

import abc
import copy
import functools
import json
import operator
import pickle
import queue
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch

from fastload.isolation.code import ModuleObject, module_level
from fastload.isolation.module_state import ModuleState, original
from fastload.testing import Sequencer

T = TypeVar("T")
HERE = sys.modules[__name__]


def named(value: object, name: str = "x", *, rebound: bool = False) -> ModuleObject:
    return ModuleObject(__name__, name, value, rebound)


def in_worker(state: ModuleState, copies: dict[int, Any], function: Callable[[], T]) -> T:
    """Call a function in a thread that acts on `copies`."""

    def run() -> T:
        state.enter(copies)
        return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


@pytest.fixture
def installed() -> Iterator[Callable[..., ModuleState]]:
    states: list[ModuleState] = []

    def install(*values: object) -> ModuleState:
        states.append(ModuleState(map(named, values)))
        states[-1].install()
        return states[-1]

    yield install
    for state in states:
        state.remove()


# ---- every way to the object ----


class Crop:
    """Draws in one call what another call uses, as transforms with parameters do."""

    size: ClassVar[int] = 2

    def __init__(self) -> None:
        self.at = 0

    def draw(self, at: int) -> None:
        self.at = at

    def __call__(self, x: int) -> int:
        return x + self.at


crop = Crop()
TRANSFORMS = {"train": Crop()}
PIPELINE = [Crop(), Crop()]
bound = Crop().draw
partly = functools.partial(Crop(), 3)


class Holder:
    crop = Crop()


def closed() -> Callable[[], Crop]:
    inner = Crop()
    return lambda: inner


get_closed = closed()


def with_default(x: int = 0, t: Crop = Crop()) -> Crop:  # noqa: B008
    return t


WAYS: dict[str, Callable[[], Crop]] = {
    "by name": lambda: crop,
    "globals()": lambda: globals()["crop"],
    "the module": lambda: getattr(HERE, "crop"),  # noqa: B009
    "a dictionary": lambda: TRANSFORMS["train"],
    "a list": lambda: PIPELINE[1],
    "a class attribute": lambda: Holder.crop,
    "a closure": lambda: get_closed(),
    "a default": lambda: with_default(),
    "a bound method": lambda: bound.__self__,  # type: ignore[attr-defined]
    "a partial": lambda: partly.func,  # type: ignore[return-value]
}


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_acts_on_its_copy_by_every_way_to_an_instance(way: str) -> None:
    reach = WAYS[way]
    found = [
        *(named(v, n) for n, v in vars(HERE).items() if n in module_state_names),
        named(Holder.crop),
    ]
    state = ModuleState(found)
    x = reach()
    assert any(root is x for root in state.roots)
    mine = Crop()
    state.install()
    try:
        in_worker(state, {id(x): mine}, lambda: reach().draw(5))
        assert (mine.at, x.at) == (5, 0)
        assert in_worker(state, {id(x): mine}, lambda: (reach().at, reach()(1))) == (5, 6)
        reach().draw(7)
        assert (mine.at, x.at) == (5, 7)
    finally:
        state.remove()
        x.at = 0
    assert type(x) is Crop


module_state_names = {
    *("crop", "TRANSFORMS", "PIPELINE", "bound", "partly", "get_closed", "with_default")
}


def test_two_workers_that_take_turns_do_not_see_each_others_draws(installed: Any) -> None:
    x = Crop()
    state = installed(x)
    turn = Sequencer()

    def work(worker: int) -> int:
        state.enter({id(x): Crop()})
        with turn(worker):
            x.draw(worker + 1)
        with turn(2 + worker):  # both have drawn
            return x(0)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [1, 2]
    assert x.at == 0


# ---- classes of every kind ----

made: list[str] = []  # what metaclasses and hooks of classes heard of


class Plain:
    def __init__(self) -> None:
        self.n = 0


class Slotted:
    __slots__ = ("__weakref__", "n")

    def __init__(self) -> None:
        self.n = 0


@dataclass(frozen=True)
class Frozen:
    n: int = 0

    def bump(self) -> None:
        object.__setattr__(self, "n", self.n + 1)


class Abstract(abc.ABC):
    @abc.abstractmethod
    def apply(self) -> int: ...


class Concrete(Abstract):
    n = 0

    def apply(self) -> int:
        return self.n


class Registry(type):
    known: ClassVar[dict[str, type]] = {}

    def __new__(meta, name: str, bases: Any, space: Any, **keywords: Any) -> Any:
        made.append(name)
        return super().__new__(meta, name, bases, space)

    def __init__(cls, name: str, bases: Any, space: Any, **keywords: Any) -> None:
        assert name not in Registry.known
        Registry.known[name] = cls
        super().__init__(name, bases, space)


class Registered(metaclass=Registry):
    def __init__(self) -> None:
        self.n = 0


class Hooked:
    n = 0

    def __init_subclass__(cls, *, needed: int, **keywords: Any) -> None:
        made.append(cls.__name__)


class HookedChild(Hooked, needed=1):
    pass


class Parent:
    def __init__(self) -> None:
        self.n = 0

    def bump(self) -> None:
        self.n += 1


class Child(Parent):
    def bump(self) -> None:
        super().bump()


class ListChild(list[int]):
    n = 0


class DictChild(dict[str, int]):
    n = 0


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: Any) -> Any:
        return x + self.weight


class Generator(random.Random):
    n = 0


class Copied:
    """Makes its copies itself, of its `__class__`."""

    def __init__(self, n: int = 0) -> None:
        self.n = n

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__class__(self.n)

    __copy__ = functools.partialmethod(__deepcopy__, None)


class CopiedByType(Copied):
    def __deepcopy__(self, memo: Any) -> Any:
        return type(self)(self.n)

    __copy__ = functools.partialmethod(__deepcopy__, None)


KINDS = [
    *(Plain, Slotted, Concrete, Registered, HookedChild, Child),
    *(DictChild, Module, Generator, Copied, CopiedByType),
]


@pytest.mark.parametrize("kind", KINDS)
def test_instances_of_every_kind_of_class_are_a_workers_own_and_then_as_before(kind: type) -> None:
    x, mine = kind(), kind()
    made.clear()
    state = ModuleState([named(x)])
    assert state.roots == [x]
    assert state.unreached == []
    state.install()
    try:

        def act() -> tuple[bool, bool]:
            x.n += 1
            if hasattr(x, "__dict__"):
                x.new = 3
            return isinstance(x, kind), x.__class__ is kind

        assert in_worker(state, {id(x): mine}, act) == (True, True)
        assert (mine.n, x.n) == (1, 0)
        assert not hasattr(x, "new")
        assert isinstance(x, kind)
        assert x.__class__ is kind
        x.n = 7
        assert (mine.n, x.n) == (1, 7)
        x.n = 0
    finally:
        state.remove()
    assert type(x) is kind
    assert x.n == 0
    assert made == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Generator])
@pytest.mark.parametrize(
    "through",
    [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)
def test_pickles_and_copies_are_of_the_original_class_in_every_thread(
    kind: type, through: Callable[[Any], Any], installed: Any
) -> None:
    x, mine = kind(), kind()
    mine.n = 5
    state = installed(x)
    assert type(through(x)) is kind
    assert through(x).n == 0
    theirs = in_worker(state, {id(x): mine}, lambda: through(x))
    assert type(theirs) is kind
    assert theirs.n == 5


def test_a_frozen_dataclass_that_writes_past_its_class_is_a_workers_own(installed: Any) -> None:
    x, mine = Frozen(), Frozen()
    state = installed(x)
    in_worker(state, {id(x): mine}, lambda: x.bump())
    assert (mine.n, x.n) == (1, 0)
    assert x == Frozen(0)
    assert hash(x) == hash(Frozen(0))


# ---- special methods ----


class Special:
    def __init__(self) -> None:
        self.items = [1]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, k: int) -> int:
        return self.items[k]

    def __iter__(self) -> Iterator[int]:
        yield from self.items

    def __enter__(self) -> Special:
        self.items.append(3)
        return self

    def __exit__(self, *_: object) -> None:
        self.items.append(9)

    def __iadd__(self, other: int) -> Special:
        self.items[0] += other
        return self

    def __repr__(self) -> str:
        return f"Special({self.items})"

    def __call__(self, *, k: int) -> int:
        return self.items[k]


def _with(x: Special) -> Any:
    with x as y:
        return y is x, [*x]


SPECIAL: dict[str, tuple[Callable[[Special], Any], Any]] = {
    "len": (len, 2),
    "getitem": (lambda x: x[1], 4),
    "iter": (list, [5, 4]),
    "unpack": (lambda x: (lambda a, b: (b, a))(*x), (4, 5)),
    "with": (_with, (True, [5, 4, 3])),
    "bool": (bool, True),
    "iadd": (lambda x: (operator.iadd(x, 3) is x, [*x]), (True, [8, 4])),
    "repr": (repr, "Special([5, 4])"),
    "call": (lambda x: x(k=1), 4),
    "vars": (lambda x: vars(x)["items"], [5, 4]),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_a_special_method_acts_on_the_copy(name: str, installed: Any) -> None:
    operate, expected = SPECIAL[name]
    x, mine = Special(), Special()
    mine.items = [5, 4]
    state = installed(x)
    assert in_worker(state, {id(x): mine}, lambda: operate(x)) == expected
    assert x.items == [1]


FROM_C: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "dict": (dict, {"b": 1, "c": 2}),
    "keywords": (lambda x: (lambda **k: k)(**x), {"b": 1, "c": 2}),
    "or": (lambda x: ({} | x, x | {}), ({"b": 1, "c": 2},) * 2),
    "list": (list, ["b", "c"]),
    "json": (json.dumps, '{"b": 1, "c": 2}'),
    "format": (lambda x: ("{b}".format(**x), "{b}".format_map(x)), ("1", "1")),
    "equal": (lambda x: (x == {"b": 1, "c": 2}, operator.eq({"b": 1, "c": 2}, x)), (True, True)),
}


@pytest.mark.parametrize("name", FROM_C)
def test_c_code_takes_from_the_copy_of_a_dictionary(name: str, installed: Any) -> None:
    operate, expected = FROM_C[name]
    x, mine = DictChild(a=0), DictChild(b=1, c=2)
    state = installed(x)
    assert in_worker(state, {id(x): mine}, lambda: operate(x)) == expected
    assert dict(x) == {"a": 0}


def test_comparisons_see_the_copies_of_both(installed: Any) -> None:
    class Exact:
        def __init__(self, n: int) -> None:
            self.n = n

        def __eq__(self, other: object) -> bool:
            return type(other) is type(self) and vars(self) == vars(other)

        def __lt__(self, other: Any) -> bool:
            return type(other) is type(self) and self.n < other.n

        __hash__ = None  # type: ignore[assignment]

    a, b = Exact(1), Exact(1)
    state = installed(a, b)
    copies = {id(a): Exact(2), id(b): Exact(3)}
    assert a == b
    assert in_worker(state, copies, lambda: (a == b, a < b, b < a)) == (False, True, False)
    with pytest.raises(TypeError):
        hash(a)


def test_what_has_no_equality_of_its_own_is_itself_in_every_thread(installed: Any) -> None:
    x, mine = Plain(), Plain()
    table = {x: "here"}
    state = installed(x)

    def look() -> Any:
        return table[x], x == x, x is next(iter(table))

    assert look() == in_worker(state, {id(x): mine}, look) == ("here", True, True)


# ---- installing and removing ----


def test_an_instance_stays_installed_until_the_last_loader_has_ended() -> None:
    x = Plain()
    first, second = ModuleState([named(x)]), ModuleState([named(x)])
    first.install()
    second.install()
    first.install()
    for state in (first, second):
        state.remove()
        assert type(x) is not Plain
        assert original(type(x)) is Plain
    first.remove()
    assert type(x) is Plain


def test_threads_that_install_and_remove_at_once_leave_the_class_as_it_was() -> None:
    instances = [Plain() for _ in range(5)]
    start = threading.Barrier(4)

    def work(_: int) -> None:
        start.wait()
        for _ in range(100):
            state = ModuleState([named(instances)])
            state.install()
            assert all(original(type(x)) is Plain is not type(x) for x in instances)
            state.remove()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert all(type(x) is Plain for x in instances)


# ---- what is reached, and what not ----


class Declared:
    fastload_per_worker = ()

    def __init__(self) -> None:
        self.n = 0


@pytest.mark.parametrize(
    "value",
    [
        *(np.zeros(3), torch.zeros(3), np.random.default_rng(0), np.random.RandomState(0)),
        *(torch.Generator(), [1], {}, {1}, bytearray(3), random.Random(0).random),
        *(iter([1]), types.SimpleNamespace(n=1), ValueError("text")),
        ListChild(),
        functools.partial(print, []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_of_a_class_statement_is_not_reached(value: Any) -> None:
    kind = type(value)
    state = ModuleState([named(value)])
    (found,) = state.unreached
    assert found.value is value
    state.install()
    state.remove()
    assert type(value) is kind


@pytest.mark.parametrize(
    "value",
    [
        *(Declared(), threading.Lock(), threading.Event(), queue.Queue(), threading.local()),
        *(HERE, Plain, 3, "text", random._inst, np.random.mtrand._rand),  # type: ignore[attr-defined]
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_threads_may_share_is_left_alone(value: Any) -> None:
    assert ModuleState([named(value)]).roots == []


def test_instances_below_containers_are_reached_and_the_containers_are_not() -> None:
    a, b, c, d, e, key = (Plain() for _ in range(6))
    values = {
        "container": {"a": [a, (b,)], "n": 3, key: 3},
        "space": types.SimpleNamespace(c=c),
        "pair": (d, 3),
        "method": bound,
        "array": np.array([e], object),
    }
    state = ModuleState(named(value, name) for name, value in values.items())
    assert {id(x) for x in (a, b, c, d, key)} < {id(x) for x in state.roots}
    assert [found.name for found in state.unreached] == ["container", "space", "array"]


def test_all_that_the_code_of_a_dataset_names_goes_through_the_states(installed: Any) -> None:
    class Samples:
        def __getitem__(self, index: int) -> int:
            crop.draw(index)
            return crop(0) + TRANSFORMS["train"](0)

    state = ModuleState(module_level([Samples()]))
    assert {id(x) for x in state.roots} == {id(crop), id(TRANSFORMS["train"])}
    assert [found.name for found in state.unreached] == ["TRANSFORMS"]
