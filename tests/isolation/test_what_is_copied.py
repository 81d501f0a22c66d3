"""Promises:
- Each worker owns every object that code can change, copied as one graph. Data is shared, and the rule for both is
  documented.
- Copies are made at `iter()` and run no code of plain instances.
- An open handle that threads cannot share is refused at `iter()`, and the error names its place in the dataset. See
  also `tests/compat/test_lmdb.py`, `tests/compat/test_sqlite.py`, `tests/compat/test_video.py`,
  `tests/compat/test_audio.py`.
- Every other object that has no copy is named in one warning.

All of it is seen from outside: two workers meet in `__getitem__`, so that each reads one sample, and
return their dataset. The copies are then compared with the original and with each other.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import contextvars
import copy
import dataclasses
import datetime
import decimal
import enum
import functools
import gc
import logging
import mmap
import multiprocessing
import multiprocessing.shared_memory
import operator
import os
import queue
import random
import re
import sqlite3
import sys
import tempfile
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

import fastload
from fastload.errors import DatasetCopyError, SharedStateWarning
from fastload.isolation import Isolation

WORKERS = 2
DEADLINE_SECONDS = 30.0
MIB = 1 << 20


class Holder(Dataset[Any]):
    """Holds what it is given as attributes; each sample is the worker's dataset."""

    def __init__(self, **attributes: Any) -> None:
        self.meeting = threading.Barrier(WORKERS)
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return WORKERS

    def __getitem__(self, index: int) -> Any:
        self.meeting.wait(DEADLINE_SECONDS)  # so each worker reads one
        return self


def as_it_is(sample: Any) -> Any:
    return sample


def loader_of(dataset: Any, **options: Any) -> DataLoader[Any]:
    arguments = {"batch_size": None, "collate_fn": as_it_is, "num_workers": WORKERS, **options}
    return fastload.DataLoader(dataset, **arguments)


def copies_of(dataset: Any, **options: Any) -> list[Any]:
    """Return the dataset of each worker."""
    with loader_of(dataset, **options) as loader:
        return list(loader)


def copies(**attributes: Any) -> tuple[Any, Any, Any]:
    """Return a dataset with these attributes and the copies of its two workers."""
    dataset = Holder(**attributes)
    one, other = copies_of(dataset)
    assert len({id(dataset), id(one), id(other)}) == 3
    return dataset, one, other


def addresses(*buffers: Any) -> list[int]:
    """Return where each array, tensor or bytearray lies in memory."""
    found = []
    for buffer in buffers:
        if isinstance(buffer, bytearray):
            buffer = np.frombuffer(buffer, np.uint8)
        if isinstance(buffer, torch.Tensor) and buffer.is_sparse:
            buffer = buffer.coalesce().values()
        found.append(buffer.data_ptr() if isinstance(buffer, torch.Tensor) else buffer.ctypes.data)
    return found


def assert_copied(*objects: Any) -> None:
    assert len({id(o) for o in objects}) == len(objects), "shared"
    if isinstance(objects[0], (np.ndarray, torch.Tensor, bytearray)):
        assert len(set(addresses(*objects))) == len(objects), "the memory is shared"


def assert_shared(*objects: Any) -> None:
    if isinstance(objects[0], (np.ndarray, torch.Tensor)):
        assert len(set(addresses(*objects))) == 1, "copied"
    else:
        assert len({id(o) for o in objects}) == 1, "copied"


class Thing:
    """An instance of a plain class."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def name(self) -> str:
        return "a thing"


class Transform:
    """A called instance."""

    def __call__(self, sample: Any) -> Any:
        return sample


def importable(sample: Any) -> Any:
    return sample


# ---- data is shared ----


class Pair(NamedTuple):
    first: Any
    second: Any


class Record:
    """A sample's entry in a list: no code."""

    __slots__ = ("label", "path")

    def __init__(self, path: str, label: int) -> None:
        self.path, self.label = path, label

    def text(self) -> str:
        return f"{self.path}: {self.label}"


