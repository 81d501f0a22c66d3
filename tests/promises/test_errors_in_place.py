"""Promises:
- An error arrives in its place: all batches before it come first, and all batches after it follow. Of two bad samples
  the first in order is raised.
- The error keeps its type and the worker's traceback. A note names index, stage and, if known, file.
- A StopIteration or GeneratorExit from user code never ends an epoch in silence. It is the cause of a RuntimeError in
  its place, as are SystemExit and KeyboardInterrupt in a worker.
- `on_error` may be "skip" or a callable, and `max_errors` limits the number of errors. A batch may become empty.
- A sampler, a `collate_fn` or a `worker_init_fn` that raises is an error in its place.
- No error causes a hang or a silently short epoch.
- An error that may come from sharing carries one more note with remedies.
- A value that is not a file is not named as one.
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
from fastload import SKIP, DataLoader
from fastload import workers as workers_module
from fastload.errors import EmptyBatchError, TooManyErrorsError, WorkerCrashError
from fastload.fetch import Fetcher, SampleFetcher
from fastload.testing import FailingDataset
from fastload.window import Window
from tests.fakes import Numbers, fastload_threads
from tests.promises.reading import DEADLINE_S, drain, in_batches

WORKERS = [0, 4]


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

    fastload_per_worker = ()

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


def unreadable(*indices: int) -> dict[int, Callable[[int], BaseException]]:
    return {index: lambda index: Unreadable(index, "torn") for index in indices}


def only_error(got: list[Any], expected: list[Any], place: int) -> Any:
    """Return what is at `place`; all else must be `expected`."""
    assert got[:place] + got[place + 1 :] == expected[:place] + expected[place + 1 :]
    return got[place]


def note(error: BaseException) -> str:
    """Return the one note that fastload left."""
    notes = [text for text in getattr(error, "__notes__", []) if "fastload" in text]
    notes = [text for text in notes if "may come from sharing" not in text]  # not with "state"
    assert len(notes) == 1, notes
    return notes[0]


def frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


# One bad sample.


@pytest.mark.parametrize(
    ("workers", "batch_size"), [(0, 1), (0, 7), (1, 7), (4, 1), (4, 7), (4, 64)]
)
def test_one_bad_sample_of_a_thousand(workers: int, batch_size: int) -> None:
    dataset = Bad(1000, unreadable(503))
    got = drain(DataLoader(dataset, batch_size, num_workers=workers))
    error = only_error(got, in_batches(range(1000), batch_size), 503 // batch_size)
    assert error is dataset.raised[503], "the exception itself, not a copy"
    assert "__getitem__" in frames(error), "with the worker's traceback"
    assert "503" in note(error)
    assert "stage: sample" in note(error)


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
    got = drain(DataLoader(Sentences(10, errors), num_workers=2))
    notes = {index: note(got[index]) for index in errors}
    assert f"; file: {tmp_path / '7.txt'}" in notes.pop(7)
    assert not [text for text in notes.values() if "file:" in text]


# ---- what may come from sharing ----


def notes_of(dataset: Dataset[Any], **options: Any) -> list[str]:
    """The notes on the first error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fastload.errors.SharedStateWarning)
        got = drain(DataLoader(dataset, 5, **{"copy_dataset": "state", **options}))
    return next(batch for batch in got if isinstance(batch, Exception)).__notes__


class Feeds(Numbers):
    """Takes its samples from a generator, of which there is no copy."""

    def __init__(self, error: Exception) -> None:
        super().__init__(20)
        self.error, self.feed = error, (k for k in range(1_000))

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
        (OF_A_THREAD, {"num_workers": 1}, "its message mentions threads"),
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
        assert f"may come from sharing objects between threads: {clause}" in hint
        for remedy in ("num_workers=0", "copy_dataset", "fastload check"):
            assert remedy in hint


@pytest.mark.parametrize(
    ("dataset", "workers"),
    [(SHARED, 0), (SHARED, 1), (OF_A_THREAD, 0), (Bad(20, unreadable(13)), 4)],
)
def test_any_other_error_does_not(dataset: Dataset[Any], workers: int) -> None:
    (place,) = notes_of(dataset, num_workers=workers)
    assert "sample index 13" in place


@pytest.mark.parametrize("workers", WORKERS)
def test_the_note_names_index_and_position_and_file(workers: int) -> None:
    """The index is the dataset's, the position the sampler's."""
    loader = DataLoader(
        Located(100, unreadable(42)), 4, sampler=[9, 8, 7, 6, 5, 42, 4], num_workers=workers
    )
    for epoch in range(2):
        first, error = drain(loader)
        assert first == [9, 8, 7, 6]
        for part in ("index 42", "position 1 of batch 1", f"epoch {epoch}", "shelf/00042.jpg"):
            assert part in note(error)


