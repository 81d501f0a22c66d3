"""Promises:
- A function under `functools.lru_cache` has a separate cache in each worker, by any name that code calls it.
- A function under `functools.lru_cache` is unchanged outside of the workers, and once no loader needs it.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.utils.data import Dataset

import fastload
from fastload.check import check
from fastload.errors import ModuleStateWarning
from fastload.isolation.cached import CACHED, Router, contents
from fastload.isolation.code import module_level
from fastload.isolation.module_state import ModuleState
from tests.isolation.test_state_is_copied import TwoSamples, as_it_is, assert_samples

HERE = sys.modules[__name__]


class Resize:
    """A transform with state."""

    size = 0


# ---- what holds a cached function ----


@functools.lru_cache(maxsize=8, typed=True)
def made(size: int) -> Resize:
    """Make a transform."""
    return Resize()


made_too = made


@functools.cache
def kept(size: int) -> Resize:
    return Resize()


TABLE = {"train": kept, "n": 3, 7: kept}


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def unnamed(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args)


@logged
@functools.cache
def decorated(size: int) -> Resize:
    return Resize()


hidden = unnamed(functools.cache(lambda size: Resize()))


class Factory:
    made = functools.cache(lambda self, size: Resize())
    still = staticmethod(functools.cache(lambda size: Resize()))

    @classmethod
    @functools.cache
    def of_class(cls, size: int) -> Resize:
        return Resize()

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Factory)


class Child(Factory):
    @property
    @functools.cache  # noqa: B019
    def resize(self) -> Resize:
        return Resize()


factory = Child()


@pytest.fixture(autouse=True)
def helpers() -> Iterator[types.ModuleType]:
    module = types.ModuleType("helpers")
    source = "import functools\n@functools.cache\ndef load(size): return Resize()"
    vars(module).update(Resize=Resize, __file__="/home/me/helpers.py")
    exec(compile(source, "/home/me/helpers.py", "exec"), vars(module))
    sys.modules["helpers"] = module
    yield module
    del sys.modules["helpers"]


def import_inside(size: int) -> Any:
    from helpers import load  # type: ignore[import-not-found]

    return load(size)


WAYS: dict[str, Callable[[], Any]] = {
    "by name": lambda: made(224),
    "imported inside": lambda: import_inside(224),
    "in a dictionary": lambda: TABLE["train"](224),  # type: ignore[operator]
    "decorated": lambda: decorated(224),
    "in a closure": lambda: hidden(224),
    "a static method": lambda: Factory.still(224),
    "a class method": lambda: Child.of_class(224),
    "a method": lambda: Factory().made(224),
    "a method of a module-level instance": lambda: factory.made(224),
    "a property": lambda: factory.resize,
}


class Through(TwoSamples):
    """Stores in what a cached function returns, and reads that when the other sample has stored."""

    def __init__(self, way: Callable[[], Any]) -> None:
        super().__init__()
        self.way = way

    def __getitem__(self, index: int) -> int:
        with self.in_turn.storing(index):
            self.way().size = 100 + index
        with self.in_turn.reading(index):
            return int(self.way().size)


def held() -> list[Any]:
    """Return what each place of this module holds."""
    functions: list[Any] = [decorated, hidden]
    cells = [contents(cell) for f in functions for cell in f.__closure__]
    spaces: list[Any] = [HERE, Factory, Child, decorated]
    values = [value for space in spaces for value in vars(space).values()]
    return [id(value) for value in (*values, *TABLE.values(), *cells, sys.modules["helpers"].load)]


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_has_its_own_cache_by_every_way_to_a_function(way: str) -> None:
    before = held()
    WAYS[way]().size = 7
    assert_samples(Through(WAYS[way]), [100, 101])
    assert WAYS[way]().size == 7
    assert held() == before


class Equal(TwoSamples):
    """Its copies are equal, so one cache would keep one result for all of them."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __hash__(self) -> int:
        return 1

    @functools.cache  # noqa: B019
    def resize(self) -> Resize:
        return Resize()

    def __getitem__(self, index: int) -> int:
        with self.in_turn.storing(index):
            self.resize().size = 100 + index
        with self.in_turn.reading(index):
            return self.resize().size


def test_a_method_of_the_dataset() -> None:
    assert_samples(Equal(), [100, 101])


