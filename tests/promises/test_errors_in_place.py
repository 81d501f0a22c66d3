"""Promise: an error arrives in its place, and the epoch goes on after it.

The loop gets every batch before it, then the exception itself, with the worker's traceback and a
note that names index, stage and, where known, file, then every batch after it. Never a hang, never
a silently short epoch.
"""

from __future__ import annotations

import errno
import logging
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Sampler, Subset, TensorDataset

import fastload
import fastload.iterator
from fastload import workers as workers_module
from fastload.errors import EmptyBatchError, TooManyErrorsError, WorkerCrashError
from fastload.fetch import Fetcher, SampleFetcher
from fastload.testing import FailingDataset
from fastload.window import Window

WORKERS = [0, 1, 4]
DEADLINE_S = 30.0  # only a deadlock waits that long


class Unreadable(Exception):
    """An exception that cannot be rebuilt from its text, unlike those that torch re-raises."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"sample {index}: {reason}")
        self.index = index


class Bad(Dataset[int]):
    """`length` samples, each its own index; reading one of `bad` raises what `bad` makes of it."""

    fastload_per_worker = ()  # one for all workers, to be looked at and changed

    def __init__(self, length: int, bad: Mapping[int, Callable[[int], BaseException]]) -> None:
        self.length = length
        self.bad = bad
        self.raised: dict[int, BaseException] = {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            self.raised[index] = self.bad[index](index)
            raise self.raised[index]
        return index


class Located(Bad):
    """Samples that lie in files."""

    def locate(self, index: int) -> str:
        return f"shelf/{index:05}.jpg"


class Gathered(Bad):
    """A batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


def unreadable(*indices: int) -> dict[int, Callable[[int], BaseException]]:
    return {index: lambda index: Unreadable(index, "torn") for index in indices}


def drain(loader: fastload.DataLoader[Any], iterator: Iterator[Any] | None = None) -> list[Any]:
    """Return what each `next()` of one epoch gave, batches as lists, exceptions as they are."""
    iterator = iter(loader) if iterator is None else iterator
    outcomes: list[Any] = []
    while len(outcomes) < 10_000:
        try:
            batch = next(iterator)
        except StopIteration:
            return outcomes
        except (KeyboardInterrupt, SystemExit, Exception) as error:
            outcomes.append(error)
        else:
            outcomes.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
    raise AssertionError("the epoch does not end")


def batches(length: int, batch_size: int) -> list[Any]:
    order = list(range(length))
    return [order[i : i + batch_size] for i in range(0, length, batch_size)]


def note(error: BaseException) -> str:
    """Return the one note that fastload left."""
    notes = [text for text in getattr(error, "__notes__", []) if "fastload" in text]
    notes = [text for text in notes if "may come of sharing" not in text]  # with copy_dataset=False
    assert len(notes) == 1, notes
    return notes[0]


def frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


# One bad sample.


@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("workers", WORKERS)
def test_one_bad_sample_of_a_thousand(workers: int, batch_size: int) -> None:
    dataset = Bad(1000, unreadable(503))
    got = drain(fastload.DataLoader(dataset, batch_size, num_workers=workers))
    expected = batches(1000, batch_size)
    place = 503 // batch_size
    error = got[place]
    assert got[:place] == expected[:place]
    assert got[place + 1 :] == expected[place + 1 :]
    assert error is dataset.raised[503], "the exception itself, not a copy"
    assert "__getitem__" in frames(error), "with the worker's traceback"
    assert "503" in note(error)
    assert "stage: sample" in note(error)


@pytest.mark.parametrize("workers", WORKERS)
def test_the_note_names_the_file_where_it_is_known(workers: int) -> None:
    got = drain(fastload.DataLoader(Located(20, unreadable(13)), 5, num_workers=workers))
    assert "shelf/00013.jpg" in note(got[2])
    got = drain(fastload.DataLoader(Bad(20, unreadable(13)), 5, num_workers=workers))
    assert "file" not in note(got[2])


class Sentences(Bad):
    """What a text dataset calls `samples`."""

    @property
    def samples(self) -> list[tuple[str, int]]:
        return [("a sentence", 0)] * self.length


