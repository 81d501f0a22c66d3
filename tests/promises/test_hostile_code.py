"""Promise: whatever user code does, an error stays one error in its place; odd arguments are refused.

Exceptions, indices and data sets here raise where fastload looks at them to say what happened.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections import Counter, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import fastload
from fastload.collate import data_bytes

WORKERS = pytest.mark.parametrize("workers", [0, 2])


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class NoTextNorError(BaseException):
    def __str__(self) -> str:
        raise ValueError("no text")


class NoFilename(Exception):
    @property
    def filename(self) -> str:
        raise RuntimeError("no name")


class NoAttribute(Exception):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class NoClass(Exception):
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError("no class")


class NoPath:
    def __fspath__(self) -> str:
        raise RuntimeError("no path")


class OddFilename(Exception):
    filename = NoPath()


class NoNumber(OSError):
    @property  # type: ignore[override]
    def errno(self) -> int:
        raise RuntimeError("no number")


class OddNumber(OSError):
    @property  # type: ignore[override]
    def errno(self) -> Any:
        return [5]


class NotesNone(Exception):
    __notes__ = None  # type: ignore[assignment]


class NotesNumbers(Exception):
    __notes__ = (1,)  # type: ignore[assignment]


class NotesFixed(Exception):
    @property
    def __notes__(self) -> tuple[str, ...]:  # type: ignore[override]
        return ()


HOSTILE = [
    NoText,
    NoTextNorError,
    NoFilename,
    NoAttribute,
    NoClass,
    OddFilename,
    NoNumber,
    OddNumber,
    NotesNone,
    NotesNumbers,
    NotesFixed,
]


class Raising(Dataset[int]):
    """The numbers 0 to 7; of index 3 an exception."""

    def __init__(self, kind: type[BaseException] = OSError) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: Any) -> int:
        if int(index) == 3:
            raise self.kind()
        return int(index)


def drain(iterator: Iterator[Any]) -> list[Any]:
    """All batches as lists, an error as its exception."""
    got: list[Any] = []
    while True:
        try:
            got.append(next(iterator).tolist())
        except StopIteration:
            return got
        except BaseException as error:
            got.append(error)


@WORKERS
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_exception_is_an_error_in_its_place(
    kind: type[BaseException], workers: int
) -> None:
    loader = fastload.DataLoader(Raising(kind), 2, num_workers=workers, retries=1)
    before, error, *after = drain(iter(loader))
    assert [before, *after] == [[0, 1], [4, 5], [6, 7]]
    if issubclass(kind, Exception):
        assert type(error) is kind
    else:
        assert type(error) is RuntimeError
        assert type(error.__cause__) is kind


@WORKERS
@pytest.mark.parametrize("kind", [k for k in HOSTILE if issubclass(k, Exception)])
def test_a_hostile_exception_can_be_skipped(
    kind: type[BaseException], workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = fastload.DataLoader(Raising(kind), 2, num_workers=workers, on_error="skip")
    with caplog.at_level(logging.WARNING, "fastload"):
        assert drain(iter(loader)) == [[0, 1], [2], [4, 5], [6, 7]]
    (record,) = caplog.records
    assert f"skipped sample index 3: {kind.__name__}" in record.getMessage()


@WORKERS
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, RuntimeError])
def test_a_data_set_that_cannot_say_which_file(kind: type[BaseException], workers: int) -> None:
    class Locating(Raising):
        def locate(self, index: int) -> str:
            raise kind

    if kind is KeyboardInterrupt and not workers:
        pytest.skip("in the main thread this is Ctrl-C, and passes")
    got = drain(iter(fastload.DataLoader(Locating(), 2, num_workers=workers)))
    assert type(got[1]) is OSError
    assert got[2:] == [[4, 5], [6, 7]]


class Unshowable:
    """An index that cannot be shown."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __int__(self) -> int:
        return self._index


@WORKERS
@pytest.mark.parametrize("stage", ["sample", "collate"])
def test_an_index_that_cannot_be_shown(stage: str, workers: int) -> None:
    def collate(samples: list[int]) -> torch.Tensor:
        if stage == "collate" and 2 in samples:
            raise OSError
        return torch.tensor(samples)

    batches = [[Unshowable(i), Unshowable(i + 1)] for i in range(0, 8, 2)]
    if stage == "collate":
        batches[1].pop()
    loader = fastload.DataLoader(
        Raising(), batch_sampler=batches, num_workers=workers, collate_fn=collate
    )
    got = drain(iter(loader))
    assert type(got[1]) is OSError
    assert [got[0], *got[2:]] == [[0, 1], [4, 5], [6, 7]]
    assert "Unshowable whose repr() raises RuntimeError" in got[1].__notes__[0]


@WORKERS
def test_what_on_error_returned_is_named_where_it_cannot_be_collated(workers: int) -> None:
    loader = fastload.DataLoader(
        Raising(), 4, num_workers=workers, on_error=lambda index, error: None
    )
    got = drain(iter(loader))
    assert "NoneType" in str(got[0])
    assert "of which [3] are what on_error returned" in got[0].__notes__[0]
    assert got[1:] == [[4, 5, 6, 7]]