def test_one_function_is_one_in_a_worker_however_it_is_held() -> None:
    class Both(Dataset[Any]):
        value, table = made, TABLE

        def __init__(self) -> None:
            self.function, self.mine = made, TABLE

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> bool:
            first = made(1) is made_too(1) is self.function(1)
            return first and kept(1) is TABLE["train"](1) is self.mine[7](1)  # type: ignore[operator]

    assert_samples(Both(), [True] * 4)


# ---- what it looks like meanwhile ----


@pytest.fixture
def installed() -> Iterator[ModuleState]:
    state = ModuleState(module_level([Through(way) for way in WAYS.values()]))
    state.install()
    yield state
    state.remove()


def in_worker(state: ModuleState, function: Callable[[], Any]) -> Any:
    """Call a function in a thread that has its own `made` and `Factory.made`."""

    def run() -> Any:
        state.enter({id(x): functools.cache(x.__wrapped__) for x in state.cached.values()})
        return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def looks(function: Any) -> list[Any]:
    return [
        *(getattr(function, n) for n in ("__wrapped__", "__name__", "__qualname__", "__module__")),
        *(function.__doc__, function.__dict__, function.cache_parameters(), function.cache_info()),
        *(inspect.signature(function), inspect.getsource(function), inspect.unwrap(function)),
        *(pickle.dumps(function), isinstance(function, CACHED), callable(function), hash(function)),
    ]


def test_it_looks_as_before_meanwhile() -> None:
    original, before = made, looks(made)
    state = ModuleState(module_level([Through(WAYS["by name"])]))
    state.install()
    try:
        router: Any = made
        assert type(router) is Router
        assert looks(router) == before
        assert in_worker(state, lambda: looks(made)[:5]) == before[:5]
        assert router == original
        assert original == router
        assert router != kept
        assert {original: 1}[router] == 1
        assert pickle.loads(pickle.dumps(router)) is router
        assert copy.copy(router) is copy.deepcopy(router) is router
        router.note = "mine"
        assert original.note == "mine"  # type: ignore[attr-defined]
    finally:
        state.remove()
    assert made is original
    del vars(original)["note"]


def test_statistics_and_clearing_are_the_calling_threads(installed: ModuleState) -> None:
    made.cache_clear()
    here = made(1)

    def work() -> Any:
        first = made(1), made(2), made(2)
        info = made.cache_info()
        made.cache_clear()
        return here in first, info.hits, info.misses, made.cache_info().currsize

    assert in_worker(installed, work) == (False, 1, 2, 0)
    assert made.cache_info().currsize == 1
    assert made(1) is here


@functools.cache
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


class Counting(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, int]:
        return fibonacci(30), fibonacci.cache_info().misses


def test_a_function_that_calls_itself_and_is_filled_by_the_init_function() -> None:
    fibonacci.cache_clear()
    options: dict[str, Any] = {"num_workers": 2, "batch_size": None, "collate_fn": as_it_is}
    loader = fastload.DataLoader(Counting(), worker_init_fn=lambda _: fibonacci(35), **options)
    assert set(loader) == {(832_040, 36)}
    assert fibonacci.cache_info().misses == 0


# ---- how long a worker's cache lives ----


class Kept(Dataset[Any]):
    fastload_per_worker = ()

    def __init__(self) -> None:
        self.results: Any = weakref.WeakSet()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.results.add(made(1))
        return index


def test_a_workers_cache_ends_with_the_worker() -> None:
    made.cache_clear()
    dataset = Kept()
    options: dict[str, Any] = {"num_workers": 2, "batch_size": None, "persistent_workers": True}
    with fastload.DataLoader(dataset, **options) as loader:
        assert len([*loader, *loader]) == 16
        assert 1 <= len(dataset.results) <= 2
    del loader
    gc.collect()
    assert len(dataset.results) == 0
    assert made.cache_info().currsize == 0


def test_copy_dataset_false_shares_the_cache() -> None:
    assert_samples(Through(WAYS["by name"]), [101, 101], copy_dataset=False)


# ---- several loaders ----