def test_what_is_no_file_is_not_named_as_one(tmp_path: Path) -> None:
    """Neither a sentence nor the program or the address that an error of the operating system is about."""
    (tmp_path / "7.txt").touch()
    errors: dict[int, Callable[[int], BaseException]] = {
        2: lambda index: FileNotFoundError(errno.ENOENT, "No such file", "ffmpeg"),
        4: lambda index: OSError(errno.EIO, "Not Found", "http://127.0.0.1/4.jpg"),
        7: lambda index: OSError(errno.EIO, "Input/output error", str(tmp_path / "7.txt")),
        9: lambda index: Unreadable(index, "torn"),
    }
    got = drain(fastload.DataLoader(Sentences(10, errors), num_workers=2))
    notes = {index: note(got[index]) for index in errors}
    assert f"; file: {tmp_path / '7.txt'}" in notes.pop(7)
    assert not [text for text in notes.values() if "file:" in text]


# ---- what may come of sharing ----


def notes_of(dataset: Dataset[Any], **options: Any) -> list[str]:
    """The notes on the first error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fastload.errors.SharedStateWarning)
        got = drain(fastload.DataLoader(dataset, 5, **{"copy_dataset": "state", **options}))
    return next(batch for batch in got if isinstance(batch, Exception)).__notes__


class Feeds(Dataset[int]):
    """Takes its samples from a generator, of which there is no copy."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.feed = (k for k in range(1_000))

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == 13:
            raise self.error
        return index


SHARED = Feeds(ValueError("generator already executing"))
OF_A_THREAD = FailingDataset(
    range(20), failures={13: RuntimeError("can only be used in the thread that made it")}
)


@pytest.mark.parametrize(
    ("dataset", "options", "clause"),
    [
        (SHARED, {"num_workers": 2}, "all workers share dataset.feed"),
        (OF_A_THREAD, {"num_workers": 1}, "it speaks of threads"),
        (Bad(20, unreadable(13)), {"num_workers": 2, "copy_dataset": False}, "copy_dataset=False"),
    ],
    ids=["no copy", "of a thread", "copy_dataset=False"],
)
def test_an_error_that_may_come_of_sharing_says_so(
    dataset: Dataset[Any], options: dict[str, Any], clause: str
) -> None:
    """In one note more, though the same object is raised again."""
    for _ in range(2):
        place, hint = notes_of(dataset, **options)
        assert "sample index 13" in place
        assert f"may come of sharing: {clause}" in hint
        for remedy in ("num_workers=0", "copy_dataset", "fastload check"):
            assert remedy in hint


@pytest.mark.parametrize(
    ("dataset", "workers"),
    [(SHARED, 0), (SHARED, 1), (OF_A_THREAD, 0), (Bad(20, unreadable(13)), 4)],
    ids=["no workers", "one worker", "of a thread, no workers", "nothing shared"],
)
def test_any_other_error_does_not(dataset: Dataset[Any], workers: int) -> None:
    (place,) = notes_of(dataset, num_workers=workers)
    assert "sample index 13" in place


@pytest.mark.parametrize("workers", WORKERS)
def test_the_note_names_index_and_position(workers: int) -> None:
    """The index is the dataset's, the position the sampler's."""
    loader = fastload.DataLoader(
        Located(100, unreadable(42)), 4, sampler=[9, 8, 7, 6, 5, 42, 4], num_workers=workers
    )
    got = drain(loader)
    assert got[0] == [9, 8, 7, 6]
    assert "index 42" in note(got[1])
    assert "position 1 of batch 1" in note(got[1])
    assert "epoch 0" in note(got[1])
    assert "epoch 1" in note(drain(loader)[1])


@pytest.mark.parametrize("workers", WORKERS)
def test_an_exception_object_that_is_raised_again_has_one_note(workers: int) -> None:
    """Raised for every sample of a broken file, or in every epoch, as by `FailingDataset`."""
    again = ValueError("broken")
    dataset = FailingDataset(range(20), failures={6: again, 13: again})
    loader = fastload.DataLoader(dataset, 5, num_workers=workers)
    for epoch in range(3):
        iterator = iter(loader)
        for index in (None, 6, 13, None):
            if index is None:
                next(iterator)
            else:
                with pytest.raises(ValueError, match="broken") as caught:
                    next(iterator)
                assert f"index {index}," in note(caught.value)
                assert f"epoch {epoch};" in note(caught.value)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_bad_epoch_leaves_the_next_one_whole(persistent: bool) -> None:
    dataset = Bad(100, unreadable(31, 32, 77))
    with fastload.DataLoader(dataset, 10, num_workers=4, persistent_workers=persistent) as loader:
        for _ in range(3):
            got = drain(loader)
            assert [place for place, b in enumerate(got) if isinstance(b, Unreadable)] == [3, 7]
            assert loader.stats().batches == 10
            iterator = iter(loader)  # left at its error
            for _ in range(3):
                next(iterator)
            with pytest.raises(Unreadable):
                next(iterator)
        dataset.bad = {}
        assert drain(loader) == batches(100, 10)