@pytest.mark.parametrize("workers", WORKERS)
def test_an_exception_object_that_is_raised_again_has_one_note(workers: int) -> None:
    """Raised for every sample of a broken file, or in every epoch, as by `FailingDataset`."""
    again = ValueError("broken")
    dataset = FailingDataset(range(20), failures={6: again, 13: again})
    loader = DataLoader(dataset, 5, num_workers=workers)
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
    with DataLoader(dataset, 10, num_workers=4, persistent_workers=persistent) as loader:
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
        assert drain(loader) == in_batches(range(100), 10)


@pytest.mark.parametrize("workers", WORKERS)
def test_samples_without_batches(workers: int) -> None:
    got = drain(DataLoader(Located(20, unreadable(13)), None, num_workers=workers))
    assert "shelf/00013.jpg" in note(only_error(got, [*range(20)], 13))


def test_without_order_everything_else_arrives() -> None:
    loader = DataLoader(Bad(100, unreadable(31, 77)), 10, num_workers=4, in_order=False)
    got = drain(loader)
    errors = [b.index for b in got if isinstance(b, Unreadable)]
    rest = [b for b in got if not isinstance(b, Unreadable)]
    assert sorted(errors) == [31, 77]
    assert sorted(rest) == [
        b for place, b in enumerate(in_batches(range(100), 10)) if place not in (3, 7)
    ]


@pytest.mark.parametrize("workers", WORKERS)
def test_tensors_gathered_whole_with_an_index_that_is_not_there(workers: int) -> None:
    dataset = TensorDataset(torch.arange(8))
    first, error, last = drain(
        DataLoader(dataset, 2, sampler=[0, 1, 2, 99, 4], num_workers=workers)
    )
    assert (first[0].tolist(), last[0].tolist()) == ([0, 1], [4])
    assert isinstance(error, IndexError)
    assert "99" in note(error)


class Late(Bad):
    """The index `late` is read once all bad samples but itself have raised."""

    fastload_per_worker = ()

    def __init__(self, length: int, bad: tuple[int, ...], late: int) -> None:
        super().__init__(length, unreadable(*bad))
        self.late, self.others = late, threading.Semaphore(0)

    def __getitem__(self, index: int) -> int:
        if index == self.late:
            for _ in range(len(self.bad) - 1):
                assert self.others.acquire(timeout=DEADLINE_S)
        elif index in self.bad:
            self.others.release()
        return super().__getitem__(index)


@pytest.mark.parametrize("later", [0, 1])
def test_of_two_bad_samples_the_first_in_order_is_raised(later: int) -> None:
    for _ in range(10):
        got = drain(DataLoader(Late(8, (0, 1), later), 4, num_workers=2))
        assert got[0].index == 0, "whatever the timing"
        assert got[1:] == in_batches(range(8), 4)[1:]


# Whatever raises, the other nine batches are whole.


def collate(samples: list[int]) -> torch.Tensor:
    if 42 in samples:
        raise OSError("out of collate_fn")
    return torch.tensor(samples)


def collate_that_ends(samples: list[int]) -> torch.Tensor:
    return next(iter(())) if 42 in samples else torch.tensor(samples)


RANGE: Any = range(100)
UNLIKE = [torch.zeros(2) if k == 42 else torch.tensor(k) for k in RANGE]
BEYOND = [1042 if k == 42 else k for k in RANGE]
SKIPPING = {"collate_fn": collate, "on_error": "skip"}
PLACES: dict[str, tuple[Any, dict[str, Any], type[Exception], list[str]]] = {
    "whole": (Gathered(100, unreadable(42)), {}, Unreadable, ["40, 41, 42", "in __getitems__"]),
    "no such index": (RANGE, {"sampler": BEYOND}, IndexError, ["1042"]),
    "collate": (RANGE, {"collate_fn": collate}, OSError, ["stage: collate", "42", "in collate"]),
    "skipping": (RANGE, SKIPPING, OSError, ["stage: collate"]),
    "ends": (RANGE, {"collate_fn": collate_that_ends}, RuntimeError, ["stage: collate"]),
    "unlike samples": (UNLIKE, {}, RuntimeError, ["stage: collate", "42"]),
}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("case", PLACES)
def test_an_error_of_any_stage_arrives_in_its_place(case: str, workers: int) -> None:
    dataset, options, kind, words = PLACES[case]
    got = drain(DataLoader(dataset, 10, num_workers=workers, **options))
    error = only_error(got, in_batches(range(100), 10), 4)
    assert type(error) is kind
    said = "\n".join([note(error), *(f"in {frame}" for frame in frames(error))])
    assert all(word in said for word in words), said
    assert case != "ends" or isinstance(error.__cause__, StopIteration)