class Clip:
    """One that opens its file when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file: Any = None

    def read(self) -> Any:
        if self.file is None:
            self.file = self.path
        return self.file


def read_only(a: np.ndarray) -> np.ndarray:
    a.flags.writeable = False
    return a


def parts(count: int, size: int) -> list[np.ndarray]:
    return [np.zeros(size, np.uint8) for _ in range(count)]


DATA: dict[str, Callable[[], Any]] = {
    "array over 16 MiB": lambda: np.zeros(16 * MIB + 1, np.uint8),
    "view of an array over 16 MiB": lambda: np.zeros(16 * MIB + 1, np.uint8)[5:9],
    "tensor over 16 MiB": lambda: torch.zeros(16 * MIB + 1, dtype=torch.uint8),
    "view of a tensor over 16 MiB": lambda: torch.zeros(16 * MIB + 1, dtype=torch.uint8)[5:9],
    "read-only array": lambda: read_only(np.zeros(3)),
    "tensor in shared memory": lambda: torch.zeros(3).share_memory_(),
    "list of 1,001": lambda: list(range(1_001)),
    "deque of 1,001": lambda: collections.deque(range(1_001)),
    "dict of 1,001": lambda: dict.fromkeys(range(1_001)),
    "list of 1,001 records": lambda: [Record(str(i), i) for i in range(1_001)],
    "list of 10,001 clips": lambda: [Clip(str(i)) for i in range(10_001)],
    "list of 1,001 named tuples": lambda: [Pair(str(i), [i]) for i in range(1_001)],
    "20 lists of 200 lists": lambda: [[[] for _ in range(200)] for _ in range(20)],
    "dict of 20 dicts of 200 lists": lambda: {i: {j: [j] for j in range(200)} for i in range(20)},
    "20 arrays of 256 KiB": lambda: parts(20, MIB // 4),
    "16 arrays of 1 MiB": lambda: parts(16, MIB),
    "tuple of 20 tensors of 256 KiB": lambda: tuple(torch.zeros(MIB // 16) for _ in range(20)),
}


def made(kinds: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {kind: make() for kind, make in kinds.items()}


def test_data_is_shared() -> None:
    datasets = copies(**made(DATA), things=[{"thing": Thing(**made(DATA))}])
    for kind in DATA:
        assert_shared(*(getattr(dataset, kind) for dataset in datasets))
        assert_shared(*(getattr(dataset.things[0]["thing"], kind) for dataset in datasets))
    assert_copied(*(dataset.things[0]["thing"] for dataset in datasets))


@pytest.mark.parametrize("reverse", [False, True])
def test_memory_mapped_arrays_are_shared(reverse: bool, tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "data", np.uint8, "w+", shape=(16,))
    made = {"mapped": mapped, "tensor": torch.from_numpy(mapped), "view": np.asarray(mapped)[4:]}
    datasets = copies(**dict(sorted(made.items(), reverse=reverse)))
    for name in made:
        assert_shared(*(getattr(dataset, name) for dataset in datasets))
    assert type(datasets[1].mapped) is np.memmap


# Made here, because multiprocessing keeps the file that it takes them from.
VALUE = multiprocessing.Value("i", 3)
COUNTS = multiprocessing.Array("i", 4)


def test_shared_memory_is_shared(tmp_path: Path) -> None:
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=16)
    array = np.ndarray((16,), np.uint8, buffer=memory.buf)
    path = tmp_path / "data"
    path.write_bytes(b"0123456789")
    datasets: tuple[Any, ...] = ()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        try:
            shared = {"value": VALUE, "counts": COUNTS, "memory": memory, "mapped": mapped}
            datasets = copies(array=array, **shared)
            for name in ("array", *shared):
                assert_shared(*(getattr(dataset, name) for dataset in datasets))
        finally:
            for dataset in datasets:
                del dataset.array
            datasets, array = (), None  # type: ignore[assignment]
            gc.collect()
            memory.close()
            memory.unlink()


class Colour(enum.Enum):
    RED = 1


def test_what_is_compared_by_identity_stays_itself() -> None:
    code = [Thing, np, importable, len, np.sin, operator.add, Thing.name, type, dict[str, int]]
    values = [Colour.RED, object(), ..., NotImplemented, torch.float32, dataclasses.MISSING]
    for dataset in copies(kept=[*code, *values])[1:]:
        assert all(map(operator.is_, dataset.kept, [*code, *values]))


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_objects_of_c_without_state_are_shared_and_nothing_is_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        scripted = torch.jit.script(doubled)
    kept = [torch.finfo(torch.float32), torch.iinfo(torch.int8), language, scripted]
    for dataset in copies(kept=kept, scripted=scripted)[1:]:
        assert all(map(operator.is_, dataset.kept, kept))
        assert dataset.scripted is scripted


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "compressed": lambda: torch.eye(3).to_sparse_csc(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "of mkldnn": lambda: torch.ones(2, 2).to_mkldnn(),
}


def test_a_tensor_that_deepcopy_refuses_is_copied_all_the_same() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(beta|prototype)")
        tensors = made(LAYOUTS)
    for dataset in copies(**tensors)[1:]:
        for name, tensor in tensors.items():
            copied = getattr(dataset, name)
            assert copied is not tensor
            assert (copied.layout, copied.is_nested) == (tensor.layout, tensor.is_nested)


def test_tables_are_shared() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"path": ["a", "b"], "label": [1, 2]})
    datasets = copies(frame=frame, column=frame["path"], thing=Thing(frame=frame))
    for found in ("frame", "column", "thing.frame"):
        assert_shared(*map(operator.attrgetter(found), datasets))


# ---- state is copied ----

STATE: dict[str, Callable[[], Any]] = {
    "array of 16 MiB": lambda: np.zeros(16 * MIB, np.uint8),
    "tensor of 16 MiB": lambda: torch.zeros(16 * MIB, dtype=torch.uint8),
    "array": lambda: np.zeros((2, 3))[:, 1:],
    "array of objects": lambda: np.array([Thing(), None, []], object),
    "structured array": lambda: np.zeros(3, [("x", int), ("y", float)]),
    "masked array": lambda: np.ma.masked_array([1, 2], [True, False]),
    "tensor": lambda: torch.zeros(3),
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(3)),
    "module": lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)),
    "bytearray": lambda: bytearray(100),
    "list of 1,000": lambda: list(range(1_000)),
    "3 lists of 500 lists": lambda: [[[] for _ in range(500)] for _ in range(3)],
    "2 buffers of 3 MiB": lambda: parts(2, 3 * MIB),
    "15 buffers of 1 MiB": lambda: parts(15, MIB),
    "20 buffers of 100 KiB": lambda: parts(20, 100 << 10),
    "deque": lambda: collections.deque([1, 2], maxlen=5),
    "defaultdict": lambda: collections.defaultdict(list, x=[1]),
    "chain map": lambda: collections.ChainMap({"a": 1}, {"b": 2}),
    "instance": lambda: Thing(x=1),
    "called instance": Transform,
    "namespace": lambda: types.SimpleNamespace(x=[1]),
    "RandomState": lambda: np.random.RandomState(1),
    "Generator": lambda: np.random.default_rng(1),
    "Random": lambda: random.Random(1),
    "torch.Generator": lambda: torch.Generator().manual_seed(1),
    "iterator of a list": lambda: iter([1, 2, 3]),
    "lambda with a default": lambda: lambda x=[]: x,
}


def test_state_is_copied() -> None:
    datasets = copies(**made(STATE))
    for kind in STATE:
        assert_copied(*(getattr(dataset, kind) for dataset in datasets))
        assert len({type(getattr(dataset, kind)) for dataset in datasets}) == 1


def with_a_thing(thing: Thing) -> Callable[[Any], Any]:
    return lambda x: (x, thing)


LENGTH = 1_100
"""Of a container that would be data. One element is in most of them so many times, as a copy takes its time."""
CODE: dict[str, Callable[[], Any]] = {
    "list of transforms": lambda: [Transform()] * LENGTH,
    "dict of transforms": lambda: dict.fromkeys(range(LENGTH), Transform()),
    "list of closures": lambda: [with_a_thing(Thing())] * LENGTH,
    "list of partials": lambda: [functools.partial(importable, Thing())] * LENGTH,
    "list of bound methods": lambda: [Thing().name] * LENGTH,
    "list of datasets": lambda: [Subset([1], [0])] * LENGTH,  # type: ignore[arg-type]
    "list of torch.Generator": lambda: [torch.Generator()] * LENGTH,
    "list of pairs with a transform": lambda: [("name", Transform())] * LENGTH,
    "20 lists of 200 transforms": lambda: [[Transform()] * 200 for _ in range(20)],
}


def first_in(container: Any) -> Any:
    """Return the first transform, dataset, function or generator of a container."""
    while isinstance(container, (list, tuple, dict, set)):
        container = list(container.values() if isinstance(container, dict) else container)[-1]
    return container


def test_a_container_of_code_is_never_data() -> None:
    datasets = copies(**made(CODE))
    for kind in CODE:
        containers = [getattr(dataset, kind) for dataset in datasets]
        assert_copied(*containers)
        assert_copied(*map(first_in, containers))
        assert len({len(container) for container in containers}) == 1


def test_contents_of_a_copy_are_equal() -> None:
    arrays = {
        "array": np.arange(6).reshape(2, 3).T,
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "strided": np.arange(20)[3::4],
        "reversed": np.arange(5)[::-1],
        "scalar": np.array(3),
        "dates": np.array(["2020-01-01"], "M8[D]"),
        "swapped": np.arange(3, dtype=">i4"),
    }
    state = [
        *([1, (2, [3]), {"four": {5, 6}}, frozenset({7})], collections.deque([1, 2], maxlen=2)),
        *(Pair([1], {2: 3}), collections.OrderedDict(b=1, a=2), bytearray(b"abc")),
        *(collections.defaultdict(list, x=[1]), datetime.datetime(2020, 1, 2), Path("a/b")),
        *(re.compile("a+"), range(1, 9, 2), slice(1, 2), 1j),
    ]
    for dataset in copies(arrays=arrays, state=state)[1:]:
        for name, wanted in arrays.items():
            got = dataset.arrays[name]
            assert np.array_equal(got, wanted)
            assert got.dtype == wanted.dtype
            if name not in ("strided", "reversed"):  # the copy of a view with gaps may have none
                assert got.strides == wanted.strides, name
        assert list(map(repr, dataset.state)) == list(map(repr, state))
        assert list(map(type, dataset.state)) == list(map(type, state))
        assert list(dataset.arrays) == list(arrays)


def test_tensors_keep_what_they_are() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    grown = torch.ones(2, requires_grad=True) * 2  # not a leaf
    tensors = {
        "transposed": base.transpose(0, 2),
        "strided": torch.arange(20)[3::4],
        "expanded": torch.ones(1).expand(4),
        "channels-last": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "not a leaf": grown,
        "scalar": torch.tensor(3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
    }
    for dataset in copies(tensors=tensors)[1:]:
        for name, wanted in tensors.items():
            got = dataset.tensors[name]
            assert torch.equal(got, wanted)
            assert got.stride() == wanted.stride(), name
            for look in ("__class__", "dtype", "requires_grad"):
                assert getattr(got, look) == getattr(wanted, look), (name, look)


# ---- one graph ----


HELD_BY_ITS_OWN: dict[str, Callable[[Thing], Any]] = {
    "bound method": lambda thing: thing.name,
    "bound method of a container": lambda thing: thing.rows.append,
    "lru_cache": lambda thing: functools.lru_cache(maxsize=None)(thing.name),
    "partial": lambda thing: functools.partial(importable, thing),
    "closure": lambda thing: lambda: thing,
    "tuple": lambda thing: (thing,),
    "named tuple": lambda thing: Pair(thing, thing.rows),
    "frozenset": lambda thing: frozenset([thing]),
}


def test_what_is_made_of_an_object_that_holds_it() -> None:
    """It can be made only after the object, while the object is not complete without it; it is one all the same."""
    things = {kind: Thing(rows=[]) for kind in HELD_BY_ITS_OWN}
    held = {kind: make(things[kind]) for kind, make in HELD_BY_ITS_OWN.items()}
    for kind, thing in things.items():
        thing.held, thing.rows[:] = held[kind], [held[kind]]
    first = {kind: [one] for kind, one in held.items()}
    for dataset in copies(first=first, things=things, held=held)[1:]:
        for kind, thing in dataset.things.items():
            assert thing is not things[kind]
            assert dataset.first[kind][0] is thing.held is dataset.held[kind] is thing.rows[0]
            assert dataset.held[kind] is not held[kind]


class Key:
    """Hashes by what it holds, which a copy has only after it is filled."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.owner: Any = None

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other.name == self.name


