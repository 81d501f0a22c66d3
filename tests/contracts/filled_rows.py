"""What every dataset with `fill_rows` promises, torch's `TensorDataset` included. A dataset joins by a class
`TestRows(FilledRows)` with a fixture `source`, which opens it.

- Batches are those of the samples that `__getitem__` returns, in their random streams: for any number of workers, any
  cut of a batch into runs, either layout of memory, inside `Subset` and `ConcatDataset`, and after a resume.
- A sample that does not exist, in the middle of a run, is the error of the sample alone, with its notes, and can be
  skipped or replaced. A transient error is tried again. The other samples of the run lose nothing.
- A batch that the loop keeps is never written again.
"""

from __future__ import annotations

import copy
import errno
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

import fastload.reading.failures
import fastload.reading.fetch
import fastload.reading.filling
import fastload.reading.rows
from fastload import DataLoader, random_stream
from fastload._kit.nested import map_leaves
from fastload.errors import TooManyErrorsError
from fastload.memory.layout import Layout
from fastload.reading.runs import RunLength
from fastload.rows import Run
from tests.promises.equal import check_same
from tests.resuming import resumes_twice

SEED, BATCH = 3, 5
NOWHERE = 10**6  # an index that no dataset here has
LAST = torch.channels_last
Source = Callable[[], Any]


class Keeps(Dataset[Any]):
    """A wrapper of a dataset, as users write them: caches, delegates other attributes, and reads sample by sample."""

    fastload_per_worker = ()  # one cache for all workers

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.kept: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "__getitems__":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if index not in self.kept:
            self.kept[index] = self.dataset[index]
        return self.kept[index]


def outcomes(loader: Any, limit: int = 50) -> list[Any]:
    """Return what `next()` gives, to the end: batches, and errors as type, text, notes."""
    seen: list[Any] = []
    with loader:
        iterator = iter(loader)
        while len(seen) < limit:
            try:
                seen.append(next(iterator))
            except StopIteration:
                break
            except TooManyErrorsError as error:
                seen.append((type(error).__name__, str(error)))
                break
            except Exception as error:
                seen.append(
                    (type(error).__name__, str(error), list(getattr(error, "__notes__", ())))
                )
    return seen


def check_outcomes(found: list[Any], expected: list[Any]) -> None:
    """Check that the batches are the same, and the errors too."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, tuple):
            assert one == other
        else:
            check_same(one, other)


def alone(
    dataset: Any, order: Any, *, epoch: int = 0, batch: int = BATCH, within: Any = None
) -> list[Any]:
    """Return the batches of the samples that are read one by one, in their random streams.

    `within` is the dataset that `dataset` wraps, which may hold the samples of one rank.
    """
    samples, leaf = [], within or dataset
    rank, ranks = getattr(leaf, "rank", 0), getattr(leaf, "world_size", 1)
    for place, index in enumerate(order):
        position = place * ranks + rank
        with random_stream(seed=SEED, epoch=epoch, position=position, index=index):
            samples.append(dataset[index])
    return [default_collate(samples[k : k + batch]) for k in range(0, len(samples), batch)]


def lying(batches: list[Any], memory: torch.memory_format) -> list[Any]:
    """Return the batches with their images in a memory format."""

    def lies(leaf: Any) -> Any:
        return torch.empty_like(leaf, memory_format=memory).copy_(leaf) if leaf.dim() == 4 else leaf

    return [map_leaves(batch, lies) for batch in batches]


def cut_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the number of samples in every run, whatever their cost."""

    def runs_of(units: int) -> None:
        monkeypatch.setattr(
            RunLength, "of", lambda length, of_ticket: max(1, min(units, of_ticket))
        )

    return runs_of