@pytest.mark.parametrize("dataset_class", [Bad, Gathered])
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *((kind, n) for kind in (StopIteration, GeneratorExit) for n in WORKERS),
        *((kind, 4) for kind in (SystemExit, KeyboardInterrupt)),
    ],
)
def test_what_would_end_a_loop_or_a_thread_is_an_error(
    kind: type[BaseException], workers: int, dataset_class: type[Bad]
) -> None:
    dataset = dataset_class(100, {42: lambda _: kind("out of a sample")})
    got = drain(DataLoader(dataset, 10, num_workers=workers))
    error = only_error(got, in_batches(range(100), 10), 4)
    assert type(error) is RuntimeError
    assert error.__cause__ is dataset.raised[42]
    assert kind.__name__ in str(error)
    assert "42" in note(error)


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
@pytest.mark.parametrize(
    ("after", "kind"),
    [(0, OSError), (42, OSError), (100, OSError), (42, StopIteration), (42, GeneratorExit)],
)
def test_a_sampler_that_raises_midway(after: int, kind: type[BaseException], workers: int) -> None:
    """As in torch, the batch that it was filling is lost with it; those before it are not."""
    sampler = Breaking(after, kind)
    loader = DataLoader(range(100), 10, sampler=sampler, num_workers=workers)
    for _ in range(2):
        *got, error = drain(loader)
        assert got == in_batches(range(100), 10)[: after // 10]
        if kind is OSError:
            assert type(error) is OSError
            assert "indices" in frames(error)
            assert "stage: sampler" in note(error)
        else:
            assert isinstance(error, RuntimeError)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_sampler_that_cannot_even_start(workers: int) -> None:
    loader = DataLoader(range(100), 10, sampler=Breaking(None), num_workers=workers)
    for _ in range(2):
        with pytest.raises(OSError, match="out of the sampler"):
            next(iter(loader))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_batch_sampler_that_gives_what_is_no_batch(workers: int) -> None:
    given: Any = [[1, 2], 3, range(4, 6)]
    got = drain(DataLoader(range(100), batch_sampler=given, num_workers=workers))
    assert isinstance(only_error(got, [[1, 2], [3], [4, 5]], 1), TypeError)


# worker_init_fn.


@pytest.mark.parametrize(
    ("workers", "broken", "persistent"), [(1, 0, False), (4, 0, False), (4, 3, True)]
)
@pytest.mark.parametrize("kind", [OSError, StopIteration, SystemExit])
def test_a_worker_init_fn_that_raises(
    workers: int, broken: int, persistent: bool, kind: type[BaseException]
) -> None:
    def init(worker: int) -> None:
        if worker == broken:
            raise kind("out of worker_init_fn")

    loader = DataLoader(
        range(100), 10, num_workers=workers, worker_init_fn=init, persistent_workers=persistent
    )
    for _ in range(2):
        with pytest.raises((OSError, RuntimeError), match="out of worker_init_fn") as caught:
            next(iter(loader))
        if kind is not OSError:
            assert isinstance(caught.value.__cause__, kind)
        else:
            assert type(caught.value) is OSError
            assert "init" in frames(caught.value)
        assert f"worker {broken}" in note(caught.value)
        assert "stage: worker_init_fn" in note(caught.value)
    loader.close()


def test_without_workers_there_is_none_to_initialise() -> None:
    def init(worker: int) -> None:
        raise AssertionError(worker)

    assert drain(DataLoader(range(9), 3, worker_init_fn=init)) == in_batches(range(9), 3)


# on_error="skip".


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("kind", "collate_fn"), [(Bad, None), (Bad, list), (Gathered, None)])
def test_skip_shortens_the_batch_and_moves_no_other(
    kind: type[Bad], collate_fn: Any, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    bad = [0, 9, 10, 11, 12, 45, 99]
    loader = DataLoader(
        kind(100, unreadable(*bad)), 10, num_workers=workers, on_error="skip", collate_fn=collate_fn
    )
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            assert drain(loader) == [
                [i for i in b if i not in bad] for b in in_batches(range(100), 10)
            ]
        stats = loader.stats()
        assert (stats.samples, stats.errors, stats.batches) == (93, 7, 10)
    assert any("sample index 0" in record.getMessage() for record in caplog.records), "and says so"


@pytest.mark.parametrize("workers", WORKERS)
def test_skip_where_the_first_sample_would_have_fixed_the_layout(workers: int) -> None:
    class Wide(Bad):
        def __getitem__(self, index: int) -> Any:
            return {"row": torch.full((20_000,), super().__getitem__(index)), "name": str(index)}

    loader = DataLoader(Wide(12, unreadable(0, 1, 7)), 4, num_workers=workers, on_error="skip")
    for batch, indices in zip(loader, ([2, 3], [4, 5, 6], [8, 9, 10, 11]), strict=True):
        assert batch["name"] == [str(i) for i in indices]
        assert batch["row"].shape == (len(indices), 20_000)
        assert (batch["row"] == torch.tensor(indices)[:, None]).all()


@pytest.mark.parametrize("workers", WORKERS)
def test_a_batch_that_lost_every_sample_raises(workers: int) -> None:
    loader = DataLoader(Bad(20, unreadable(5, 6, 7, 8, 9)), 5, num_workers=workers, on_error="skip")
    error = only_error(drain(loader), in_batches(range(20), 5), 1)
    assert type(error) is EmptyBatchError
    assert "batch 1" in str(error)
    assert isinstance(error.__cause__, Unreadable)


# on_error=callable.


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [Bad, Gathered])
def test_a_callable_replaces_or_skips(kind: type[Bad], workers: int) -> None:
    calls = []

    def decide(index: int, error: BaseException) -> Any:
        calls.append((index, error))
        return SKIP if index == 12 else -index

    dataset = kind(20, unreadable(3, 11, 12, 14))
    loader = DataLoader(dataset, 5, num_workers=workers, on_error=decide)
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
@pytest.mark.parametrize("through", [False, True])
def test_a_callable_that_raises_is_an_error_in_its_place(workers: int, through: bool) -> None:
    """Its own, or the error of the sample that it lets through."""

    def decide(index: int, error: BaseException) -> Any:
        raise error if through else OSError("out of on_error")

    dataset = Bad(20, unreadable(13))
    got = drain(DataLoader(dataset, 5, num_workers=workers, on_error=decide))
    error = only_error(got, in_batches(range(20), 5), 2)
    assert "index 13" in error.__notes__[0]
    if through:
        assert error is dataset.raised[13]
    else:
        assert type(error) is OSError
        assert error.__context__ is dataset.raised[13]


