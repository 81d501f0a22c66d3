"""Promises:
- A row that `fill_rows` cannot make is read by `__getitem__`: errors, notes, retries and `on_error` are the same.
- Draws from global functions in `fill_rows` are refused, and its errors are named.
- Datasets and tensors that are replaced between batches are noticed.
"""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import covertable
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, get_worker_info
from torch.utils.data import DataLoader as TorchDataLoader

import fastload
from fastload import DataLoader, random_stream, sample_rng
from fastload.rows import Run
from tests.contracts.filled_rows import Keeps, check_outcomes, outcomes
from tests.promises.equal import check_same
from tests.promises.test_filled_rows import Filled

# ---- samples unlike `empty_sample()` ----


ODD: dict[str, Any] = {
    "shape": {"x": torch.zeros(3), "y": 1},
    "array": {"x": np.zeros(2, np.float32), "y": 1},
    "gradient": {"x": torch.zeros(2, requires_grad=True), "y": 1},
    "NumPy's int": {"x": torch.zeros(2), "y": np.int64(1)},
    "bool": {"x": torch.zeros(2), "y": True},
    "beyond 64 bits": {"x": torch.zeros(2), "y": 2**63},
    "least": {"x": torch.zeros(2), "y": -(2**63)},
    "order of keys": {"y": 1, "x": torch.zeros(2)},
    "more keys": {"x": torch.zeros(2), "y": 1, "z": 2},
    "ordered dict": OrderedDict(x=torch.zeros(2), y=1),
    "tuple": (torch.zeros(2), 1),
    "None": None,
}


@pytest.mark.parametrize("kind", ODD)
def test_a_sample_unlike_the_empty_one_is_collated_as_by_torch(kind: str) -> None:
    """Its errors included; first and last in the batch."""
    ordinary = [{"x": torch.full((2,), float(i)), "y": i} for i in range(4)]
    for bad, workers in (({0}, 0), ({3}, 1), ({0, 1, 2, 3}, 0)):
        dataset = Filled([ODD[kind] if i in bad else x for i, x in enumerate(ordinary)], bad)
        dataset.sample = ordinary[0]
        found = outcomes(DataLoader(dataset, 4, num_workers=workers))
        assert dataset.runs
        check_outcomes(found, outcomes(DataLoader(Keeps(dataset), 4)))


@pytest.mark.parametrize("sample", ["text", OrderedDict(a=1), np.float64(1), {"a": (1, "b")}])
def test_samples_that_cannot_be_rows_are_read_one_by_one(sample: Any) -> None:
    dataset = Filled([sample] * 4)
    with warnings.catch_warnings(record=True) as said, DataLoader(dataset, 2) as loader:
        warnings.simplefilter("always")
        check_same(list(loader), list(TorchDataLoader(dataset, 2)))
    assert all("Filled is read sample by sample" in str(w.message) for w in said)
    assert len(said) <= 1
    assert not dataset.runs


def test_an_empty_sample_that_raises_is_warned_of_and_the_batches_are_right() -> None:
    class NoSample(Filled):
        fill_rows = Filled.fill_rows

        def empty_sample(self) -> Any:
            raise KeyError("no sample yet")

    with pytest.warns(RuntimeWarning, match="KeyError"):
        batches = [*DataLoader(NoSample(range(8)), 4)]
    assert torch.equal(torch.cat(batches), torch.arange(8))


class Windows(Filled):
    """Samples of `length` numbers."""

    fastload_per_worker = ("length",)
    length = 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(index, index + self.length)

    def empty_sample(self) -> torch.Tensor:
        return self[0]

    def fill_rows(self, run: Run) -> list[int]:
        for row, index in zip(run.rows, run.indices, strict=True):
            row[:] = self[index]
        return []