def test_keys_that_hash_by_their_contents() -> None:
    """The key refers to the dict, so the copier meets it before or after: both ways round."""
    key, by_identity = Key("a"), Thing()
    dataset = Holder(
        table={key: 1}, names={key}, key=key, known={by_identity: 2}, thing=by_identity
    )
    key.owner = dataset.table
    other = Key("b")
    other.owner = {other: "mine"}
    dataset.other = other
    for got in copies_of(dataset):
        assert got.table[got.key] == 1
        assert got.table[Key("a")] == 1
        assert got.key in got.names
        assert next(iter(got.names)) is got.key is next(iter(got.table))
        assert got.key.owner is got.table
        assert got.known[got.thing] == 2
        assert by_identity not in got.known
        assert got.other.owner[got.other] == "mine"


def chain_of(length: int) -> Any:
    chain: Any = None
    for _ in range(length):
        chain = Thing(next=chain)
    return chain


def test_nesting_is_copied_and_refused_with_a_reason_beyond_python_s_limit() -> None:
    chain = chain_of(100)
    for dataset in copies(chain=chain)[1:]:
        link, length = dataset.chain, 0
        while link is not None:
            link, length = link.next, length + 1
        assert length == 100
        assert dataset.chain is not chain
    dataset = Holder(chain=chain_of(5_000))
    with loader_of(dataset) as loader, pytest.raises(DatasetCopyError, match="nested too deeply"):
        iter(loader)


