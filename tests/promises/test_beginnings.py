"""Promises:
- An epoch that cannot begin is still the next one, with the state that was loaded.
- A state is for the next iterator, and never for one that exists.
- Persistent workers keep the settings that they were started with.
- Subclasses that wrap or call `_get_iterator()` have the same epochs.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from fastload import DataLoader
from tests.fakes import Numbers

IN_PAIRS = [[k, k + 1] for k in range(0, 12, 2)]
SHUFFLED: dict[str, Any] = {"batch_size": 2, "shuffle": True, "seed": 1}


class Parts(IterableDataset[int]):
    """A part for each worker."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(12) if info is None else range(info.id, 12, info.num_workers)


class FailsOnce:
    """A `worker_init_fn`, or a sampler, whose first call raises `error`."""

    fastload_per_worker = ()  # one for all: it fails once

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error

    def __call__(self, worker: int) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error

    def __iter__(self) -> Iterator[int]:
        self(0)
        return iter(range(12))

    def __len__(self) -> int:
        return 12


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def delivered(loader: DataLoader[Any], count: int) -> dict[str, Any]:
    """Return the state after `count` batches."""
    iterator = iter(loader)
    for _ in range(count):
        next(iterator)
    state = loader.state_dict()
    loader.close()
    return state


@pytest.fixture(autouse=True)
def _no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ---- what cannot begin ----


def prefetches_nothing() -> tuple[DataLoader[Any], Callable[[], None]]:
    loader = DataLoader(Numbers(12), num_workers=2, prefetch_factor=0, **SHUFFLED)
    return loader, lambda: setattr(loader, "prefetch_factor", 2)


def fails_in_a_worker() -> tuple[DataLoader[Any], Callable[[], None]]:
    fails = FailsOnce(OSError("no such GPU"))
    return DataLoader(Numbers(12), num_workers=2, worker_init_fn=fails, **SHUFFLED), lambda: None


def fails_in_the_sampler() -> tuple[DataLoader[Any], Callable[[], None]]:
    return DataLoader(Numbers(12), 2, sampler=FailsOnce(OSError("network"))), lambda: None


def is_interrupted() -> tuple[DataLoader[Any], Callable[[], None]]:
    return DataLoader(Numbers(12), 2, sampler=FailsOnce(KeyboardInterrupt())), lambda: None


KINDS = [prefetches_nothing, fails_in_a_worker, fails_in_the_sampler, is_interrupted]


CASES = [(kind, True) for kind in KINDS] + [(kind, False) for kind in KINDS[:2]]
"""A sampler that is not run again is asked by `next()`, in torch too."""


@pytest.mark.parametrize(("kind", "resumed"), CASES)
def test_an_epoch_that_cannot_begin_is_still_the_next(kind: Any, resumed: bool) -> None:
    plain, mend = kind()
    mend()
    for part in (plain.sampler, plain.worker_init_fn):
        if isinstance(part, FailsOnce):
            part.error = None
    expected = batches(plain)
    plain.set_epoch(0)
    state = delivered(plain, 2)

    loader, mend = kind()
    if resumed:
        loader.load_state_dict(state)
    before = loader.state_dict()
    with pytest.raises((ValueError, OSError, KeyboardInterrupt)):
        iter(loader)
    assert loader.state_dict() == before
    mend()
    assert batches(loader) == expected[2 if resumed else 0 :]
    assert loader.state_dict()["epoch"] == 0


# ---- beside an iterator that has given nothing ----


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_state_is_for_the_next_iterator_and_not_for_one_that_is_there(
    epoch: int, persistent: bool
) -> None:
    def made() -> DataLoader[Any]:
        return DataLoader(Numbers(12), num_workers=2, persistent_workers=persistent, **SHUFFLED)

    other = made()
    epochs = [batches(other) for _ in range(2)]
    other.set_epoch(epoch)
    state = delivered(other, 2)
    loader = made()
    iterator = iter(loader)
    loader.load_state_dict(state)
    assert batches(iterator) == epochs[0]
    assert batches(loader) == epochs[epoch][2:]
    loader.close()


# ---- persistent workers ----


