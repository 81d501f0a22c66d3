"""Promise: what user code raises stays one error in its place, though we cannot show it; odd arguments are refused.

What ends the program, Ctrl-C or a signal handler that exits, is no error of a sample.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections import Counter, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Sampler

from fastload import DataLoader
from fastload.collate import data_bytes

WORKERS = pytest.mark.parametrize("workers", [0, 2])


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


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
def test_an_exception_that_cannot_be_shown_is_an_error_in_its_place_or_skipped(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = DataLoader(Raising(NoText), 2, num_workers=workers)
    before, error, *after = drain(iter(loader))
    assert [before, *after] == [[0, 1], [4, 5], [6, 7]]
    assert type(error) is NoText
    loader = DataLoader(Raising(NoText), 2, num_workers=workers, on_error="skip")
    with caplog.at_level(logging.WARNING, "fastload"):
        assert drain(iter(loader)) == [[0, 1], [2], [4, 5], [6, 7]]
    (record,) = caplog.records
    assert "skipped sample index 3: NoText: <NoText whose str()" in record.getMessage()


@WORKERS
def test_a_data_set_that_cannot_say_which_file(workers: int) -> None:
    class Locating(Raising):
        def locate(self, index: int) -> str:
            raise RuntimeError

    got = drain(iter(DataLoader(Locating(), 2, num_workers=workers)))
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
def test_an_index_that_cannot_be_shown(workers: int) -> None:
    batches = [[Unshowable(i), Unshowable(i + 1)] for i in range(0, 8, 2)]
    got = drain(iter(DataLoader(Raising(), batch_sampler=batches, num_workers=workers)))
    assert type(got[1]) is OSError
    assert [got[0], *got[2:]] == [[0, 1], [4, 5], [6, 7]]
    assert "Unshowable whose repr() raises RuntimeError" in got[1].__notes__[0]


@WORKERS
def test_what_on_error_returned_is_named_where_it_cannot_be_collated(workers: int) -> None:
    loader = DataLoader(Raising(), 4, num_workers=workers, on_error=lambda index, error: None)
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

    loader = DataLoader(list(range(8)), batch_sampler=Batches(), num_workers=workers)  # type: ignore[arg-type]
    assert drain(iter(loader)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("workers", [0, 3])
def test_several_threads_may_share_one_iterator(workers: int) -> None:
    """Each sample goes to one of them; whoever comes last finds the end."""
    iterator = iter(DataLoader(list(range(1000)), 2, num_workers=workers))  # type: ignore[arg-type]
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
    assert Counter(i for mine in got for i in mine) == Counter(range(1000))
    assert all(mine == sorted(mine) for mine in got)


def test_torch_s_threads_are_left_alone_by_loaders_in_samples_and_in_threads() -> None:
    class Nested(Raising):
        def __getitem__(self, index: Any) -> int:
            inner = DataLoader(list(range(4)), 2, num_workers=2)  # type: ignore[arg-type]
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
        batches = list(DataLoader(Nested(), 4, num_workers=2))
        assert torch.cat(batches).tolist() == [7] * 8, "6, and one thread for each worker"
        assert (in_a_new_thread(), torch.get_num_threads()) == (3, 3)
        threads = [
            threading.Thread(
                target=lambda: [
                    list(DataLoader(list(range(4)), 2, num_workers=3))  # type: ignore[arg-type]
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


@pytest.mark.parametrize("name", ["max_errors", "prefetch_batches", "prefetch_factor"])
def test_counts_must_be_integers(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an integer, got nan"):
        iter(DataLoader(list(range(4)), num_workers=2, **{name: float("nan")}))  # type: ignore[arg-type]


def test_an_infinite_timeout_is_none() -> None:
    loader = DataLoader(list(range(4)), 2, num_workers=1, timeout=float("inf"))  # type: ignore[arg-type]
    assert drain(iter(loader)) == [[0, 1], [2, 3]]


class LazyMapping(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise OSError("read only when it is asked for")

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


def loop() -> list[Any]:
    itself: list[Any] = [torch.zeros(3)]
    itself.append(itself)
    return itself


@pytest.mark.parametrize("make", [LazyMapping, loop])
def test_a_batch_that_cannot_be_looked_into_is_delivered(make: Any) -> None:
    def collate(_: list[Any]) -> Any:
        return make()

    dataset: Any = range(4)
    for workers in (0, 2):
        with DataLoader(dataset, 2, collate_fn=collate, num_workers=workers) as loader:
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


class Struck(Dataset[int]):
    """The numbers 0 to 3; a signal strikes at the first read of 2."""

    struck = False

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2 and not self.struck:
            self.struck = True
            signal.raise_signal(signal.SIGUSR1)
        return index


class StruckSampler(Sampler[int]):
    """The numbers 0 to 3; a signal strikes before the first 2."""

    def __init__(self) -> None:
        self.numbers = Struck()

    def __iter__(self) -> Iterator[int]:
        return map(self.numbers.__getitem__, range(4))


@contextmanager
def handler_that_raises(kind: type[BaseException]) -> Iterator[None]:
    def handler(*_: Any) -> None:
        raise kind

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


EXITS = pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])


@EXITS
def test_a_signal_handler_that_exits_reaches_the_loop_out_of_a_sample(
    kind: type[BaseException],
) -> None:
    with handler_that_raises(kind):
        loader = DataLoader(Struck(), None, on_error="skip")
        iterator = iter(loader)
        got = [int(next(iterator)), int(next(iterator))]
        with pytest.raises(kind):
            next(iterator)
        state = loader.state_dict()
        assert state["batches"] == 2
        loader.load_state_dict(state)
        assert [*got, *map(int, loader)] == [0, 1, 2, 3], "the sample is read again"


@EXITS
@WORKERS
def test_a_signal_handler_that_exits_reaches_the_loop_out_of_the_sampler(
    workers: int, kind: type[BaseException]
) -> None:
    dataset: Any = range(4)
    loader = DataLoader(dataset, None, sampler=StruckSampler(), num_workers=workers)
    with loader, handler_that_raises(kind):
        with pytest.raises(kind):
            list(loader)
        assert [*map(int, loader)] == [0, 1, 2, 3]


def test_any_other_error_of_a_signal_handler_is_the_sample_s() -> None:
    with handler_that_raises(TimeoutError):
        iterator = iter(DataLoader(Struck(), None))
        got = [int(next(iterator)), int(next(iterator))]
        with pytest.raises(TimeoutError) as caught:
            next(iterator)
        assert "sample index 2" in caught.value.__notes__[0]
        assert [*got, *map(int, iterator)] == [0, 1, 3]
