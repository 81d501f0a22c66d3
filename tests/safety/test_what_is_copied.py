"""Promises:
- Each worker owns every object that code can change, copied as one graph. Data is shared, and the rule for both is
  documented.
- Copies are made at `iter()` and run no code of the user's Python classes.
- An open handle that threads cannot share is refused at `iter()`, and the error names its place in the dataset. See
  also `tests/compat/test_lmdb.py`, `tests/compat/test_sqlite.py`, `tests/compat/test_video.py`,
  `tests/compat/test_audio.py`.
- Every other object that has no copy is named in one warning.

All of it is seen from outside: two workers meet in `__getitem__`, so that each reads one sample, and
return their dataset. The copies are then compared with the original and with each other.
"""

# ruff: noqa: SIM115 (files that stay open are the subject)

from __future__ import annotations

import array
import concurrent.futures
import contextlib
import contextvars
import ctypes
import dataclasses
import decimal
import enum
import functools
import io
import logging
import mmap
import multiprocessing
import operator
import os
import queue
import random
import sqlite3
import threading
import types
import warnings
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    TensorDataset,
)

import fastload
from fastload.errors import DatasetCopyError, SharedStateWarning
from fastload.safety import Survey

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
    """Return where each array or tensor lies in memory."""
    found = []
    for buffer in buffers:
        if isinstance(buffer, torch.Tensor) and buffer.is_sparse:
            buffer = buffer.coalesce().values()
        found.append(buffer.data_ptr() if isinstance(buffer, torch.Tensor) else buffer.ctypes.data)
    return found


def assert_copied(*objects: Any) -> None:
    assert len({id(o) for o in objects}) == len(objects), "shared"
    if isinstance(objects[0], (np.ndarray, torch.Tensor)):
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


def parts(count: int, size: int) -> list[np.ndarray]:
    return [np.zeros(size, np.uint8) for _ in range(count)]


DATA: dict[str, Callable[[], Any]] = {
    "array over 16 MiB": lambda: np.zeros(16 * MIB + 1, np.uint8),
    "tensor over 16 MiB": lambda: torch.zeros(16 * MIB + 1, dtype=torch.uint8),
    "tensor in shared memory": lambda: torch.zeros(3).share_memory_(),
    "list of 1,001": lambda: list(range(1_001)),
    "dict of 1,001": lambda: dict.fromkeys(range(1_001)),
    "list of 1,001 records": lambda: [Record(str(i), i) for i in range(1_001)],
    "list of 10,001 clips": lambda: [Clip(str(i)) for i in range(10_001)],
    "dict of 20 dicts of 200 lists": lambda: {i: {j: [j] for j in range(200)} for i in range(20)},
    "20 arrays of 256 KiB": lambda: parts(20, MIB // 4),
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


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class Colour(enum.Enum):
    RED = 1


def test_what_is_compared_by_identity_or_has_no_state_stays_itself() -> None:
    """Nothing is warned of."""
    code = [Thing, np, importable, len, np.sin, operator.add, Thing.name, type, dict[str, int]]
    values = [
        Colour.RED,
        object(),
        ...,
        NotImplemented,
        torch.float32,
        dataclasses.MISSING,
        np.mean,
    ]
    of_c = [torch.finfo(torch.float32), torch.iinfo(torch.int8), language, torch.ops.aten.add]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        kept = [*code, *values, *of_c, torch.jit.script(doubled)]
    for dataset in copies(kept=kept)[1:]:
        assert all(map(operator.is_, dataset.kept, kept))


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
    "tensor": lambda: torch.zeros(3),
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(3)),
    "module": lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)),
    "list of 1,000": lambda: list(range(1_000)),
    "2 buffers of 3 MiB": lambda: parts(2, 3 * MIB),
    "20 buffers of 100 KiB": lambda: parts(20, 100 << 10),
    "instance": lambda: Thing(x=1),
    "called instance": Transform,
    "RandomState": lambda: np.random.RandomState(1),
    "Generator": lambda: np.random.default_rng(1),
    "Random": lambda: random.Random(1),
    "torch.Generator": lambda: torch.Generator().manual_seed(1),
    "buffer of the user's": lambda: Buffer(b"data"),
    "image": lambda: pytest.importorskip("PIL.Image").new("L", (2, 2)),
    "long list with an attribute": lambda: Rows([[]] * LENGTH),
    "lambda with a default": lambda: lambda x=[]: x,
    "namespace": lambda: types.SimpleNamespace(rng=random.Random(1)),
}