@WORKERS
def test_a_batch_sampler_that_uses_its_list_again(workers: int) -> None:
    def batches() -> Iterator[list[int]]:
        batch: list[int] = []
        for start in range(0, 8, 2):
            batch[:] = [start, start + 1]
            yield batch

    class Batches:
        def __iter__(self) -> Iterator[list[int]]:
            return batches()

    loader = fastload.DataLoader(list(range(8)), batch_sampler=Batches(), num_workers=workers)  # type: ignore[arg-type]
    assert drain(iter(loader)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("workers", [0, 3])
def test_several_threads_may_share_one_iterator(workers: int) -> None:
    """Each sample goes to one of them; whoever comes last finds the end."""
    iterator = iter(fastload.DataLoader(list(range(4000)), 2, num_workers=workers))  # type: ignore[arg-type]
    got: list[list[int]] = [[] for _ in range(4)]
    ended: list[BaseException] = []

    def consume(mine: list[int]) -> None:
        try:
            for batch in iterator:
                mine.extend(batch.tolist())
        except BaseException as error:
            ended.append(error)

    threads = [threading.Thread(target=consume, args=(mine,)) for mine in got]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not ended
    assert Counter(i for mine in got for i in mine) == Counter(range(4000))
    assert all(mine == sorted(mine) for mine in got)


def test_torch_s_threads_are_left_alone_by_loaders_in_samples_and_in_threads() -> None:
    class Nested(Raising):
        def __getitem__(self, index: Any) -> int:
            inner = fastload.DataLoader(list(range(4)), 2, num_workers=2)  # type: ignore[arg-type]
            return sum(int(batch.sum()) for batch in inner) + torch.get_num_threads()

    def in_a_new_thread() -> int:
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return seen[0]

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        batches = list(fastload.DataLoader(Nested(), 4, num_workers=2))
        assert torch.cat(batches).tolist() == [7] * 8, "6, and one thread for each worker"
        assert (in_a_new_thread(), torch.get_num_threads()) == (3, 3)
        threads = [
            threading.Thread(
                target=lambda: [
                    list(fastload.DataLoader(list(range(4)), 2, num_workers=3))  # type: ignore[arg-type]
                    for _ in range(10)
                ]
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (in_a_new_thread(), torch.get_num_threads()) == (3, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["max_errors", "prefetch_batches"])
@pytest.mark.parametrize("value", [1.5, "2", [1], float("nan")])
def test_counts_must_be_integers(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an integer, got "):
        fastload.DataLoader(list(range(4)), **{name: value})  # type: ignore[arg-type]


def test_a_prefetch_factor_that_is_no_number_is_refused() -> None:
    loader = fastload.DataLoader(list(range(4)), num_workers=2, prefetch_factor=float("nan"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="prefetch_factor must be an integer, got nan"):
        iter(loader)


def test_an_infinite_timeout_is_none() -> None:
    loader = fastload.DataLoader(list(range(4)), 2, num_workers=1, timeout=float("inf"))  # type: ignore[arg-type]
    assert drain(iter(loader)) == [[0, 1], [2, 3]]


class LazyMapping(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise OSError("read only when it is asked for")

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


class Endless(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield 0


def loop() -> list[Any]:
    itself: list[Any] = [torch.zeros(3)]
    itself.append(itself)
    return itself


def released() -> memoryview:
    view = memoryview(b"abc")
    view.release()
    return view


@pytest.mark.parametrize("make", [LazyMapping, Endless, loop, released, NoAttribute])
def test_a_batch_that_cannot_be_looked_into_is_delivered(make: Any) -> None:
    def collate(_: list[Any]) -> Any:
        return make()

    dataset: Any = range(4)
    for workers in (0, 2):
        with fastload.DataLoader(dataset, 2, collate_fn=collate, num_workers=workers) as loader:
            assert [type(batch) for batch in loader] == [type(make())] * 2


def test_bytes_are_counted_in_containers_that_are_known() -> None:
    leaf = torch.zeros(25)  # 100 bytes
    pair = namedtuple("pair", "x y")
    for batch in (
        leaf,
        [leaf],
        (leaf,),
        {"x": leaf},
        defaultdict(list, x=leaf),
        UserDict({"x": leaf}),
        pair(leaf, 1),
        [{"x": (b"." * 50, leaf[:0])}, bytearray(50)],
    ):
        assert data_bytes(batch) == 100, type(batch)


class Late(Exception):
    """What a watchdog of the user's raises."""


def _late(*_: Any) -> None:
    raise Late


class _Watchdog:
    def __call__(self, *_: Any) -> None:
        raise Late

    def bark(self, *_: Any) -> None:
        raise Late


def _late_and_default_again(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Late


HANDLERS: dict[str, Any] = {
    "function": _late,
    "function that restores the default": _late_and_default_again,
    "partial": partial(_late, 1),
    "instance": _Watchdog(),
    "method": _Watchdog().bark,
}


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("on_error", ["skip", lambda index, error: index])
def test_what_a_signal_handler_raises_without_workers_is_no_fault_of_the_sample(
    handler: str, on_error: Any
) -> None:
    class Struck(Dataset[int]):
        struck = False

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            if index == 2 and not self.struck:
                self.struck = True
                signal.raise_signal(signal.SIGUSR1)
            return index

    before = signal.signal(signal.SIGUSR1, HANDLERS[handler])
    try:
        loader = fastload.DataLoader(Struck(), None, on_error=on_error)
        iterator = iter(loader)
        got = [int(next(iterator)), int(next(iterator))]
        with pytest.raises(Late):
            next(iterator)
        assert [*got, *map(int, iterator)] == [0, 1, 2, 3], "the sample is read again"
        assert loader.stats().errors == 0
    finally:
        signal.signal(signal.SIGUSR1, before)


class _Colour(Enum):
    RED = 1


def test_an_error_that_only_looks_like_one_of_a_handler_is_the_sample_s() -> None:
    def with_a_frame(number: int) -> int:
        frame = sys._getframe()
        if number == 4:
            raise ValueError(frame.f_code.co_name)
        return number

    class Raising(Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            if index == 3:
                _Colour(index)
            return with_a_frame(index)

    loader = fastload.DataLoader(Raising(), None, on_error="skip")
    assert [int(sample) for sample in loader] == [0, 1, 2, 5, 6, 7]
