"""Promises:
- State that copies do not reach is watched: file positions, descriptors, large arrays and containers. A change that
  samples make is noticed within a few samples.
- A cache that is being filled gives no warning.
- Watching changes nothing.
"""

from __future__ import annotations

import gzip
import io
import itertools
import mmap
import os
import random
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from fastload.isolation.watch import Watch


def noticed(watched: Any, sample: Callable[[int], object], samples: int = 3) -> set[str]:
    """Return the sentences after some samples, each looked at."""
    found: set[str] = set()
    watch = Watch(watched, found)
    for k in range(samples):
        watch.begin()
        sample(k)
        watch.end()
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "records"
    path.write_bytes(b"".join(b"%07d\n" % k for k in range(4000)))
    return path


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


# ---- positions ----


@pytest.fixture(params=["raw", "buffered", "text", "gzip", "mmap", "descriptor"])
def handle(request: pytest.FixtureRequest, path: Path) -> Iterator[tuple[str, Any, Any]]:
    """A name, an open file of some kind, and what reads one record by its position."""
    kind, packed = request.param, path.with_suffix(".gz")
    if kind == "descriptor":
        fd = os.open(path, os.O_RDONLY)
        yield "image_fd", fd, lambda k: (os.lseek(fd, 800 * k, 0), os.read(fd, 8))
        os.close(fd)
        return
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with path.open("rb") as under:
        file: Any = {
            "raw": lambda: path.open("rb", buffering=0),
            "buffered": lambda: path.open("rb"),
            "text": lambda: path.open(),
            "gzip": lambda: gzip.GzipFile(packed),
            "mmap": lambda: mmap.mmap(under.fileno(), 0, access=mmap.ACCESS_READ),
        }[kind]()
    yield "file", file, lambda k: (file.seek(8 * (3000 - 1000 * k)), file.read(8))
    file.close()


def test_a_position_that_samples_move_is_noticed(handle: Any) -> None:
    name, file, read = handle
    for watched in [(f"dataset.{name}", file)], [("dataset", Holder(**{name: file}))]:
        [sentence] = noticed(watched, read)
        assert f"`dataset.{name}`" in sentence
        assert not noticed(watched, lambda k: k), "no sample reads it"
    [sentence] = noticed([("", Holder(**{name: file}))], read)
    assert f"read through its open file `{name}`" in sentence
    assert noticed([("", Subset(Holder(**{name: file}), [0]))], read) == {sentence}  # type: ignore[arg-type]


@pytest.mark.parametrize("lock", [threading.Lock(), threading.RLock()])
def test_a_dataset_with_a_lock_knows_that_it_is_shared(handle: Any, lock: Any) -> None:
    name, file, read = handle
    assert not noticed([("", Holder(lock=lock, **{name: file}))], read)


def test_a_closed_file_a_pipe_and_an_int_that_is_no_descriptor_are_not_looked_at(
    path: Path,
) -> None:
    reading, writing = os.pipe()
    closed = path.open()
    closed.close()
    dataset = Holder(fd=reading, pipe_fd=writing, fileno=123456, big_fd=1 << 80, n=0, file=closed)

    def sample(k: int) -> None:
        os.write(writing, b"x")
        os.read(reading, 1)

    assert not noticed([("", dataset)], sample)
    os.close(reading)
    os.close(writing)


def test_looking_at_a_text_file_does_not_disturb_who_reads_it(path: Path) -> None:
    with path.open() as file:
        lines = []
        found: set[str] = set()
        watch = Watch([("file", file)], found)
        for line in itertools.islice(file, 100):
            watch.begin()
            lines.append(line)
            watch.end()
        assert lines == [f"{k:07d}\n" for k in range(100)]


# ---- arrays ----


@pytest.fixture(params=["numpy", "torch", "view"])
def array(request: pytest.FixtureRequest) -> Any:
    if request.param == "torch":
        return torch.zeros(1000, 30)
    return np.zeros((1000, 60))[:, ::2] if request.param == "view" else np.zeros((1000, 30))


def test_an_array_that_each_sample_writes_over_is_noticed(array: Any) -> None:
    def sample(k: int) -> None:
        array[:] = k + 1

    [sentence] = noticed([("dataset.buffer", array)], sample)
    assert "`dataset.buffer`" in sentence
    assert not noticed([("dataset.buffer", array)], sample, 1)


def test_an_array_that_is_filled_bit_by_bit_is_not_noticed(array: Any) -> None:
    array[:] = float("nan")

    def sample(k: int) -> None:
        array[k * 100 : (k + 1) * 100] = k

    assert not noticed([("dataset.cache", array)], sample, 10)


def test_what_processes_share_too_and_what_nobody_can_write_to_is_not_looked_at(
    tmp_path: Path,
) -> None:
    shared = torch.zeros(100).share_memory_()  # type: ignore[no-untyped-call]
    mapped = np.memmap(tmp_path / "a", np.uint8, "w+", shape=(100,))
    over = torch.from_numpy(mapped)
    base = np.zeros(100)
    view = base.view()
    view.flags.writeable = False

    def sample(k: int) -> None:
        shared.fill_(k)
        mapped[:] = k
        base[:] = k

    assert not noticed([("a", shared), ("b", mapped), ("c", view), ("d", over)], sample)