# max_errors.


@pytest.mark.parametrize("on_error", ["skip", lambda index, error: -index], ids=["skip", "call"])
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("max_errors", "whole"), [(0, 0), (2, 3), (4, 10)])
def test_max_errors_bounds_an_epoch(
    workers: int, on_error: Any, max_errors: int, whole: int
) -> None:
    """Errors are counted anew in each epoch."""
    bad = (5, 15, 35, 36)
    loader = DataLoader(
        Bad(100, unreadable(*bad)),
        10,
        num_workers=workers,
        on_error=on_error,
        max_errors=max_errors,
    )
    for _ in range(2):
        iterator = iter(loader)
        for batch in in_batches(range(100), 10)[:whole]:
            kept = [-i if i in bad else i for i in batch if on_error != "skip" or i not in bad]
            assert next(iterator).tolist() == kept
        if whole < 10:
            with pytest.raises(TooManyErrorsError, match=str(max_errors)) as caught:
                next(iterator)
            assert isinstance(caught.value.__cause__, Unreadable)


def test_errors_are_counted_in_order_whatever_the_timing() -> None:
    for _ in range(10):
        loader = DataLoader(
            Late(8, (0, 2, 4), 0),
            2,
            num_workers=2,
            on_error="skip",
            max_errors=2,
            prefetch_batches=4,
        )
        got = drain(loader)
        assert got[:2] == [[1], [3]], "the first two in order are within the bound"
        assert type(got[2]) is TooManyErrorsError


# torch's Subset, which has `__getitems__` whether or not what it is a part of has.


class Meeting(Numbers):
    """Samples 0 and 1 are both being read at once, or neither ever is."""

    both = threading.Barrier(2)

    def __getitem__(self, index: int) -> int:
        if index in (0, 1):
            self.both.wait(DEADLINE_S)
        return index


@pytest.mark.parametrize("nested", [False, True])
def test_workers_share_a_batch_of_a_subset(nested: bool) -> None:
    dataset = Subset(Meeting(10), range(9, -1, -1))
    if nested:
        dataset = Subset(dataset, range(10))
    first, second = drain(DataLoader(dataset, 2, sampler=[9, 8, 3], num_workers=2))
    assert sorted(first) == [0, 1]
    assert len(second) == 1


