"""Promises:
- An exception or an index that cannot be printed, or a dataset that fails to name a file, is still one error in its
  place.
- Several threads may share one iterator.
- An odd argument, such as a count that is no integer, is refused.
- KeyboardInterrupt and SystemExit reach the loop from a signal handler, from the sampler and from a sample without
  workers.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils.data import Sampler

from fastload import DataLoader
from tests.fakes import Numbers
from tests.promises.reading import drain

WORKERS = pytest.mark.parametrize("workers", [0, 2])


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Raising(Numbers):
    """The numbers 0 to 7; of index 3 an exception."""

    def __init__(self, kind: type[BaseException] = OSError) -> None:
        super().__init__(8)
        self.kind = kind

    def __getitem__(self, index: Any) -> int:
        if int(index) == 3:
            raise self.kind()
        return int(index)


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
def test_a_dataset_that_cannot_say_which_file(workers: int) -> None:
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


@pytest.mark.parametrize("name", ["max_errors", "prefetch_batches", "prefetch_factor"])
def test_counts_must_be_integers(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an integer, got nan"):
        iter(DataLoader(list(range(4)), num_workers=2, **{name: float("nan")}))  # type: ignore[arg-type]


class Struck(Numbers):
    """Its own indices; a signal strikes at the first read of 2."""

    struck = False

    def __getitem__(self, index: int) -> int:
        if index == 2 and not self.struck:
            self.struck = True
            signal.raise_signal(signal.SIGUSR1)
        return index


class StruckSampler(Sampler[int]):
    """The numbers 0 to 3; a signal strikes before the first 2."""

    def __init__(self) -> None:
        self.numbers = Struck(4)

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
        loader = DataLoader(Struck(4), None, on_error="skip")
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
