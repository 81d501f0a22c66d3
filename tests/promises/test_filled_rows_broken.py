"""Promises:
- Kernels write only into rows that fit the plan, and read no pixel that was not decoded.
- Datasets and tensors that are replaced between batches are noticed.
- Ctrl-C without workers leaves no random stream open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, get_worker_info

from fastload import DataLoader
from fastload.engine import iterator
from fastload.memory.collate import SlotBuilder
from fastload.random import python_random
from fastload.random import streams as randomness
from fastload.random.streams import current_stream
from fastload.reading.rows import positions
from fastload.rows import Run
from tests.children import run_python


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


@pytest.mark.parametrize(
    "change", [(slice(None), slice(2)), (slice(None), None)], ids=["fewer", "more axes"]
)
def test_tensors_that_change_their_shape_are_read_as_by_torch(change: Any) -> None:
    tensors = [torch.arange(32.0).reshape(8, 4), torch.arange(32.0, 64.0).reshape(8, 4)]
    dataset = ConcatDataset([TensorDataset(tensor) for tensor in tensors])
    batches = iter(DataLoader(dataset, batch_size=16))
    for tensor in tensors:
        tensor.set_(tensor[change].clone())  # type: ignore[no-untyped-call]
    (batch,) = next(batches)
    assert torch.equal(batch, torch.cat(tensors))


class Windows(Dataset[Any]):
    """Samples of `length` numbers."""

    length = 4

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(index, index + self.length)

    def empty_sample(self) -> torch.Tensor:
        return torch.empty(self.length, dtype=torch.int64)

    def fill_rows(self, run: Run) -> list[int]:
        for row, index in zip(run.rows, run.indices, strict=True):
            row[:] = self[index]
        return []


def test_what_worker_init_fn_makes_of_the_samples_is_what_comes() -> None:
    def shorten(_: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.length = 1  # type: ignore[attr-defined]

    loader = DataLoader(Windows(), batch_size=4, num_workers=2, worker_init_fn=shorten)
    assert [batch.tolist() for batch in loader] == [[[0], [1], [2], [3]], [[4], [5], [6], [7]]]


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_for_which_there_is_no_memory_are_read_one_by_one(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, failures = SlotBuilder.rows, [MemoryError("no room")]

    def fails(builder: SlotBuilder, start: int, stop: int) -> Any:
        if failures:
            raise failures.pop()
        return rows(builder, start, stop)

    monkeypatch.setattr(SlotBuilder, "rows", fails)
    with DataLoader(Windows(), batch_size=4, num_workers=workers) as loader:
        assert torch.equal(torch.cat([*loader]), torch.stack([Windows()[k] for k in range(8)]))
    assert not failures


class NoSample(Windows):
    fill_rows = Windows.fill_rows

    def empty_sample(self) -> torch.Tensor:
        raise KeyError("no sample yet")


def test_an_empty_sample_that_raises_is_warned_of_and_the_batches_are_right() -> None:
    with pytest.warns(RuntimeWarning, match="KeyError"):
        batches = [*DataLoader(NoSample(), batch_size=4)]
    assert torch.equal(torch.cat(batches), torch.stack([Windows()[k] for k in range(8)]))


def test_a_generator_s_own_error_is_not_taken_for_a_wrong_answer() -> None:
    def lazily() -> Iterator[int]:
        yield 1
        raise TypeError("of the user's")

    with pytest.raises(TypeError, match="of the user's"):
        positions(lazily(), 3)


def test_a_stream_that_ctrl_c_left_half_way_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strike is after the first step of going back to no stream: the rest must still be done."""
    enter, entered = randomness.torch_random.enter, []

    def struck(stream: Any) -> None:
        enter(stream)
        entered.append(stream)
        if len(entered) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(randomness.torch_random, "enter", struck)
    batches = iter(DataLoader(Windows(), seed=1, collate_fn=torch.stack))
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert current_stream() is None
    assert python_random._thread.own is None


class Wrong(Windows):
    """Returns a position that is none."""

    def fill_rows(self, run: Run) -> list[int]:
        run.rows.fill_(99)
        return [-1]


def test_a_part_that_returns_no_position_is_named() -> None:
    loader = DataLoader(ConcatDataset([Wrong(), Wrong()]), batch_size=4, sampler=[0, 8, 1, 9])
    with pytest.warns(RuntimeWarning, match="positions in the run"):
        (batch,) = loader
    assert batch[:, 0].tolist() == [0, 0, 1, 1]


def test_ctrl_c_as_a_stream_is_left_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = iterator.entered

    @contextmanager
    def struck(stream: Any) -> Iterator[None]:
        inner = entered(stream)
        inner.__enter__()
        yield
        raise KeyboardInterrupt  # before anything was put back

    monkeypatch.setattr(iterator, "entered", struck)
    batches = iter(DataLoader(Windows(), seed=1, collate_fn=torch.stack))
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert current_stream() is None
    torch.manual_seed(5)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.rand(1), expected)


def test_ctrl_c_while_torch_s_operators_are_registered_leaves_the_next_attempt_free() -> None:
    script = """
import torch
from fastload._kit import torch_private
from fastload.random import torch_random
library, calls = torch.library.Library, []
class Struck(library):
    def impl(self, *args, **options):
        calls.append(args)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return super().impl(*args, **options)
torch_private._Library = Struck
try:
    torch_random.install()
except KeyboardInterrupt as error:
    kept = error
torch_random.install()
print(len(calls) > 20, torch_random.unusable())
"""
    run = run_python("-c", script, check=True)
    assert run.stdout == "True None\n", run.stdout + run.stderr