class Buffer(io.BytesIO):
    """Has data in C."""


class Rows(list[Any]):
    """Has an attribute."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__(rows)
        self.name = "rows"


def test_state_is_copied() -> None:
    datasets = copies(**made(STATE))
    for kind in STATE:
        assert_copied(*(getattr(dataset, kind) for dataset in datasets))
        assert len({type(getattr(dataset, kind)) for dataset in datasets}) == 1
    assert_shared(*(getattr(dataset, "long list with an attribute")[0] for dataset in datasets))


def with_a_thing(thing: Thing) -> Callable[[Any], Any]:
    return lambda x: (x, thing)


LENGTH = 1_100
"""Of a container that would be data. One element is in most of them so many times, as a copy takes its time."""
CODE: dict[str, Callable[[], Any]] = {
    "list of transforms": lambda: [Transform()] * LENGTH,
    "list of closures": lambda: [with_a_thing(Thing())] * LENGTH,
    "list of partials": lambda: [functools.partial(importable, Thing())] * LENGTH,
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


# ---- one graph ----


def chain_of(length: int) -> Any:
    chain: Any = None
    for _ in range(length):
        chain = Thing(next=chain)
    return chain


def test_nesting_beyond_python_s_limit() -> None:
    assert_copied(*(dataset.chain.next for dataset in copies(chain=chain_of(5_000))))


# ---- instances ----


def trap(self: Any, *arguments: Any, **options: Any) -> Any:
    raise AssertionError("user code ran")


SPECIAL = (
    "__new__ __init__ __setattr__ __getattr__ __getattribute__ __delattr__ __repr__ __str__ __format__ __hash__ __eq__ "
    "__ne__ __dir__ __sizeof__ __bool__ __len__ __iter__ __contains__ __index__ __array__ __fspath__ __enter__ __lt__ "
    "__copy__ __deepcopy__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __getnewargs__"
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


# ---- what is shared whole ----


# Made here, because multiprocessing keeps the file that it takes it from.
VALUE = multiprocessing.Value("i", 3)
WHOLE: dict[str, Callable[[], Any]] = {
    "Lock": threading.Lock,
    "Event": threading.Event,
    "local": threading.local,
    "Thread": threading.Thread,
    "Queue": queue.Queue,
    "executor": lambda: concurrent.futures.ThreadPoolExecutor(1),  # which starts no thread
    "multiprocessing.Value": lambda: VALUE,
    "mmap": lambda: mmap.mmap(-1, 16),
    "Logger": lambda: logging.getLogger("tests.safety"),
}


@pytest.mark.filterwarnings("ignore:.*is a threading.local, which is for one thread")
def test_shared_whole() -> None:
    datasets = copies(**made(WHOLE), thing=Thing(whole=[made(WHOLE)]))
    for kind in WHOLE:
        assert_shared(*(getattr(dataset, kind) for dataset in datasets))
        assert_shared(*(dataset.thing.whole[0][kind] for dataset in datasets))
    assert_copied(*(dataset.thing for dataset in datasets))


# ---- when copies are made ----

# They shuffle, because the order of the next epoch is unknown then, and no worker reads ahead into it.


@pytest.mark.parametrize("persistent", [False, True])
def test_copies_are_made_at_iter(persistent: bool) -> None:
    dataset = Holder(scale=1)
    with loader_of(dataset, shuffle=True, persistent_workers=persistent) as loader:
        seen, copies = [], []
        for epoch in range(3):
            dataset.scale = epoch
            iterator = iter(loader)
            dataset.scale = -1
            copies += (got := list(iterator))
            seen.append([one.scale for one in got])
    assert seen == [[0 if persistent else epoch] * WORKERS for epoch in range(3)]
    assert len({*map(id, copies)}) == WORKERS * (1 if persistent else 3)


# ---- classes that are safe in threads ----


class Safe(Holder):
    fastload_per_worker = ()


class SafePart:
    fastload_per_worker = ()

    def __init__(self) -> None:
        self.rows = [1]


def attributes() -> dict[str, Any]:
    return {"transform": Thing(), "rows": [1], "table": {}}


def test_an_instance_may_be_shared_whole() -> None:
    dataset = Safe(**attributes())
    assert_shared(dataset, *copies_of(dataset))


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
        dataset.reference, dataset.proxy = weakref.ref(dataset), weakref.proxy(dataset)
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
    for place in ("transform.log", "steps[0]", "numbers", "reference", "proxy"):
        assert f"dataset.{place} (" in str(said[0].message)


class Closing:
    """Has a finalizer, and a generator."""

    def __init__(self) -> None:
        self.closed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.rng = random.Random(1)

    def __del__(self) -> None:
        self.closed.put("closed")


def archive(path: Path) -> Any:
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as made:
        made.writestr("a", "a")
    return zipfile.ZipFile(path.with_suffix(".zip"))


NO_COPY: dict[str, Callable[[Path], Any]] = {
    "text file": lambda path: open(path),
    "file of bytes": lambda path: open(path, "rb"),
    "zip archive": archive,
    "instance with a finalizer": lambda _: Closing(),
    "iterator": lambda _: iter([1, 2]),
    "iterator of a closure": lambda _: map(with_a_thing(Thing()), [1, 2]),
    "partial of the user's": lambda _: OwnPartial(importable),
    "cached function": lambda _: functools.lru_cache(Thing().name),
    "bytearray": lambda _: bytearray(100),
    "array of Python": lambda _: array.array("i", [0]),
    "array of ctypes": lambda _: (ctypes.c_int * 2)(),
    "storage": lambda _: torch.zeros(2).untyped_storage(),
    "weak dictionary": lambda _: weakref.WeakValueDictionary({1: torch.nn}),
}


class OwnPartial(functools.partial[Any]):
    """A partial of the user's."""