def test_a_module_keeps_its_tied_weights() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].weight = module[0].weight
    for dataset in copies(weight=module[0].weight, module=module)[1:]:
        assert dataset.module[0].weight is dataset.module[1].weight is dataset.weight
        assert dataset.weight is not module[0].weight
        assert len(list(dataset.module.parameters())) == 3


# ---- functions ----


def test_closures_that_share_a_cell() -> None:
    def counter() -> tuple[Callable[[], int], Callable[[], int]]:
        count = 0

        def add() -> int:
            nonlocal count
            count += 1
            return count

        return add, lambda: count

    add, read = counter()
    for dataset in copies(add=add, read=read)[1:]:
        dataset.add()
        dataset.add()
        assert dataset.read() == 2
    assert read() == 0


def test_a_variable_that_is_not_bound_yet() -> None:
    def call() -> Any:
        return later

    for dataset in copies(call=call)[1:]:
        with pytest.raises(NameError):
            dataset.call()
    later = None


def test_what_a_function_holds() -> None:
    thing = Thing()

    def call(x: Any, steps: Any = (thing,), *, step: Any = thing) -> Any:
        """A docstring."""
        return thing

    call.cache = {"thing": thing}  # type: ignore[attr-defined]
    for dataset in copies(call=call, thing=thing)[1:]:
        got = dataset.call
        assert got(0) is dataset.thing
        assert got.__defaults__[0][0] is dataset.thing
        assert got.__kwdefaults__["step"] is dataset.thing
        assert got.cache["thing"] is dataset.thing
        for name in functools.WRAPPER_ASSIGNMENTS:
            assert getattr(got, name) == getattr(call, name)


def test_a_copy_of_a_function_computes_no_annotations() -> None:
    """They may name what is imported for type checkers only."""
    space: dict[str, Any] = {"__name__": __name__, "Here": int}
    text = "def make(thing):\n    def call(x: Here) -> Here: return thing\n    return call"
    exec(compile(text, __file__, "exec", dont_inherit=True), space)
    thing, note = Thing(), Thing()
    call, lazy = space["make"](thing), space["make"](note)
    call.__annotations__ = {"x": str}
    del space["Here"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SharedStateWarning)
        datasets = copies(call=call, lazy=lazy, thing=thing, note=note)
    space["Here"] = int
    for dataset in datasets[1:]:
        assert dataset.call(0) is dataset.thing is not thing
        assert dataset.lazy(0) is dataset.note is not note
        assert dataset.call.__annotations__ == {"x": str}
        assert dataset.lazy.__annotations__ == {"x": int, "return": int}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="this Python has no type parameters")
def test_a_copy_of_a_function_has_its_type_parameters() -> None:
    space: dict[str, Any] = {"__name__": __name__}
    exec("def make(thing):\n    def call[T](x: T) -> T: return thing\n    return call", space)
    call = space["make"](Thing())
    for dataset in copies(call=call)[1:]:
        assert dataset.call is not call
        assert dataset.call.__type_params__ == call.__type_params__ != ()


class Partial(functools.partial):  # type: ignore[type-arg]
    """A partial of the user's."""


def test_partials() -> None:
    thing = Thing()
    plain = functools.partial(importable, thing, key=[thing])
    plain.note = thing  # type: ignore[attr-defined]
    for dataset in copies(plain=plain, own=Partial(thing.name), thing=thing)[1:]:
        assert dataset.plain.func is importable
        assert dataset.plain.args[0] is dataset.plain.keywords["key"][0] is dataset.thing
        assert dataset.plain.note is dataset.thing
        assert type(dataset.own) is Partial
        assert dataset.own.func.__self__ is dataset.thing
    assert plain.args[0] is thing


def test_bound_methods() -> None:
    rows, rng = [1], np.random.RandomState(1)
    dataset = Holder(rows=rows, rng=rng, buffer=bytearray(2))
    dataset.bound = [
        dataset.__getitem__,
        rows.append,
        rng.uniform,
        dataset.buffer.extend,
        rows.__len__,
    ]
    for got in copies_of(dataset):
        wanted = [got, got.rows, got.rng, got.buffer, got.rows]
        assert all(map(operator.is_, (method.__self__ for method in got.bound), wanted))
        got.bound[1](2)
        assert got.rows == [1, 2]
        assert got.bound[0].__func__ is Holder.__getitem__
    assert rows == [1]


@pytest.mark.parametrize("make", [weakref.ref, weakref.proxy])
def test_what_refers_to_an_object_without_holding_it_is_shared_and_named(make: Any) -> None:
    thing = Thing()
    dataset = Holder(thing=thing, other=make(thing))
    with pytest.warns(SharedStateWarning, match=r"cannot be copied: dataset\.other"):
        found = copies_of(dataset)
    assert all(got.thing is not thing and got.other is dataset.other for got in found)


# ---- instances ----


class Slots:
    __slots__ = ("__hidden", "__weakref__", "unset", "x")

    def __init__(self, x: Any) -> None:
        self.x, self.__hidden = x, x

    def hidden(self) -> Any:
        return self.__hidden


class SlotsAndDict(Slots):
    """With attributes too."""


def test_slots() -> None:
    x = Thing()
    slotted = SlotsAndDict(x)
    slotted.z = x
    for dataset in copies(x=x, slotted=slotted)[1:]:
        got = dataset.slotted
        assert got.x is got.hidden() is got.z is dataset.x
        assert not hasattr(got, "unset")
        assert got is not slotted


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    rows: list[int]
    thing: Thing