@pytest.mark.parametrize("first_ends", [True, False])
def test_two_loaders_at_once(first_ends: bool) -> None:
    before = held()
    names = ["by name", "decorated", "in a dictionary", "a property"]
    first = ModuleState(module_level([Through(WAYS[way]) for way in names]))
    first.install()
    second = ModuleState(module_level([Through(way) for way in WAYS.values()]))
    assert set(map(id, first.cached.values())) <= set(map(id, second.cached.values()))
    second.install()
    states = [first, second] if first_ends else [second, first]
    states[0].remove()
    for way in (WAYS[name] for name in names):
        here = way()
        assert in_worker(states[1], way) is not here, way
    states[1].remove()
    assert held() == before


class StoredOnly(TwoSamples):
    """Was given cached functions while another loader ran."""

    def __init__(self, *functions: Any) -> None:
        super().__init__()
        self.functions = functions

    def sizes(self) -> set[int]:
        return {function(224).size for function in self.functions}

    def __getitem__(self, index: int) -> int:
        with self.in_turn.storing(index):
            for function in self.functions:
                function(224).size = 100 + index
        with self.in_turn.reading(index):
            (size,) = self.sizes()
            return size


class Stored(StoredOnly):
    """The same, and calls one by name too."""

    def sizes(self) -> set[int]:
        return {*super().sizes(), made(224).size}


@pytest.mark.parametrize("kind", [Stored, StoredOnly])
@pytest.mark.parametrize("still_runs", [True, False])
def test_a_dataset_made_while_another_loader_runs(kind: type[Any], still_runs: bool) -> None:
    state = ModuleState(module_level([Through(WAYS[way]) for way in ("by name", "a method")]))
    state.install()
    try:
        dataset = kind(made, Factory.still)
        assert type(made) is type(Factory.still) is Router
        if still_runs:
            assert_samples(dataset, [100, 101])
    finally:
        state.remove()
    if not still_runs:
        assert_samples(dataset, [100, 101])
    assert type(made) is CACHED


def test_a_partial_made_while_another_loader_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ModuleState(module_level([Through(WAYS["in a dictionary"])]))
    state.install()
    try:
        monkeypatch.setattr(HERE, "PART", functools.partial(TABLE["train"], 224))  # type: ignore[arg-type]
    finally:
        state.remove()
    assert type(PART.func) is Router
    assert_samples(Through(UNROUTABLE["PART"]), [100, 101])


# ---- what else happens meanwhile ----


def test_a_fork_has_the_function_itself(installed: ModuleState) -> None:
    made.cache_clear()
    here, child = made(1), os.fork()
    if not child:
        os._exit(0 if made(1) is here else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- what the function itself holds ----


def with_closure(state: Any) -> Any:
    @functools.cache
    def function(size: int) -> Any:
        return state

    return function


closed = with_closure([0])


class Closed(TwoSamples):
    def __getitem__(self, index: int) -> int:
        with self.in_turn.storing(index):
            closed(1)[0] = 100 + index
        with self.in_turn.reading(index):
            return int(closed(2)[0])


def test_what_the_function_holds_is_the_workers_own() -> None:
    assert_samples(Closed(), [100, 101])
    assert closed(3) == [0]


# ---- what cannot be routed ----


def with_default(size: int, function: Any = kept) -> Any:
    return function(size)


PART = functools.partial(kept, 224)
PAIR = (kept, 3)
METHOD = factory.made
LIST = [kept]

UNROUTABLE: dict[str, Callable[[], Any]] = {
    "PART": lambda: PART(),
    "PAIR": lambda: PAIR[0](224),
    "METHOD": lambda: METHOD(224),
    "LIST": lambda: LIST[0](224),
    "with_default": lambda: with_default(224),
}


@pytest.mark.parametrize("name", UNROUTABLE)
@pytest.mark.parametrize("also_by_name", [True, False])
def test_what_holds_a_function_and_cannot_be_changed_is_named(
    name: str, also_by_name: bool
) -> None:
    dataset = Through(UNROUTABLE[name])
    if also_by_name:
        dataset.other = WAYS["in a dictionary"]  # type: ignore[attr-defined]
    with pytest.warns(ModuleStateWarning, match=rf"`{__name__}\.{name}`.*share") as seen:
        list(fastload.DataLoader(dataset, num_workers=2, batch_size=None))
    assert len(seen) == 1


# ---- what `fastload check` says ----


def test_check_names_the_function_and_finds_no_fault() -> None:
    report = check(Counting(), samples=8, workers=2)
    assert report.ok
    assert f"{__name__}.fibonacci" in str(report.isolation)
    assert "Router" not in str(report)