@pytest.mark.parametrize("workers", WORKERS)
def test_every_sample_bad(workers: int) -> None:
    got = drain(fastload.DataLoader(Bad(40, unreadable(*range(40))), 5, num_workers=workers))
    assert [error.index for error in got] == [0, 5, 10, 15, 20, 25, 30, 35]


@pytest.mark.parametrize("workers", WORKERS)
def test_samples_without_batches(workers: int) -> None:
    got = drain(fastload.DataLoader(Located(20, unreadable(13)), None, num_workers=workers))
    assert got[:13] + got[14:] == [*range(13), *range(14, 20)]
    assert got[13].index == 13
    assert "shelf/00013.jpg" in note(got[13])


@pytest.mark.parametrize("workers", WORKERS)
def test_whole_batch_reads(workers: int) -> None:
    got = drain(fastload.DataLoader(Gathered(20, unreadable(13)), 5, num_workers=workers))
    assert got[:2] + got[3:] == batches(20, 5)[:2] + batches(20, 5)[3:]
    assert got[2].index == 13
    assert "__getitems__" in frames(got[2])
    assert "10, 11, 12, 13, 14" in note(got[2]), "the indices that were asked for"


@pytest.mark.parametrize("workers", [1, 4])
def test_without_order_everything_else_arrives(workers: int) -> None:
    loader = fastload.DataLoader(
        Bad(100, unreadable(31, 77)), 10, num_workers=workers, in_order=False
    )
    got = drain(loader)
    errors = [b.index for b in got if isinstance(b, Unreadable)]
    rest = [b for b in got if not isinstance(b, Unreadable)]
    assert sorted(errors) == [31, 77]
    assert sorted(rest) == [b for place, b in enumerate(batches(100, 10)) if place not in (3, 7)]


@pytest.mark.parametrize("workers", WORKERS)
def test_an_index_that_is_not_there(workers: int) -> None:
    loader = fastload.DataLoader(list(range(8)), 2, sampler=[0, 1, 2, 99, 4], num_workers=workers)
    got = drain(loader)
    assert [got[0], got[2]] == [[0, 1], [4]]
    assert isinstance(got[1], IndexError)
    assert "99" in note(got[1])


@pytest.mark.parametrize("workers", WORKERS)
def test_tensors_gathered_whole_with_an_index_that_is_not_there(workers: int) -> None:
    loader = fastload.DataLoader(
        TensorDataset(torch.arange(8)), 2, sampler=[0, 1, 2, 99, 4], num_workers=workers
    )
    got = drain(loader)
    assert [got[0][0].tolist(), got[2][0].tolist()] == [[0, 1], [4]]
    assert isinstance(got[1], IndexError)
    assert "99" in note(got[1])


class Crossed(Dataset[int]):
    """Samples 0 and 1 are bad; `later` raises only once the other one has."""

    def __init__(self, later: int) -> None:
        self.later = later
        self.other_raised = threading.Event()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == self.later:
            assert self.other_raised.wait(DEADLINE_S)
        elif index == 1 - self.later:
            self.other_raised.set()
        if index < 2:
            raise Unreadable(index, "torn")
        return index


@pytest.mark.parametrize("batch_size", [2, 4])
@pytest.mark.parametrize("later", [0, 1])
def test_of_two_bad_samples_the_first_in_order_is_raised(later: int, batch_size: int) -> None:
    for _ in range(10):
        got = drain(fastload.DataLoader(Crossed(later), batch_size, num_workers=2))
        assert got[0].index == 0, "whatever the timing"
        assert got[1:] == batches(8, batch_size)[1:]


# What would end a loop or a thread in silence.