def test_what_worker_init_fn_makes_of_the_samples_is_what_comes() -> None:
    def shorten(_: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.length = 1  # type: ignore[attr-defined]

    loader = DataLoader(Windows(range(8)), 4, num_workers=2, worker_init_fn=shorten)
    assert [batch.tolist() for batch in loader] == [[[0], [1], [2], [3]], [[4], [5], [6], [7]]]


# ---- what `fill_rows` returns and raises ----


class Misbehaves(Filled):
    """Writes garbage, and returns or does what `answer` does with the run."""

    def __init__(self, samples: Any, answer: Callable[[Run], Any]) -> None:
        super().__init__(samples)
        self.answer = answer

    def fill_rows(self, run: Run) -> Any:
        run.rows[...] = -99
        return self.answer(run)


def raises(error: BaseException) -> Callable[[Run], Any]:
    def answer(run: Run) -> Any:
        raise error

    return answer


def raises_late(run: Run) -> Iterator[int]:
    yield 0
    raise KeyError("the key that is missing")


BAD_ANSWERS: dict[str, tuple[Callable[[Run], Any], str]] = {
    "None": (lambda run: None, "expected positions in the run"),
    "mask": (lambda run: np.zeros(len(run), bool), "expected positions in the run"),
    "raises": (raises(KeyError("the key that is missing")), "KeyError.*the key that is missing"),
    "raises late": (raises_late, "KeyError.*the key that is missing"),
    "exits": (raises(SystemExit(3)), "SystemExit"),
    "stops": (raises(StopIteration()), "StopIteration"),
    "interrupts": (raises(KeyboardInterrupt()), "KeyboardInterrupt"),
}


@pytest.mark.parametrize(
    ("name", "workers", "parts"), covertable.make([[*BAD_ANSWERS], [0, 2], [1, 2]])
)
def test_fill_rows_that_fails_is_named_once_and_the_batches_are_right(
    name: str, workers: int, parts: int, cut: Callable[[int], None]
) -> None:
    answer, said = BAD_ANSWERS[name]
    cut(3)
    dataset: Any = Misbehaves(range(20), answer)
    if parts > 1:
        dataset = ConcatDataset([dataset, Misbehaves(range(20, 30), answer)])
    with DataLoader(dataset, 5, num_workers=workers) as loader:
        if workers == 0 and name in ("exits", "interrupts"):  # as of a signal handler
            with pytest.raises((SystemExit, KeyboardInterrupt)):
                next(iter(loader))
            return
        with pytest.warns(RuntimeWarning, match=rf"{type(dataset).__name__}.*{said}") as warned:
            epochs = [torch.cat([*loader]).tolist() for _ in range(2)]
    assert epochs == [[*range(len(dataset))]] * 2
    assert [w.filename for w in warned] == [__file__]


DRAWS: dict[str, Callable[[], Any]] = {
    "torch.rand": lambda: torch.rand(1),
    "random.shuffle": lambda: random.shuffle([1, 2, 3]),
    "np.random.permutation": lambda: np.random.permutation(4),
    "sample_rng": lambda: sample_rng().random(),
    "sample_generator": lambda: torch.rand(1, generator=fastload.sample_generator()),
}


class Draws(Filled):
    """Draws for every sample: in `fill_rows`, where it should not, and in `__getitem__`."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__([0.0] * 12)
        self.draw = draw

    def __getitem__(self, index: Any) -> Any:
        self.draw()
        return float(torch.rand(())) + np.random.rand() + random.random()

    def fill_rows(self, run: Run) -> Any:
        self.draw()
        run.rows[:] = 7
        return ()


@pytest.mark.parametrize("name", DRAWS)
def test_global_random_functions_raise_in_fill_rows(name: str, cut: Callable[[int], None]) -> None:
    """And so the batches are what the samples alone draw."""
    expected = []
    for index in range(12):
        with random_stream(seed=3, epoch=0, position=index, index=index):
            expected.append(Draws(DRAWS[name])[index])
    for workers, units in ((0, 100), (1, 1), (2, 4)):
        cut(units)
        loader = DataLoader(Draws(DRAWS[name]), 4, num_workers=workers, seed=3)
        with loader, pytest.warns(RuntimeWarning, match=r"fill_rows.*RuntimeError.*run\.keys"):
            assert torch.cat(list(loader)).tolist() == expected


# ---- what is replaced between batches ----


@pytest.mark.parametrize("kind", ["tensors", "subset", "part"])
def test_tensors_and_datasets_that_are_replaced_are_seen_at_once(kind: str) -> None:
    zeros, ones = (TensorDataset(torch.full((8,), float(value))) for value in (0, 1))
    dataset: Any = {
        "tensors": zeros,
        "subset": Subset(zeros, range(8)),
        "part": ConcatDataset([TensorDataset(torch.zeros(4)), zeros]),
    }[kind]
    batches = iter(DataLoader(dataset, batch_size=4))
    next(batches)
    if kind == "tensors":
        dataset.tensors = ones.tensors
    elif kind == "subset":
        dataset.dataset = ones
    else:
        dataset.datasets[1] = ones
    (second,) = next(batches)
    assert second.tolist() == [1] * 4