def test_frozen_dataclasses_and_named_tuples() -> None:
    thing = Thing()
    for dataset in copies(frozen=Frozen([1], thing), pair=Pair(thing, [2]), thing=thing)[1:]:
        assert dataset.frozen.thing is dataset.pair.first is dataset.thing
        assert (dataset.frozen.rows, dataset.pair.second) == ([1], [2])
        assert type(dataset.pair) is Pair
        assert dataset.thing is not thing


class Config(dict):  # type: ignore[type-arg]
    """A dict whose keys are attributes, too."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Rows(list):  # type: ignore[type-arg]
    """A list with an attribute that adds no element by itself."""

    def append(self, row: Any) -> None:
        raise AssertionError("user code ran")

    extend = append  # type: ignore[assignment]
    __iadd__ = append  # type: ignore[assignment]


def test_subclasses_of_containers() -> None:
    thing = Thing()
    rows = Rows([thing])
    rows.owner = rows  # type: ignore[attr-defined]
    for dataset in copies(thing=thing, rows=rows)[1:]:
        assert type(dataset.rows) is Rows
        assert dataset.rows[0] is dataset.thing
        assert dataset.rows.owner is dataset.rows
    assert rows[0] is thing


def test_a_dict_that_is_its_own_attributes() -> None:
    thing, config = Thing(), Config()
    config.a, config["me"] = thing, config
    for dataset in copies(thing=thing, config=config)[1:]:
        assert dataset.config.a is dataset.config["a"] is dataset.thing
        assert dataset.config.me is dataset.config
        dataset.config.b = 3
        assert dataset.config["b"] == 3
    assert "b" not in config


class RecordsDataset(list[Any]):
    """A list that is a dataset, and has state."""

    def __getitem__(self, index: Any) -> Any:
        self.meeting.wait(DEADLINE_SECONDS)
        self.current = index
        return self

    meeting: threading.Barrier


def test_a_long_list_that_is_a_dataset_is_no_data() -> None:
    dataset = RecordsDataset(range(5_000))
    dataset.meeting = threading.Barrier(WORKERS)
    one, other = copies_of(dataset, sampler=range(WORKERS))
    assert_copied(dataset, one, other)
    assert {one.current, other.current} == {0, 1}


def trap(self: Any, *arguments: Any, **options: Any) -> Any:
    raise AssertionError("user code ran")


SPECIAL = (
    "__new__ __init__ __setattr__ __getattr__ __getattribute__ __delattr__ __repr__ __str__ __format__ __hash__ __eq__ "
    "__ne__ __dir__ __sizeof__ __bool__ __len__ __iter__ __contains__ __index__ __array__ __fspath__ __enter__ __lt__"
)


def test_no_user_code_runs() -> None:
    class Metaclass(type):
        __call__ = __instancecheck__ = trap

    methods = dict.fromkeys(SPECIAL.split(), trap)
    Trap = Metaclass("Trap", (), {**methods, "value": property(trap), "also": classmethod(trap)})
    traps = [object.__new__(Trap) for _ in range(3)]
    object.__setattr__(traps[0], "rows", [1])
    for got in copies_of(Holder(traps=traps, nested=[(traps[1],), {"x": traps[2]}])):
        assert type(got.traps[0]) is Trap
        assert got.traps[0] is not traps[0]
        rows, mine = (object.__getattribute__(x[0], "rows") for x in (traps, got.traps))
        assert rows == mine
        assert rows is not mine


# ---- classes with a protocol ----


class Deep:
    def __init__(self) -> None:
        self.child, self.by = Thing(), "me"

    def __deepcopy__(self, memo: Any) -> Deep:
        new = object.__new__(Deep)
        new.child, new.by = copy.deepcopy(self.child, memo), "__deepcopy__"
        return new


class Reduced:
    def __init__(self, child: Any, by: str = "me") -> None:
        self.child, self.by = child, by

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self.child, "__reduce_ex__")


class GetState:
    def __init__(self) -> None:
        self.child, self.by, self.handle = Thing(), "me", 3

    def __getstate__(self) -> Any:
        return {"child": self.child, "by": "__getstate__"}


class SetState(GetState):
    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state, by="__setstate__")


PROTOCOLS: dict[str, Callable[[], Any]] = {
    "__deepcopy__": Deep,
    "__reduce_ex__": lambda: Reduced(Thing()),
    "__getstate__": GetState,
    "__setstate__": SetState,
}


@pytest.mark.parametrize("order", ["child first", "child last"])
def test_a_class_with_a_protocol_is_asked(order: str) -> None:
    asked = made(PROTOCOLS)
    attributes = {"children": {name: one.child for name, one in asked.items()}, "asked": asked}
    if order == "child last":
        attributes = dict(reversed(attributes.items()))
    datasets = copies(**attributes)
    for name in PROTOCOLS:
        for dataset in datasets[1:]:
            assert dataset.asked[name].by == name
            assert dataset.asked[name].child is dataset.children[name], "not in the same graph"
            assert not hasattr(dataset.asked[name], "handle")
        assert_copied(*(dataset.asked[name] for dataset in datasets))
        assert_copied(*(dataset.children[name] for dataset in datasets))
        assert asked[name].by == "me"


class Tree:
    """Copies itself, and its leaves know it: as the nodes of OmegaConf, and of torch's graphs."""

    def __init__(self, leaves: int = 0, parent: Any = None) -> None:
        self.parent, self.rng = parent, random.Random(1)
        self.leaves = [Tree(parent=self) for _ in range(leaves)]

    def __deepcopy__(self, memo: Any) -> Tree:
        mine = memo[id(self)] = object.__new__(Tree)
        vars(mine).update((name, copy.deepcopy(x, memo)) for name, x in vars(self).items())
        return mine