@pytest.mark.parametrize("kind", [StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("workers", [1, 4])
def test_what_would_end_a_thread_is_an_error(kind: type[BaseException], workers: int) -> None:
    dataset = Bad(100, {42: lambda _: kind("out of a sample")})
    got = drain(fastload.DataLoader(dataset, 10, num_workers=workers))
    assert got[:4] + got[5:] == batches(100, 10)[:4] + batches(100, 10)[5:]
    assert type(got[4]) is RuntimeError
    assert got[4].__cause__ is dataset.raised[42]
    assert kind.__name__ in str(got[4])
    assert "42" in note(got[4])


@pytest.mark.parametrize("kind", [StopIteration, GeneratorExit])
def test_the_loops_own_thread_ends_no_epoch_in_silence(kind: type[BaseException]) -> None:
    dataset = Bad(100, {42: lambda _: kind("out of a sample")})
    got = drain(fastload.DataLoader(dataset, 10, num_workers=0))
    assert got[:4] + got[5:] == batches(100, 10)[:4] + batches(100, 10)[5:]
    assert type(got[4]) is RuntimeError
    assert got[4].__cause__ is dataset.raised[42]
    assert "42" in note(got[4])


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [StopIteration, GeneratorExit])
def test_out_of_a_whole_batch_read(kind: type[BaseException], workers: int) -> None:
    got = drain(
        fastload.DataLoader(Gathered(20, {13: lambda _: kind("x")}), 5, num_workers=workers)
    )
    assert got[:2] + got[3:] == batches(20, 5)[:2] + batches(20, 5)[3:]
    assert type(got[2]) is RuntimeError
    assert isinstance(got[2].__cause__, kind)


# collate_fn.


def collate_but(*broken: int, kind: type[BaseException] = OSError) -> Callable[[Any], Any]:
    def collate(samples: list[int]) -> torch.Tensor:
        if not set(broken).isdisjoint(samples):
            raise kind("out of collate_fn")
        return torch.tensor(samples)

    return collate


@pytest.mark.parametrize("workers", WORKERS)
def test_a_collate_fn_that_raises(workers: int) -> None:
    loader = fastload.DataLoader(range(100), 10, num_workers=workers, collate_fn=collate_but(42))
    got = drain(loader)
    assert got[:4] + got[5:] == batches(100, 10)[:4] + batches(100, 10)[5:]
    assert type(got[4]) is OSError
    assert str(got[4]) == "out of collate_fn"
    assert "collate" in frames(got[4])
    assert "stage: collate" in note(got[4])
    assert "42" in note(got[4]), "the samples of the batch"


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [StopIteration, GeneratorExit])
def test_a_collate_fn_that_would_end_the_epoch(kind: type[BaseException], workers: int) -> None:
    collate_fn = collate_but(42, kind=kind)
    got = drain(fastload.DataLoader(range(100), 10, num_workers=workers, collate_fn=collate_fn))
    assert got[:4] + got[5:] == batches(100, 10)[:4] + batches(100, 10)[5:]
    assert type(got[4]) is RuntimeError
    assert isinstance(got[4].__cause__, kind)
    assert "stage: collate" in note(got[4])


@pytest.mark.parametrize("workers", WORKERS)
def test_samples_that_do_not_go_together(workers: int) -> None:
    samples: list[Any] = [torch.zeros(3) for _ in range(20)]
    samples[7] = torch.zeros(4)
    loader = fastload.DataLoader(samples, 4, num_workers=workers)
    got = drain(loader)
    assert [isinstance(batch, list) for batch in got] == [True, False, True, True, True]
    assert isinstance(got[1], RuntimeError)
    assert "stage: collate" in note(got[1])
    assert "7" in note(got[1])


@pytest.mark.parametrize("workers", WORKERS)
def test_skipping_samples_skips_no_collate_fn(workers: int) -> None:
    loader = fastload.DataLoader(
        range(100), 10, num_workers=workers, collate_fn=collate_but(42), on_error="skip"
    )
    got = drain(loader)
    assert isinstance(got[4], OSError)
    assert len(got) == 10


# The sampler, which runs on the loop's thread.


class Breaking(Sampler[int]):
    """Raises in `__iter__` (`after=None`) or after that many indices."""

    def __init__(self, after: int | None, kind: type[BaseException] = OSError) -> None:
        self.after = after
        self.kind = kind

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[int]:
        if self.after is None:
            raise self.kind("out of the sampler")
        return self.indices(self.after)

    def indices(self, after: int) -> Iterator[int]:
        yield from range(after)
        raise self.kind("out of the sampler")


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("after", [0, 3, 10, 42, 100])
def test_a_sampler_that_raises_midway(after: int, workers: int) -> None:
    """As in torch, the batch that it was filling is lost with it; those before it are not."""
    loader = fastload.DataLoader(range(100), 10, sampler=Breaking(after), num_workers=workers)
    for _ in range(2):
        got = drain(loader)
        assert got[:-1] == batches(100, 10)[: after // 10]
        assert type(got[-1]) is OSError
        assert "indices" in frames(got[-1])
        assert "stage: sampler" in note(got[-1])


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("batch_size", [10, None])
def test_a_sampler_that_cannot_even_start(batch_size: int | None, workers: int) -> None:
    loader = fastload.DataLoader(
        range(100), batch_size, sampler=Breaking(None), num_workers=workers
    )
    for _ in range(2):
        with pytest.raises(OSError, match="out of the sampler"):
            next(iter(loader))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [GeneratorExit, StopIteration])