@pytest.mark.parametrize("workers", WORKERS)
def test_a_bad_sample_of_a_subset_is_named(workers: int) -> None:
    """By the index that the sampler gave, as in any dataset, and by its file, which the whole knows."""
    part = Subset(Subset(Located(100, unreadable(42)), range(0, 100, 2)), range(10, 30))
    got = drain(DataLoader(part, 4, num_workers=workers))
    error = only_error(got, [[20 + 2 * i for i in batch] for batch in in_batches(range(20), 4)], 2)
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
    if nested:
        dataset = Subset(dataset, range(40))
    got = drain(DataLoader(dataset, 10, num_workers=workers))
    expected = [list(range(i, i + 10)) for i in range(20, 60, 10)]
    assert sorted(calls) == expected, "each batch in one call"
    error = only_error(got, expected, 2)
    assert type(error) is Unreadable
    assert "__getitems__([20, 21, 22, 23, 24, 25, 26, 27, ... 10 in all])" in note(error)


# A fault of the pipeline itself.


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


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate the collector's work: here may be nothing to pin for."""
    monkeypatch.setattr(fastload.iterator, "can_pin", lambda device, stacklevel: True)
    monkeypatch.setattr(workers_module, "pin_batch", lambda batch: None)


@pytest.mark.parametrize("kind", [AssertionError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "place", ["serve", "read", "finish", "claim", "deliver", "complete", "collect", "pin"]
)
@pytest.mark.usefixtures("pins")
def test_a_fault_in_a_loader_thread_reaches_the_loop(
    place: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some of the batches before it; and from then on it is all that comes."""
    loader = DataLoader(
        range(100),  # type: ignore[arg-type]
        5,
        num_workers=3,
        pin_memory=place in ("collect", "pin"),
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
        assert got == in_batches(range(100), 5)[: len(got)]
        with pytest.raises(WorkerCrashError):
            next(iterator)
        for thread in threading.enumerate():
            if thread.name.startswith("fastload-"):
                thread.join(DEADLINE_S)
        assert not fastload_threads()
    with loader:
        for _ in range(2):
            assert drain(loader) == in_batches(range(100), 5)


@pytest.mark.usefixtures("pins")
@pytest.mark.parametrize("init", [None, lambda worker: None], ids=["plain", "worker_init_fn"])
@pytest.mark.parametrize("broken", ["worker-0", "worker-3", "collector"])
@pytest.mark.parametrize("kind", [RuntimeError, SystemExit, None])
def test_a_thread_that_cannot_be_set_up_or_started(
    broken: str, kind: type[BaseException] | None, init: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves no thread, and nothing for the end of the process to wait for; `None`: it does not even start."""
    set_num_threads, start = torch.set_num_threads, threading.Thread.start

    def not_set_up(count: int) -> None:
        if threading.current_thread().name == f"fastload-{broken}":
            assert kind is not None
            raise kind("cannot be set up")
        set_num_threads(count)

    def not_started(thread: threading.Thread) -> None:
        if thread.name == f"fastload-{broken}":
            raise RuntimeError("can't start new thread")
        start(thread)

    loader = DataLoader(
        range(100),  # type: ignore[arg-type]
        10,
        num_workers=4,
        pin_memory=True,
        worker_init_fn=init,
    )
    before = torch.get_num_threads()
    with monkeypatch.context() as patch:
        if kind is None:
            patch.setattr(threading.Thread, "start", not_started)
        else:
            patch.setattr(torch, "set_num_threads", not_set_up)
        match = "can't start new thread" if kind is None else "cannot be set up"
        with pytest.raises(RuntimeError, match=match) as caught:
            iter(loader)
    assert not fastload_threads()
    assert not [t for t in workers_module._alive if t.name.startswith("fastload-")]
    assert kind is None or broken.replace("-", " ") in note(caught.value)
    assert torch.get_num_threads() == before
    assert drain(loader) == in_batches(range(100), 10)


class CutOff(Dataset[int]):
    """Has files as torchvision's folders do. Their third cannot be read."""

    samples = tuple((__file__, 0) for _ in range(6))

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise OSError("image file is truncated")
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_the_log_names_the_file_of_a_skipped_sample(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = DataLoader(CutOff(), batch_size=3, num_workers=workers, on_error="skip")
    assert [len(batch) for batch in loader] == [2, 3]
    (record,) = caplog.records
    assert record.getMessage() == (
        f"fastload: skipped sample index 2: OSError: image file is truncated; file: {__file__}"
    )