class Itself:
    """Copies itself by `copy.deepcopy`, which takes functions to be constants."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __deepcopy__(self, memo: Any) -> Itself:
        mine = memo[id(self)] = object.__new__(Itself)
        vars(mine).update((name, copy.deepcopy(x, memo)) for name, x in vars(self).items())
        return mine


def test_objects_that_copy_themselves_and_hold_one_another() -> None:
    tree = Tree(leaves=2)
    for dataset in copies(tree=tree, operator=torch.ops.aten.add)[1:]:
        assert dataset.tree is not tree
        assert dataset.tree.leaves[0].parent is dataset.tree
        assert dataset.operator is torch.ops.aten.add
    generators = Isolation(Holder(tree=tree), None, None, copy_dataset="state").own().generators
    places = ["tree.leaves[0].rng", "tree.leaves[1].rng", "tree.rng"]
    assert sorted(place for place, _ in generators) == [f"dataset.{place}" for place in places]


# ---- class attributes ----


class WithClassAttributes:
    R = np.random.RandomState(1)
    rng = np.random.default_rng(1)
    python = random.Random(1)
    torch = torch.Generator().manual_seed(1)
    transform = Transform()
    sizes = (1, 2)

    def method(self) -> None: ...

    @staticmethod
    def static() -> None: ...


class Inheriting(WithClassAttributes):
    own = Transform()


class StoringInClassAttributes(Holder):
    """Stores the index by one instance and reads it by the other one, when both workers have stored."""

    def __getitem__(self, index: int) -> Any:
        for name in self.called:
            getattr(self.first, name).number = index
        super().__getitem__(index)
        numbers = [getattr(self.second, name).number for name in self.called]
        return self, numbers


@pytest.mark.parametrize("kind", [WithClassAttributes, Inheriting])
def test_generators_and_called_instances_of_a_class(kind: Any) -> None:
    called = [name for name in ("python", "transform", "own") if hasattr(kind, name)]
    first, second = kind(), kind()
    got = copies_of(StoringInClassAttributes(first=first, second=second, called=called))
    assert [numbers for _, numbers in got] == [[index] * len(called) for index in range(WORKERS)]
    assert not any(hasattr(getattr(kind, name), "number") for name in called), (
        "the original changed"
    )
    for name in ("R", "rng", "torch"):
        assert_copied(getattr(kind, name), *(getattr(one.first, name) for one, _ in got))
        assert all(getattr(one.first, name) is getattr(one.second, name) for one, _ in got)
    assert vars(first) == vars(second) == {}
    for one, _ in got:
        assert one.first.static is kind.static
        assert one.first.method.__self__ is one.first


# ---- what is shared whole ----


WHOLE: dict[str, Callable[[], Any]] = {
    "Lock": threading.Lock,
    "RLock": threading.RLock,
    "Condition": threading.Condition,
    "Event": threading.Event,
    "Semaphore": threading.Semaphore,
    "Barrier": lambda: threading.Barrier(2),
    "local": threading.local,
    "Thread": threading.Thread,
    "Queue": queue.Queue,
    "SimpleQueue": queue.SimpleQueue,
    "Future": concurrent.futures.Future,
    "executor": lambda: concurrent.futures.ThreadPoolExecutor(1),  # which starts no thread
    "Logger": lambda: logging.getLogger("tests.isolation"),
}


@pytest.mark.filterwarnings("ignore:.*is a threading.local, which is for one thread")
def test_shared_whole() -> None:
    datasets = copies(**made(WHOLE), thing=Thing(whole=[made(WHOLE)]))
    for kind in WHOLE:
        assert_shared(*(getattr(dataset, kind) for dataset in datasets))
        assert_shared(*(dataset.thing.whole[0][kind] for dataset in datasets))
    assert_copied(*(dataset.thing for dataset in datasets))


def test_global_generators_are_never_copied() -> None:
    own = {
        "numpy": np.random.mtrand._rand,  # type: ignore[attr-defined]
        "python": random._inst,  # type: ignore[attr-defined]
        "torch": torch.default_generator,
    }
    for dataset in copies(**own)[1:]:
        assert all(getattr(dataset, name) is own[name] for name in own)


# ---- finalizers ----


class Closing:
    """Counts, in a queue that its copies share, how often it was closed."""

    def __init__(self) -> None:
        self.closed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.rows = [1]

    def __del__(self) -> None:
        self.closed.put("closed")


def test_the_finalizer_of_a_copy_is_silent() -> None:
    dataset = Holder(closing=Closing())
    closed = dataset.closing.closed
    got = copies_of(dataset)
    assert_copied(dataset.closing, *(one.closing for one in got))
    for one in got:
        assert isinstance(one.closing, Closing)
        assert one.closing.__class__.__name__ == "Closing"
    del one, got
    gc.collect()
    assert closed.empty(), "a copy closed what it does not own"
    del dataset
    gc.collect()
    assert closed.qsize() == 1


def test_what_a_worker_makes_itself_is_finalized() -> None:
    class Lazy(Holder):
        closing: Closing | None = None

        def __getitem__(self, index: int) -> Any:
            self.closing = Closing()
            return super().__getitem__(index)

    got = copies_of(Lazy())
    closed = [one.closing.closed for one in got]
    del got
    gc.collect()
    assert [one.qsize() for one in closed] == [1, 1]


def test_finalizers_of_weakref_and_temporary_folders() -> None:
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as name:
        folder = tempfile.TemporaryDirectory(dir=name)
        dataset = Holder(folder=folder)
        dataset.finalizer = weakref.finalize(dataset, ended.put, 1)
        got = copies_of(dataset)
        assert [one.folder.name for one in got] == [folder.name] * WORKERS
        assert not any(one.finalizer.alive for one in got if one.finalizer is not dataset.finalizer)
        del got
        gc.collect()
        assert Path(folder.name).is_dir()
        assert ended.empty()
        del dataset
        gc.collect()
        assert ended.qsize() == 1
        folder.cleanup()


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore::fastload.errors.SharedStateWarning")
def test_a_named_temporary_file_outlives_the_copies() -> None:
    with tempfile.NamedTemporaryFile() as file:
        copies(file=file)
        gc.collect()
        assert Path(file.name).is_file()


# ---- when copies are made ----

# They shuffle, because the order of the next epoch is unknown then, and no worker reads ahead into it.


class Asked:
    """Counts, in a queue that its copies share, how often it was copied."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[int] = queue.SimpleQueue()

    def __deepcopy__(self, memo: Any) -> Asked:
        self.asked.put(1)
        new = object.__new__(type(self))
        new.asked = self.asked
        return new