def test_a_sampler_that_would_end_the_epoch(kind: type[BaseException], workers: int) -> None:
    sampler = Breaking(42, kind)
    loader = fastload.DataLoader(range(100), 10, sampler=sampler, num_workers=workers)
    got = drain(loader)
    assert got[:-1] == batches(100, 10)[:4]
    assert isinstance(got[-1], RuntimeError)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_batch_sampler_that_gives_no_batches(workers: int) -> None:
    loader = fastload.DataLoader(range(100), batch_sampler=[[1, 2], 3, [4]], num_workers=workers)
    got = drain(loader)
    assert got[0] == [1, 2]
    assert isinstance(got[1], TypeError)
    assert got[2] == [4]


# worker_init_fn.


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("workers", "broken"), [(1, 0), (4, 0), (4, 3)])
def test_a_worker_init_fn_that_raises(workers: int, broken: int, persistent: bool) -> None:
    def init(worker: int) -> None:
        if worker == broken:
            raise OSError("out of worker_init_fn")

    loader = fastload.DataLoader(
        range(100),
        10,
        num_workers=workers,
        worker_init_fn=init,
        persistent_workers=persistent,
    )
    for _ in range(2):
        with pytest.raises(OSError, match="out of worker_init_fn") as caught:
            next(iter(loader))
        assert "init" in frames(caught.value)
        assert f"worker {broken}" in note(caught.value)
        assert "stage: worker_init_fn" in note(caught.value)
    loader.close()


def test_without_workers_there_is_none_to_initialise() -> None:
    def init(worker: int) -> None:
        raise AssertionError(worker)

    assert drain(fastload.DataLoader(range(9), 3, worker_init_fn=init)) == batches(9, 3)


@pytest.mark.parametrize("kind", [StopIteration, SystemExit])
def test_a_worker_init_fn_that_would_end_the_program(kind: type[BaseException]) -> None:
    def init(worker: int) -> None:
        raise kind("out of worker_init_fn")

    loader = fastload.DataLoader(range(100), 10, num_workers=2, worker_init_fn=init)
    with pytest.raises(RuntimeError) as caught:
        next(iter(loader))
    assert isinstance(caught.value.__cause__, kind)


# on_error="skip".