class Fills(list[list[Any]]):
    """The indices that each call has filled. So no test passes because nothing was filled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.left_out: set[Any] = set()  # read by `__getitem__`, as if they could not be filled
        self._find = fastload.reading.rows.find_filler
        for user in (fastload.reading.fetch, fastload.reading.filling):
            monkeypatch.setattr(user, "find_filler", self._spied)

    def _spied(self, dataset: Any, notices: Any) -> Any:
        found = self._find(dataset, notices)
        if found is not None:
            fill = found.fill

            def noted(run: Run) -> Any:
                out = {k for k, index in enumerate(run.indices) if index in self.left_out}
                missing = {*fill(run)} | out
                self.append([i for k, i in enumerate(run.indices) if k not in missing])
                return missing

            found.fill = noted
        return found

    def taken(self) -> list[Any]:
        """Return the indices that were filled since the last call."""
        found = sorted(index for run in self for index in run)
        self.clear()
        return found


class FilledRows:
    """The cases. The fixture `source` of a subclass opens the dataset: 6 to 100 samples, of which no two are alike."""

    @pytest.fixture
    def fills(self, monkeypatch: pytest.MonkeyPatch) -> Fills:
        return Fills(monkeypatch)

    @pytest.mark.parametrize("workers", [0, 1, 8])
    def test_batches_are_those_of_the_samples(
        self, source: Source, workers: int, fills: Fills, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dataset = source()
        cut = cut_runs(monkeypatch)
        order = torch.randperm(len(dataset)).tolist()
        expected = alone(dataset, order)
        options: dict[str, Any] = {"sampler": order, "seed": SEED, "num_workers": workers}
        for units, memory in ((2, torch.contiguous_format), (100, LAST)):
            cut(units)
            with DataLoader(dataset, BATCH, memory_format=memory, **options) as loader:
                check_same(list(loader), lying(expected, memory))
            assert fills.taken() == sorted(order)

    def test_an_empty_sample_is_like_a_sample(self, source: Source) -> None:
        dataset = source()
        found = fastload.reading.rows.filler(dataset)
        assert found is not None
        assert Layout(found.sample, filled=True).fits(dataset[0])

    @pytest.mark.parametrize("workers", [0, 2])
    def test_subsets_and_concatenations(self, source: Source, workers: int, fills: Fills) -> None:
        dataset = source()
        part = Subset(Subset(dataset, range(1, len(dataset))), [4, 0, 3, 3, 2, 1])
        for whole in (part, ConcatDataset([dataset, part, Subset(dataset, [])])):
            order = torch.randperm(len(whole)).tolist()
            given: dict[str, Any] = {"batch_size": len(order), "sampler": order, "seed": SEED}
            with DataLoader(whole, num_workers=workers, **given) as loader:
                check_same(list(loader), alone(whole, order, batch=len(order), within=dataset))
            # The kernels leave about one draw in a thousand to torch.
            assert len(fills.taken()) >= len(order) - 1

    def test_a_resumed_epoch(self, source: Source, fills: Fills) -> None:
        dataset = source()
        options: dict[str, Any] = {"seed": SEED, "shuffle": True, "num_workers": 2}
        with DataLoader(dataset, BATCH, **options) as loader:
            pairs = [(batch, loader.state_dict()) for batch in loader]
        with DataLoader(dataset, BATCH, **options) as loader:
            loader.load_state_dict(json.loads(json.dumps(pairs[0][1])))
            check_same(list(loader), [batch for batch, _ in pairs[1:]])
        assert fills
        resumes_twice(lambda: DataLoader(dataset, 1, **options))

    @pytest.mark.parametrize("workers", [0, 2])
    def test_samples_that_are_left_out_are_read_alone(
        self, source: Source, workers: int, fills: Fills
    ) -> None:
        dataset = source()
        order = range(len(dataset))
        fills.left_out = {1, 3, 4, 5}
        with DataLoader(dataset, BATCH, seed=SEED, num_workers=workers) as loader:
            check_same(list(loader), alone(dataset, order))
        assert fills.taken() == sorted({*order} - fills.left_out)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_sample_that_does_not_exist(self, source: Source, workers: int, fills: Fills) -> None:
        dataset = source()
        black = map_leaves(dataset[0], copy.copy)
        options: dict[str, Any] = {"num_workers": workers, "seed": SEED}
        options["batch_sampler"] = [[1, 0], [2, NOWHERE, 3], [NOWHERE, 4, NOWHERE + 1], [5]]
        for how in ({}, {"on_error": "skip"}, {"on_error": lambda index, error: black}):
            found = outcomes(DataLoader(dataset, **options, **how))
            assert {*fills.taken()} >= {0, 1, 5}
            check_outcomes(found, outcomes(DataLoader(Keeps(dataset), **options, **how)))

    def test_a_transient_error_is_tried_again(
        self, source: Source, fills: Fills, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dataset = source()
        monkeypatch.setattr(fastload.reading.failures, "RETRY_SECONDS", 0.001)
        expected, fills.left_out, failures = alone(dataset, range(len(dataset))), {4}, [2]
        kind = next(base for base in type(dataset).__mro__ if "__getitem__" in vars(base))
        read = kind.__getitem__

        def flaky(self: Any, index: int) -> Any:
            if index == 4 and failures[0]:
                failures[0] -= 1
                raise OSError(errno.EIO, "flaky")
            return read(self, index)

        flaky.__module__ = kind.__module__  # one of the user's would be called for each sample
        monkeypatch.setattr(kind, "__getitem__", flaky)
        with DataLoader(dataset, BATCH, seed=SEED, num_workers=2, retries=2) as loader:
            check_same(list(loader), expected)
            assert loader.stats().retries == 2
        assert fills.taken() == sorted({*range(len(dataset))} - {4})

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_batch_that_is_kept_is_never_written_again(
        self, source: Source, workers: int, fills: Fills
    ) -> None:
        """Half of the batches are kept, by views of their last rows. Two samples of an epoch are read alone."""
        dataset = source()
        fills.left_out, kept = {1, 3}, []
        with DataLoader(dataset, BATCH, num_workers=workers, shuffle=True) as loader:
            for _ in range(4):
                for number, batch in enumerate(loader):
                    if number % 2 == 0:
                        last = map_leaves(batch, lambda leaf: leaf[-1:])
                        kept.append((last, copy.deepcopy(last)))
                    del batch
        del loader
        for last, before in kept:
            check_same(last, before)