@pytest.mark.parametrize("persistent", [False, True])
def test_copies_are_made_at_iter(persistent: bool) -> None:
    dataset = Holder(copied=Asked(), scale=1)
    asked = dataset.copied.asked
    with loader_of(dataset, shuffle=True, persistent_workers=persistent) as loader:
        assert asked.qsize() == 0
        seen = []
        for epoch in range(3):
            dataset.scale = epoch
            iterator = iter(loader)
            count, got = asked.qsize(), list(iterator)
            seen.append((count, [one.scale for one in got], {id(one) for one in got}))
    kept = [(WORKERS, [0, 0])] * 3
    anew = [(WORKERS * (epoch + 1), [epoch] * WORKERS) for epoch in range(3)]
    assert [one[:2] for one in seen] == (kept if persistent else anew)
    assert len(set.union(*(ids for *_, ids in seen))) == WORKERS * (1 if persistent else 3)


def test_copies_are_collected() -> None:
    with loader_of(Holder(thing=Thing())) as loader:
        watched = [weakref.ref(one.thing) for one in loader]
    gc.collect()
    assert [watch() for watch in watched] == [None, None]


# ---- what belongs to the graph ----


def test_get_worker_info_names_the_copy() -> None:
    class Asking(Holder):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            worker = get_worker_info()
            assert worker is not None
            return self, worker.dataset

    dataset = Asking()
    got = copies_of(dataset)
    assert all(one is copied and one is not dataset for one, copied in got)
    got = copies_of(Subset(dataset, [0, 1]))
    assert all(one is subset.dataset for one, subset in got)
    assert len({id(subset) for _, subset in got}) == WORKERS


def test_worker_init_fn_acts_on_the_copy() -> None:
    def init(worker_id: int) -> None:
        worker = get_worker_info()
        assert worker is not None
        worker.dataset.offset = 10 + worker_id
        dataset.seen.append(worker_id)  # of the closure: the same copy
        assert worker.dataset is dataset

    dataset = Holder(offset=0, seen=[])
    got = copies_of(dataset, worker_init_fn=init)
    assert sorted((one.offset, one.seen) for one in got) == [(10, [0]), (11, [1])]
    assert (dataset.offset, dataset.seen) == (0, [])


def test_on_error_and_on_stats_are_shared() -> None:
    class Failing(Holder):
        def on_error(self, index: int, error: BaseException) -> Any:
            self.rows.append(index)
            return "replaced"

        def on_stats(self, stats: Any) -> None:
            self.rows.append("stats")

        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            self.rows.append(-1)  # the copy's
            raise ValueError

    dataset = Failing(rows=[])
    got = copies_of(dataset, on_error=dataset.on_error, on_stats=dataset.on_stats)
    assert got == ["replaced", "replaced"]
    assert sorted(dataset.rows[:2]) == [0, 1]
    assert dataset.rows[2:] == ["stats"]


# ---- classes that are safe in threads ----


class Safe(Holder):
    fastload_per_worker = ()


class SafeButTransform(Holder):
    fastload_per_worker = ("transform",)


class Subclass(SafeButTransform):
    pass


class SafePart:
    fastload_per_worker = ()

    def __init__(self) -> None:
        self.rows = [1]


class SafeInSlots:
    __slots__ = ("rows", "transform")
    fastload_per_worker = ("transform",)


def attributes() -> dict[str, Any]:
    return {"transform": Thing(), "rows": [1], "table": {}}


def test_an_instance_may_be_shared_whole() -> None:
    dataset = Safe(**attributes())
    assert_shared(dataset, *copies_of(dataset))


def test_one_attribute_may_be_the_worker_s_own() -> None:
    slotted = SafeInSlots()
    slotted.rows, slotted.transform = [1], Thing()
    dataset = SafeButTransform(**attributes(), slotted=slotted)
    got = copies_of(dataset)
    assert_copied(dataset, *got)
    assert_copied(dataset.transform, *(one.transform for one in got))
    assert_shared(dataset.rows, *(one.rows for one in got))
    assert_shared(dataset.slotted, *(one.slotted for one in got))
    assert {type(one) for one in got} == {SafeButTransform}
    own = [one.slotted for one in copies_of(Holder(slotted=slotted))]
    assert_copied(slotted, *own)
    assert_copied(slotted.transform, *(one.transform for one in own))
    assert_shared(slotted.rows, *(one.rows for one in own))


def test_a_subclass_inherits_nothing() -> None:
    dataset = Subclass(**attributes())
    got = copies_of(dataset)
    assert_copied(dataset, *got)
    assert_copied(dataset.rows, *(one.rows for one in got))


def test_parts_of_a_dataset_are_shared_if_their_own_class_is_safe() -> None:
    class Own(TensorDataset):
        pass

    safe, rows = {"part": SafePart(), "inner": TensorDataset(torch.arange(4))}, torch.arange(4)
    datasets = copies(**safe, parts=[SafePart()], rows=[1], own=Own(rows))
    for name in safe:
        assert_shared(*(getattr(dataset, name) for dataset in datasets))
    assert_shared(*(dataset.parts[0] for dataset in datasets))
    assert_copied(*(dataset.rows for dataset in datasets))
    assert_copied(*(dataset.own.tensors[0] for dataset in datasets))


# ---- iterable datasets ----