class Owner:
    """Owns memory of which NumPy knows no more than the address."""

    def __init__(self) -> None:
        self.memory = np.zeros(100)
        self.__array_interface__ = self.memory.__array_interface__


@pytest.mark.parametrize(
    "made", [lambda: np.asarray(Owner()), lambda: np.ma.masked_array(np.zeros(100))]
)
def test_memory_of_this_process_is_looked_at_whoever_owns_it(made: Callable[[], Any]) -> None:
    array = made()
    assert noticed([("dataset.array", array)], lambda k: array.__setitem__(slice(None), k + 1))


# ---- containers ----


def below(x: object) -> list[tuple[str, object]]:
    """Return a shared container that holds `x`, with its path."""
    return [("dataset.records", [x])]


STATE: dict[str, tuple[Any, Callable[[Any, int], object]]] = {
    "a list that is filled anew": ([0], lambda x, k: (x.clear(), x.extend([k, k]))),
    "a value of a dictionary": ({"n": 0}, lambda x, k: x.update(n=k + 7)),
    "a counter in a nested object": (
        Holder(inner=[{"a": Holder(n=0)}]),
        lambda x, k: setattr(x.inner[0]["a"], "n", k + 7),
    ),
    "a set of what is left": (set(range(100)), lambda x, k: x.pop()),
    "an attribute": (Holder(params=None), lambda x, k: setattr(x, "params", {})),
    "an array": (np.zeros(4), lambda x, k: x.fill(k + 1)),
    "NumPy's generator": (np.random.default_rng(0), lambda x, k: x.random()),
    "torch's generator": (torch.Generator(), lambda x, k: torch.rand(1, generator=x)),
    "Python's generator": (random.Random(0), lambda x, k: x.random()),
    "an open file": (io.BytesIO(b"abcdef"), lambda x, k: x.read(1)),
    "a cache that forgets": (
        OrderedDict.fromkeys("abc"),
        lambda x, k: (x.popitem(last=False), x.update({k: k})),
    ),
}


@pytest.mark.parametrize("name", STATE)
def test_an_object_in_a_shared_container_that_samples_change_is_noticed(name: str) -> None:
    x, change = STATE[name]
    [sentence] = noticed(below(x), lambda k: change(x, k), 4)
    assert sentence.startswith("change what `dataset.records` holds")


CACHES: dict[str, tuple[Any, Callable[[Any, int], object]]] = {
    "a list": ([], lambda x, k: x.append([k])),
    "a dictionary": ({}, lambda x, k: x.update({k: [k]})),
    "a set": (set(), lambda x, k: x.add(k)),
    "a list of known length": ([None] * 5, lambda x, k: x.__setitem__(k, [k])),
    "an array": (np.zeros((5, 3)), lambda x, k: x[k].fill(1)),
    "attributes": (types.SimpleNamespace(), lambda x, k: setattr(x, f"a{k}", k)),
    "the same values again": (
        {"size": 300, "p": 0.5},
        lambda x, k: x.update(size=int("300"), p=float("0.5")),
    ),
    "nothing": ([1, {"a": np.ones(3)}], lambda x, k: None),
    "one change": ({"reader": None}, lambda x, k: x.update(reader=x["reader"] or [1])),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_and_what_stays_the_same_are_not_noticed(name: str) -> None:
    x, change = CACHES[name]
    assert not noticed(below(x), lambda k: change(x, k), 5)


LARGE: dict[str, tuple[Any, Callable[[Any, int], object]]] = {
    "list": ([0] * 2_000, lambda x, k: x.__setitem__(slice(None), [k + 1] * 2_000)),
    "deque": (deque([0] * 2_000), lambda x, k: x.rotate() or x.__setitem__(0, k + 1)),
    "dict": (dict.fromkeys(range(2_000), 0), lambda x, k: x.update({1: k + 1})),
    "list of lists": ([[0, 0] for _ in range(2_000)], lambda x, k: x[0].__setitem__(1, k + 1)),
    "list of instances": (
        [Holder(i=0) for _ in range(2_000)],
        lambda x, k: setattr(x[0], "i", k + 1),
    ),
    "list of arrays": ([np.zeros(2) for _ in range(2_000)], lambda x, k: x[0].fill(k + 1)),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_container_that_is_scratch_space_is_noticed(kind: str) -> None:
    container, change = LARGE[kind]
    [sentence] = noticed([("dataset.records", container)], lambda k: change(container, k))
    assert "change what `dataset.records` holds" in sentence


def test_no_code_of_the_users_runs() -> None:
    class Touchy:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

        __eq__ = __hash__ = __len__ = __iter__ = __getattribute__  # type: ignore[assignment]

    class Things(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError

        __len__ = __getitem__ = __iter__

    x: list[Any] = [Touchy(), Things([Touchy()]), {1: Touchy()}, {"a"}]
    assert not noticed(below(x), lambda k: None)


def test_a_container_that_another_worker_changes_during_a_look_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import fastload.isolation.watch as module

    def changing(x: Any) -> Any:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(module, "places", changing)
    assert not noticed(below({}), lambda k: None)


def test_a_look_is_bounded() -> None:
    x = [[{k: [j] for k in range(30)} for j in range(30)] for _ in range(30)]
    found = noticed(below(x), lambda k: x[0][0].update({0: [k]}))
    assert not found, "the first are looked at last"
    assert noticed(below(x), lambda k: x[-1][-1].update({0: [k]}))