@pytest.mark.parametrize("batch_size", [7, 64])
@pytest.mark.parametrize("workers", WORKERS)
def test_skip_delivers_the_999_others(
    workers: int, batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = fastload.DataLoader(
        Located(1000, unreadable(503)), batch_size, num_workers=workers, on_error="skip"
    )
    with caplog.at_level(logging.WARNING):
        got = drain(loader)
    expected = batches(1000, batch_size)
    expected[503 // batch_size].remove(503)
    assert got == expected, "the batch is shorter, and no other one moves"
    assert sum(map(len, got)) == 999
    stats = loader.stats()
    assert (stats.samples, stats.errors, stats.batches) == (999, 1, len(expected))
    assert any("503" in record.getMessage() for record in caplog.records), "and says so"


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [Bad, Gathered])
def test_skip_takes_out_any_number(kind: type[Bad], workers: int) -> None:
    bad = [0, 9, 10, 11, 12, 45, 99]
    loader = fastload.DataLoader(
        kind(100, unreadable(*bad)), 10, num_workers=workers, on_error="skip"
    )
    for _ in range(2):
        assert drain(loader) == [[i for i in b if i not in bad] for b in batches(100, 10)]
        assert loader.stats().errors == len(bad)


@pytest.mark.parametrize("workers", WORKERS)
def test_skip_with_a_collate_fn(workers: int) -> None:
    loader = fastload.DataLoader(
        Bad(20, unreadable(13)), 5, num_workers=workers, on_error="skip", collate_fn=list
    )
    assert drain(loader) == [*batches(20, 5)[:2], [10, 11, 12, 14], [15, 16, 17, 18, 19]]


@pytest.mark.parametrize("workers", WORKERS)
def test_skip_where_the_first_sample_would_have_fixed_the_layout(workers: int) -> None:
    class Wide(Bad):
        def __getitem__(self, index: int) -> Any:
            return {"row": torch.full((20_000,), super().__getitem__(index)), "name": str(index)}

    loader = fastload.DataLoader(
        Wide(12, unreadable(0, 1, 7)), 4, num_workers=workers, on_error="skip"
    )
    got = drain(loader)
    for batch, indices in zip(got, ([2, 3], [4, 5, 6], [8, 9, 10, 11]), strict=True):
        assert batch["name"] == [str(i) for i in indices]
        assert batch["row"].shape == (len(indices), 20_000)
        assert (batch["row"] == torch.tensor(indices)[:, None]).all()


@pytest.mark.parametrize("workers", WORKERS)
def test_a_batch_that_lost_every_sample_raises(workers: int) -> None:
    loader = fastload.DataLoader(
        Bad(20, unreadable(5, 6, 7, 8, 9)), 5, num_workers=workers, on_error="skip"
    )
    got = drain(loader)
    assert got[:1] + got[2:] == batches(20, 5)[:1] + batches(20, 5)[2:]
    assert type(got[1]) is EmptyBatchError
    assert "batch 1" in str(got[1])
    assert isinstance(got[1].__cause__, Unreadable)


# on_error=callable.


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [Bad, Gathered])
def test_a_callable_replaces_or_skips(kind: type[Bad], workers: int) -> None:
    calls = []

    def decide(index: int, error: BaseException) -> Any:
        calls.append((index, error))
        return fastload.SKIP if index == 12 else -index

    dataset = kind(20, unreadable(3, 11, 12, 14))
    loader = fastload.DataLoader(dataset, 5, num_workers=workers, on_error=decide)
    assert drain(loader) == [
        [0, 1, 2, -3, 4],
        [5, 6, 7, 8, 9],
        [10, -11, 13, -14],
        [15, 16, 17, 18, 19],
    ]
    assert Counter(index for index, _ in calls) == Counter([3, 11, 12, 14])
    assert all(isinstance(error, Unreadable) for _, error in calls)
    assert all(error.index == index for index, error in calls)
    stats = loader.stats()
    assert (stats.errors, stats.samples) == (4, 19)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_callable_that_raises_is_an_error_in_its_place(workers: int) -> None:
    def decide(index: int, error: BaseException) -> Any:
        raise OSError("out of on_error")

    dataset = Bad(20, unreadable(13))
    got = drain(fastload.DataLoader(dataset, 5, num_workers=workers, on_error=decide))
    assert got[:2] + got[3:] == batches(20, 5)[:2] + batches(20, 5)[3:]
    assert type(got[2]) is OSError
    assert "13" in note(got[2])
    assert got[2].__context__ is dataset.raised[13]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_callable_may_let_the_error_through(workers: int) -> None:
    def decide(index: int, error: BaseException) -> Any:
        raise error

    dataset = Bad(20, unreadable(13))
    got = drain(fastload.DataLoader(dataset, 5, num_workers=workers, on_error=decide))
    assert got[2] is dataset.raised[13]
    assert "index 13" in got[2].__notes__[0]
    assert len(got) == 4


# max_errors.


@pytest.mark.parametrize("on_error", ["skip", lambda index, error: -index], ids=["skip", "call"])
@pytest.mark.parametrize("workers", WORKERS)
def test_max_errors_bounds_an_epoch(workers: int, on_error: Any) -> None:
    loader = fastload.DataLoader(
        Bad(100, unreadable(5, 15, 35, 36)),
        10,
        num_workers=workers,
        on_error=on_error,
        max_errors=2,
    )
    for _ in range(2):
        iterator = iter(loader)
        delivered = [next(iterator).tolist() for _ in range(3)]
        assert [[i for i in b if i not in (5, 15, -5, -15)] for b in delivered] == [
            [i for i in b if i not in (5, 15)] for b in batches(100, 10)[:3]
        ]
        with pytest.raises(TooManyErrorsError, match="2") as caught:
            next(iterator)
        assert isinstance(caught.value.__cause__, Unreadable)


@pytest.mark.parametrize("workers", WORKERS)
def test_as_many_errors_as_are_allowed(workers: int) -> None:
    loader = fastload.DataLoader(
        Bad(100, unreadable(5, 15, 35)), 10, num_workers=workers, on_error="skip", max_errors=3
    )
    for _ in range(3):
        assert sum(map(len, drain(loader))) == 97, "they are counted anew in each epoch"