class Stream(IterableDataset[Any]):
    """One element for each worker: its copy."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __iter__(self) -> Iterator[Any]:
        yield self


def test_iterable_datasets_are_copied_by_the_same_rule() -> None:
    dataset = Stream(data=list(range(1_001)), thing=Thing(), big=np.zeros(16 * MIB + 1, np.uint8))
    dataset.call = lambda: dataset
    got = copies_of(dataset)
    assert_copied(dataset, *got)
    assert_copied(dataset.thing, *(one.thing for one in got))
    assert_shared(dataset.data, *(one.data for one in got))
    assert_shared(dataset.big, *(one.big for one in got))
    assert all(one.call() is one for one in got)


# ---- copy_dataset ----


@pytest.mark.parametrize("options", [{}, {"copy_dataset": True}])
def test_without_workers_nothing_is_copied(options: dict[str, Any]) -> None:
    dataset = Stream(asked=Asked())
    collate_fn = lambda sample: (sample, dataset.asked)  # noqa: E731
    assert list(loader_of(dataset, num_workers=0, collate_fn=collate_fn, **options)) == [
        (dataset, dataset.asked)
    ]
    assert dataset.asked.asked.empty()


def test_copying_data_too() -> None:
    dataset = Holder(
        big=np.zeros(16 * MIB + 1, np.uint8),
        rows=list(range(1_001)),
        many=parts(20, MIB // 4),
        lock=threading.Lock(),
        inner=TensorDataset(torch.arange(4)),
    )
    dataset.call = lambda: dataset.rows
    got = copies_of(dataset, copy_dataset=True)
    for name in ("big", "rows", "many"):
        assert_copied(getattr(dataset, name), *(getattr(one, name) for one in got))
    assert_copied(dataset.many[0], *(one.many[0] for one in got))
    assert all(one.call() is one.rows for one in got)
    assert all(one.lock is dataset.lock for one in got)
    assert all(torch.equal(one.inner.tensors[0], torch.arange(4)) for one in got)


@pytest.mark.filterwarnings("ignore:.*samples can be wrong")
def test_sharing_all() -> None:
    dataset = Holder(generator=(x for x in []))
    got = copies_of(dataset, collate_fn=lambda sample: (sample, dataset), copy_dataset=False)
    assert got == [(dataset, dataset)] * WORKERS


@pytest.mark.parametrize("value", ["all", None])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="copy_dataset"):
        loader_of([1, 2], copy_dataset=value)


# ---- what has no copy ----


def test_what_has_no_copy_is_shared_and_named_once(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with (
        os.fdopen(reading, "rb") as pipe,
        os.fdopen(writing, "wb"),
        open(tmp_path / "log.txt", "w") as log,
    ):
        numbers = (x for x in [1, 2])
        dataset = Holder(transform=Thing(log=log, rows=[1]), steps=[pipe], numbers=numbers)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            got = copies_of(dataset)
        for one in got:
            assert one.transform.log is log
            assert one.steps[0] is pipe
            assert one.numbers is numbers
        assert_copied(dataset.transform, *(one.transform for one in got))
        assert_copied(dataset.steps, *(one.steps for one in got))
    assert [warning.category for warning in said] == [SharedStateWarning]
    for place in ("dataset.transform.log", "dataset.steps[0]", "dataset.numbers"):
        assert place in str(said[0].message)


def test_what_has_no_copy_in_collate_fn_and_worker_init_fn() -> None:
    numbers, more = (x for x in [1, 2]), (x for x in [1, 2])
    collate_fn = functools.partial(lambda numbers, sample: sample, numbers)
    with pytest.warns(SharedStateWarning, match=r"collate_fn.*worker_init_fn") as said:
        copies_of(Holder(), collate_fn=collate_fn, worker_init_fn=lambda worker_id: more and None)
    assert len(said) == 1


@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
@pytest.mark.parametrize("handle", [lambda database: database, lambda database: database.cursor()])
def test_an_open_database_is_refused(handle: Callable[[Any], Any]) -> None:
    """The next `iter()` works, if the cause is gone."""
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        dataset = Holder(transform=Thing(steps=[handle(database)]))
        with loader_of(dataset) as loader:
            with pytest.raises(DatasetCopyError, match=r"dataset\.transform\.steps\[0\].* open"):
                iter(loader)
            dataset.transform.steps.clear()
            assert [one.transform.steps for one in loader] == [[], []]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("order", ["file first", "file last"])
def test_what_has_no_copy_in_an_object_with_a_finalizer(order: str, tmp_path: Path) -> None:
    """The object is shared with what it holds, wherever else that is held."""
    with open(tmp_path / "log.txt", "w") as log:
        closing = Closing()
        closing.log = log  # type: ignore[attr-defined]
        both = {"log": log, "closing": closing}
        dataset = Holder(**dict(sorted(both.items(), reverse=order == "file first")))
        with pytest.warns(SharedStateWarning) as said:
            got = copies_of(dataset)
        assert_shared(closing, *(one.closing for one in got))
        assert_shared(log, *(one.log for one in got))
        assert "dataset.closing" in str(said[0].message)
        assert len(said) == 1


# ---- what a worker inherits ----

language = contextvars.ContextVar("language", default="none")


class Inherited(Dataset[Any]):
    """What the thread of a worker begins with; sample 0 changes it before sample 1 is read."""

    fastload_per_worker = ()

    def __init__(self) -> None:
        self.looked, self.changed = threading.Barrier(2), threading.Barrier(2)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            self.changed.wait(DEADLINE_SECONDS)
        found = language.get(), decimal.getcontext().prec, np.geterr()["over"]
        if index == 0:
            language.set("de")
            decimal.getcontext().prec = 3
            np.seterr(over="raise")
            self.changed.wait(DEADLINE_SECONDS)
        self.looked.wait(DEADLINE_SECONDS)
        return found


def test_workers_begin_with_the_caller_s_context() -> None:
    loader = fastload.DataLoader(Inherited(), num_workers=2, batch_size=None)

    def load() -> list[Any]:
        language.set("fr")
        with decimal.localcontext() as context, np.errstate(over="ignore"):
            context.prec = 7
            found = list(loader)
            assert (language.get(), context.prec, np.geterr()["over"]) == ("fr", 7, "ignore")
        return found

    over = "ignore" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "warn"  # a thread's own
    assert contextvars.copy_context().run(load) == [["fr", 7, over]] * 2