@pytest.mark.parametrize(("first", "then"), [(2, 4), (4, 2), (2, 0), (1, 2)])
@pytest.mark.parametrize("dataset", [Parts, lambda: Numbers(12)], ids=["parts", "numbers"])
def test_another_number_of_workers_loses_nothing(
    dataset: Callable[[], Any], first: int, then: int
) -> None:
    """As in torch: workers that persist are as many as were started, unless there are to be none."""
    loader = DataLoader(dataset(), 2, num_workers=first, persistent_workers=True)
    assert sorted(chain(*batches(loader))) == list(range(12))
    loader.num_workers = then
    for _ in range(2):
        assert sorted(chain(*batches(loader))) == list(range(12))
    loader.close()


class Held(Numbers):
    """The last sample waits until another epoch would have been under way, were it not forbidden."""

    fastload_per_worker = ()

    def __init__(self) -> None:
        super().__init__(12)
        self.gate = threading.Event()

    def __getitem__(self, index: int) -> int:
        if index == 11:
            assert self.gate.wait(30)
        return index


def test_another_order_of_delivery_mixes_no_epochs() -> None:
    dataset = Held()
    loader = DataLoader(
        dataset, 2, num_workers=3, persistent_workers=True, in_order=False, prefetch_batches=8
    )
    dataset.gate.set()
    assert sorted(batches(loader)) == IN_PAIRS
    loader.in_order = True
    for _ in range(3):
        dataset.gate.clear()
        iterator = iter(loader)
        first = [next(iterator).tolist() for _ in range(5)]
        dataset.gate.set()
        assert sorted(first + batches(iterator)) == IN_PAIRS
        assert loader.state_dict()["batches"] == 6
    loader.close()


def test_the_loop_s_own_arguments_follow_the_loader_and_all_are_checked_at_iter() -> None:
    told: list[int] = []
    loader = DataLoader(Numbers(12), 2, num_workers=2, persistent_workers=True)
    batches(loader)
    loader.on_stats = lambda stats: told.append(stats.epoch)
    batches(loader)
    assert told == [1]
    fresh = [DataLoader(Numbers(12), 2, num_workers=2) for _ in range(3)]
    wrong = [("max_errors", -1), ("max_errors", -5), ("prefetch_batches", 0), ("on_error", "no")]
    for one, (name, value) in zip([loader, *fresh], wrong, strict=True):
        setattr(one, name, value)
        with pytest.raises(ValueError, match=name):
            iter(one)
    loader.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_a_state_of_an_ended_epoch_goes_on_as_if_never_stopped(persistent: bool) -> None:
    """With torch's generator: workers that persist draw their seed once."""

    def made() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        how: dict[str, Any] = {"shuffle": True, "generator": generator, "num_workers": 2}
        return DataLoader(Numbers(12), 5, persistent_workers=persistent, **how)

    whole = made()
    expected = [batches(whole) for _ in range(3)]
    stopped, resumed = made(), made()
    batches(stopped)
    resumed.load_state_dict(stopped.state_dict())
    assert [batches(resumed), batches(resumed)] == expected[1:]
    for loader in (whole, stopped, resumed):
        loader.close()


# ---- subclasses ----


class Wrapper:
    """Gives what the iterator gives, and has what it has."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> Wrapper:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterator, name)


class Wrapping(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return Wrapper(super()._get_iterator())


class Short(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        return self._get_iterator()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Wrapping, Short])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_subclass_with_an_iterator_of_its_own_has_the_same_epochs(
    kind: type[DataLoader[Any]], workers: int, persistent: bool
) -> None:
    if kind is Short:
        persistent = False  # it starts new workers for each epoch, in torch too
    how: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent, **SHUFFLED}
    plain = DataLoader(Numbers(12), **how)
    expected = [batches(plain) for _ in range(3)]
    loader = kind(Numbers(12), **how)
    assert [batches(loader) for _ in range(3)] == expected
    plain.set_epoch(1)
    loader.load_state_dict(delivered(plain, 2))
    assert batches(loader) == expected[1][2:]
    for one in (plain, loader):
        one.close()