@pytest.mark.parametrize("workers", WORKERS)
def test_no_errors_allowed(workers: int) -> None:
    loader = fastload.DataLoader(
        Bad(30, unreadable(15)), 10, num_workers=workers, on_error="skip", max_errors=0
    )
    got = drain(loader)
    assert got[0] == batches(30, 10)[0]
    assert type(got[1]) is TooManyErrorsError


class LateFirst(Dataset[int]):
    """Samples 0, 2 and 4 are bad; 0 raises last, once 2 and 4 have."""

    def __init__(self) -> None:
        self.raised = threading.Semaphore(0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 0:
            assert self.raised.acquire(timeout=DEADLINE_S)
            assert self.raised.acquire(timeout=DEADLINE_S)
        if index in (2, 4):
            self.raised.release()
        if index in (0, 2, 4):
            raise Unreadable(index, "torn")
        return index


def test_errors_are_counted_in_order_whatever_the_timing() -> None:
    for _ in range(10):
        loader = fastload.DataLoader(
            LateFirst(), 2, num_workers=2, on_error="skip", max_errors=2, prefetch_batches=4
        )
        got = drain(loader)
        assert got[:2] == [[1], [3]], "the first two in order are within the bound"
        assert type(got[2]) is TooManyErrorsError


# torch's Subset, which has `__getitems__` whether or not what it is a part of has.


class Meeting(Dataset[int]):
    """Samples 0 and 1 are both being read at once, or neither ever is."""

    def __init__(self) -> None:
        self.both = threading.Barrier(2)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index in (0, 1):
            self.both.wait(DEADLINE_S)
        return index


@pytest.mark.parametrize("nested", [False, True])
def test_workers_share_a_batch_of_a_subset(nested: bool) -> None:
    dataset = Subset(Meeting(), range(9, -1, -1))
    if nested:
        dataset = Subset(dataset, range(10))
    loader = fastload.DataLoader(dataset, 2, sampler=[9, 8, 3], num_workers=2)
    first, second = drain(loader)
    assert sorted(first) == [0, 1]
    assert len(second) == 1


@pytest.mark.parametrize("on_error", ["raise", lambda index, error: -1], ids=["raise", "replace"])
@pytest.mark.parametrize("workers", WORKERS)
def test_a_bad_sample_of_a_subset_is_named(workers: int, on_error: Any) -> None:
    """By the index that the sampler gave, as in any data set, and by its file, which the whole knows."""
    seen: list[Exception] = []

    def keep(index: int, error: Exception) -> Any:
        seen.append(error)
        return on_error(index, error)

    part = Subset(Subset(Located(100, unreadable(42)), range(0, 100, 2)), range(10, 30))
    loader = fastload.DataLoader(
        part, 4, num_workers=workers, on_error=keep if callable(on_error) else on_error
    )
    got = drain(loader)
    expected = [[20 + 2 * i for i in batch] for batch in batches(20, 4)]
    assert got[:2] + got[3:] == expected[:2] + expected[3:]
    if callable(on_error):
        assert got[2] == [36, 38, 40, -1]
        (error,) = seen
    else:
        error = got[2]
    assert type(error) is Unreadable
    assert "sample index 11, position 3 of batch 2 of epoch 0" in note(error)
    assert "stage: sample; file: shelf/00042.jpg" in note(error)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("workers", WORKERS)
def test_a_subset_of_what_reads_batches_reads_batches(workers: int, nested: bool) -> None:
    class Watched(Gathered):
        def __getitem__(self, index: int) -> int:
            raise AssertionError("read sample by sample")

        def __getitems__(self, indices: list[int]) -> list[int]:
            calls.append(list(indices))
            if 42 in indices:
                raise Unreadable(42, "torn")
            return list(indices)

    calls: list[list[int]] = []
    dataset: Dataset[int] = Subset(Watched(100, {}), range(20, 60))
    got = drain(
        fastload.DataLoader(
            Subset(dataset, range(40)) if nested else dataset, 10, num_workers=workers
        )
    )
    expected = [list(range(i, i + 10)) for i in range(20, 60, 10)]
    assert sorted(calls) == expected, "each batch in one call"
    assert got[:2] + got[3:] == expected[:2] + expected[3:]
    assert type(got[2]) is Unreadable
    assert "__getitems__([20, 21, 22, 23, 24, 25, 26, 27, ... 10 in all])" in note(got[2])


# A fault of the pipeline itself.


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fastload-")]


def break_in_a_thread(monkeypatch: pytest.MonkeyPatch, place: str, fault: BaseException) -> None:
    """Let a thread of the loader meet `fault` at its third passage through a place of the pipeline."""
    owner, name = {
        "serve": (workers_module, "serve"),
        "read": (SampleFetcher, "read"),
        "finish": (Fetcher, "finish"),
        "claim": (Window, "claim"),
        "deliver": (Window, "deliver"),
        "complete": (Window, "complete"),
        "collect": (Window, "collect"),
        "pin": (workers_module, "pin_batch"),
    }[place]
    whole = getattr(owner, name)
    passages = iter(range(10_000))  # next() is atomic

    def broken(*args: Any) -> Any:
        assert threading.current_thread().name.startswith("fastload-")
        if next(passages) == 2:
            raise fault
        return whole(*args)

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize("kind", [AssertionError, MemoryError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize(
    "place", ["serve", "read", "finish", "claim", "deliver", "complete", "collect", "pin"]
)
def test_a_fault_in_a_loader_thread_reaches_the_loop(
    place: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some of the batches before it; and from then on it is all that comes."""
    collected = place in ("collect", "pin")
    if collected:  # the collector's work is simulated: here may be nothing to pin for
        monkeypatch.setattr(fastload.iterator, "can_pin", lambda device, stacklevel: True)
        monkeypatch.setattr(workers_module, "pin_batch", lambda batch: None)
    loader = fastload.DataLoader(
        range(100),  # type: ignore[arg-type]
        5,
        num_workers=3,
        pin_memory=collected,
        persistent_workers=True,
    )
    fault = kind("injected")
    with monkeypatch.context() as broken:
        break_in_a_thread(broken, place, fault)
        got: list[Any] = []
        with pytest.raises(WorkerCrashError) as caught:
            iterator = iter(loader)
            for batch in iterator:
                got.append(batch.tolist())
        assert caught.value.__cause__ is fault
        assert got == batches(100, 5)[: len(got)]
        with pytest.raises(WorkerCrashError):
            next(iterator)
        for thread in loader_threads():
            thread.join(DEADLINE_S)
        assert not loader_threads()
    with loader:
        for _ in range(2):
            assert drain(loader) == batches(100, 5)


def check_cannot_begin(loader: Any, error: type[BaseException], match: str) -> BaseException:
    """Check that `iter()` raises, leaves no thread and nothing for the end of the process to wait for."""
    with pytest.raises(error, match=match) as caught:
        iter(loader)
    assert not loader_threads()
    assert not [t for t in workers_module._alive if t.name.startswith("fastload-")]
    return caught.value


@pytest.mark.parametrize("init", [None, lambda worker: None], ids=["plain", "worker_init_fn"])
@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
@pytest.mark.parametrize("broken", ["worker-0", "worker-2", "worker-3", "collector"])
def test_a_thread_that_cannot_be_set_up(
    broken: str, kind: type[BaseException], init: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_num_threads = torch.set_num_threads

    def refusing(count: int) -> None:
        if threading.current_thread().name == f"fastload-{broken}":
            raise kind("cannot be set up")
        set_num_threads(count)

    monkeypatch.setattr(fastload.iterator, "can_pin", lambda device, stacklevel: True)
    monkeypatch.setattr(workers_module, "pin_batch", lambda batch: None)
    loader = fastload.DataLoader(
        range(100),  # type: ignore[arg-type]
        10,
        num_workers=4,
        pin_memory=True,
        worker_init_fn=init,
    )
    before = torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "set_num_threads", refusing)
        error = check_cannot_begin(loader, RuntimeError, "cannot be set up")
    assert broken.replace("-", " ") in note(error)
    assert torch.get_num_threads() == before
    assert drain(loader) == batches(100, 10)


@pytest.mark.parametrize("init", [None, lambda worker: None], ids=["plain", "worker_init_fn"])
@pytest.mark.parametrize("broken", ["worker-0", "worker-2", "collector"])
def test_a_thread_that_cannot_be_started(
    broken: str, init: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name == f"fastload-{broken}":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(fastload.iterator, "can_pin", lambda device, stacklevel: True)
    monkeypatch.setattr(workers_module, "pin_batch", lambda batch: None)
    loader = fastload.DataLoader(
        range(100),  # type: ignore[arg-type]
        10,
        num_workers=4,
        pin_memory=True,
        worker_init_fn=init,
    )
    before = torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refusing)
        check_cannot_begin(loader, RuntimeError, "can't start new thread")
    assert torch.get_num_threads() == before
    assert drain(loader) == batches(100, 10)
