"""Promises:
- A stall loses no sample and delivers none twice. A retry that waits ends with its epoch.
- An iterator that its own sampler or dataset asks for a batch raises, and never waits for itself.
- The number of batches in flight stays within the documented formula, in order and out of order, also while the loop
  pauses.

A reader may stall, and the loop may pause, for any time. At most `depth` batches are in flight: `prefetch_batches`,
or `prefetch_factor * num_workers`, or by default `2 + ceil(num_workers / batch_size)`, or `2 + num_workers` if a
batch is one unit of work.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from math import ceil
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import Sampler

from fastload import DataLoader
from tests.fakes import Numbers
from tests.promises.reading import Watched, in_batches

GRACE_S = 0.03  # what a loader that reads too much is given to do so


class Gate(Watched):
    """`bound(position)` says whether that sample may be read yet; `broken` holds those that may not."""

    fastload_per_worker = ()

    def __init__(self, length: int, stalled: tuple[int, ...] = ()) -> None:
        super().__init__(length, stalled)
        self.bound: Callable[[int], bool] = lambda _: True
        self.broken: list[int] = []

    def __getitem__(self, index: int) -> int:
        if not self.bound(index):
            self.broken.append(index)
        return int(super().__getitem__(index))


class Gathered(Gate):
    """A batch in one call."""

    fastload_per_worker = ()

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


def in_background(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


# A reader that stalls.


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    ("stalled", "workers", "batch_size"), [(0, 2, 4), (1, 8, 4), (57, 3, 16), (199, 3, 4)]
)
def test_while_one_reader_stalls_the_others_fill_the_window(
    stalled: int, workers: int, batch_size: int, in_order: bool
) -> None:
    """The stall ends only when all other batches that may be in flight have been read."""
    dataset = Gate(200, (stalled,))
    loader = DataLoader(
        dataset, batch_size, num_workers=workers, prefetch_batches=4, in_order=in_order
    )
    whole = in_batches(range(200), batch_size)
    place = stalled // batch_size
    others = {index for batch in whole[place + 1 : place + 4] for index in batch}

    def end_the_stall() -> None:
        dataset.wait_for_reads(others | {stalled})
        dataset.release()

    thread = in_background(end_the_stall)
    got = [batch.tolist() for batch in loader]
    thread.join()
    assert (got if in_order else sorted(got)) == whole
    assert Counter(dataset.reads) == Counter(range(200)), "nothing is read twice"


# A loop that pauses.


def check_pauses(loader: DataLoader[Any], dataset: Gate, batch_size: int, depth: int) -> None:
    """Pause after some batches: exactly `depth` batches more are read, and not a sample beyond."""
    whole = in_batches(range(dataset.length), batch_size)
    asked = 0
    dataset.bound = lambda index: index // batch_size < asked + depth
    iterator = iter(loader)
    for taken in range(len(whole)):
        if taken in (0, 1, 2, 3, 7, len(whole) - 2):
            limit = min((taken + depth) * batch_size, dataset.length)
            dataset.wait_for_reads(set(range(limit)))
            time.sleep(GRACE_S)
            assert len(dataset.reads) == limit
        asked = taken + 1
        assert torch.as_tensor(next(iterator)).reshape(-1).tolist() == whole[taken]
    assert next(iterator, None) is None
    assert not dataset.broken, "read ahead of the bound"
    assert Counter(dataset.reads) == Counter(range(dataset.length))


WINDOWS: dict[str, tuple[dict[str, Any], Callable[[int, int], int]]] = {
    "by default": ({}, lambda workers, batch_size: 2 + ceil(workers / batch_size)),
    "prefetch_batches=1": ({"prefetch_batches": 1}, lambda workers, batch_size: 1),
    "prefetch_factor=3": ({"prefetch_factor": 3}, lambda workers, batch_size: 3 * workers),
    "both": ({"prefetch_factor": 3, "prefetch_batches": 2}, lambda workers, batch_size: 2),
    "collate_fn": ({"collate_fn": list}, lambda workers, batch_size: 2 + workers),
}


@pytest.mark.parametrize(("workers", "batch_size"), [(1, 1), (5, 3), (2, 16)])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_pause_holds_what_the_formula_says(name: str, batch_size: int, workers: int) -> None:
    options, formula = WINDOWS[name]
    dataset = Gate(16 * batch_size + batch_size // 2)
    loader = DataLoader(dataset, batch_size, num_workers=workers, **options)
    depth = formula(workers, batch_size)
    check_pauses(loader, dataset, batch_size, depth)
    assert loader.stats().depth == depth


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("batch_size", [5, None])
def test_a_pause_where_a_batch_is_one_call(batch_size: int | None, workers: int) -> None:
    dataset = Gathered(40)
    loader = DataLoader(dataset, batch_size, num_workers=workers)
    check_pauses(loader, dataset, batch_size or 1, 2 + workers)
    assert loader.stats().depth == 2 + workers


def test_without_workers_nothing_is_read_ahead() -> None:
    dataset = Gate(100)
    iterator = iter(DataLoader(dataset, 5))
    assert dataset.reads == []
    for taken, batch in enumerate(iterator, start=1):
        assert len(dataset.reads) == len(batch) * taken


def test_without_order_the_bound_counts_from_the_oldest_batch() -> None:
    dataset = Gate(200, (23,))  # of batch 2
    loader = DataLoader(dataset, 10, num_workers=2, in_order=False, prefetch_batches=6)
    iterator = iter(loader)
    early = sorted(next(iterator).tolist() for _ in range(7))
    assert early == [b for place, b in enumerate(in_batches(range(200), 10)[:8]) if place != 2]
    time.sleep(GRACE_S)
    assert set(dataset.reads) <= set(range(80)), "batch 2 holds back batch 8"
    dataset.release()
    assert sorted(early + [batch.tolist() for batch in iterator]) == in_batches(range(200), 10)


# What would wait for itself, or for nothing.


def test_a_retry_that_waits_is_given_up_with_its_epoch() -> None:
    """Forced: the epoch is broken off while its sample waits to be read again; the next one needs the same worker."""

    class Unsteady(Numbers):
        def __init__(self) -> None:
            super().__init__(4)
            self.raised = threading.Event()

        def __getitem__(self, index: int) -> Any:
            if not self.raised.is_set():
                self.raised.set()
                raise OSError(errno.EIO, "a file system that is away for a moment")
            return super().__getitem__(index)

    dataset = Unsteady()
    options = {"num_workers": 1, "retries": 9, "persistent_workers": True}
    with (
        mock.patch("fastload.reading.failures.RETRY_SECONDS", 300.0),
        DataLoader(dataset, 2, **options) as loader,
    ):
        iter(loader)
        assert dataset.raised.wait(30)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_asks_its_own_iterator_gets_an_error(workers: int) -> None:
    iterator: Any = None

    def indices() -> Iterator[int]:
        yield 0
        yield 1
        next(iterator)

    class Asking(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return indices()

    options = {"num_workers": workers, "prefetch_batches": 1 if workers else None}
    with DataLoader(Numbers(9), None, sampler=Asking(), **options) as loader:
        iterator = iter(loader)
        assert [int(next(iterator)), int(next(iterator))] == [0, 1]
        with pytest.raises(RuntimeError, match="by its own sampler"):
            next(iterator)


def test_a_sample_that_asks_its_own_iterator_gets_an_error() -> None:
    iterator: Any = None

    class Asking(Numbers):
        def __getitem__(self, index: int) -> Any:
            return next(iterator)

    iterator = iter(DataLoader(Asking(2), 1))
    with pytest.raises(RuntimeError, match="by its own sampler, dataset or callback"):
        next(iterator)