@pytest.mark.parametrize("kind", NO_COPY)
def test_threads_are_told_what_they_share_although_it_may_be_state(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    x = NO_COPY[kind](tmp_path / "file")
    survey = Survey(Holder(x=x))
    own = [survey.own().dataset.x for _ in range(2)]
    assert survey.said_of_shared().startswith("all workers share what cannot be copied: dataset.x")
    assert own[0] is x or kind in ("weak dictionary",)
    if isinstance(x, Closing):
        assert [place for place, _ in survey.graph.generators()] == ["dataset.x.rng"]
        assert x.closed.empty(), "a copy closed what it does not own"
    if hasattr(x, "close"):
        x.close()


def test_a_partial_has_a_copy_and_brings_no_messages() -> None:
    """So workers may begin the next epoch early."""
    assert not Survey(
        Holder(x=functools.partial(importable)), functools.partial(importable)
    ).hears_messages()
    assert Survey(Holder(x=OwnPartial(importable))).hears_messages()


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
            with pytest.raises(
                DatasetCopyError, match=r"dataset\.transform\.steps\[0\].* open.*in `__getitem__`"
            ):
                iter(loader)
            dataset.transform.steps.clear()
            assert [one.transform.steps for one in loader] == [[], []]


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


def test_a_length_of_the_user_s_does_not_decide() -> None:
    class Endless(list[Any]):
        def __len__(self) -> int:
            return 10_000

    class Attributes(dict[str, Any]):
        __slots__ = ()
        __getattr__ = dict.__getitem__

    parts, names = Endless([[1]]), Attributes(a=[1])
    own = Survey((parts, names)).own().dataset
    assert own[0] is not parts
    assert own[0][0] is not parts[0]
    assert own[1]["a"] is not names["a"]


def test_what_cannot_be_copied_keeps_no_frame_of_the_caller() -> None:
    survey = Survey(memoryview(b"bytes"))

    def kept() -> weakref.ref[set[int]]:
        local: set[int] = set()
        survey.own()
        return weakref.ref(local)

    assert kept()() is None
    assert survey.said_of_shared()
