"""Promises:
- An error arrives in its place: all batches before it come first, and all batches after it follow. Of two bad samples
  the first in order is raised. See also `tests/contracts/workers.py`.
- The error keeps its type and the worker's traceback. A note names index, stage and, if known, file.
- A StopIteration or GeneratorExit from user code never ends an epoch in silence. It is the cause of a RuntimeError in
  its place, as are SystemExit and KeyboardInterrupt in a worker. See also `tests/contracts/workers.py`.
- `on_error` may be "skip" or a callable, and `max_errors` limits the number of errors. A batch may become empty.
  See also `tests/contracts/workers.py`.
- A sampler, a `collate_fn` or a `worker_init_fn` that raises is an error in its place.
  See also `tests/contracts/workers.py`.
- No error causes a hang or a silently short epoch.
- A value that is not a file is not named as one.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastload
import fastload.engine.pinning
from fastload import DataLoader
from fastload.engine import readers as readers_module
from fastload.engine import team as team_module
from fastload.engine.window import Window
from fastload.errors import TooManyErrorsError, WorkerCrashError
from fastload.reading.failures import fail
from fastload.reading.fetch import Fetcher
from tests.contracts.workers import Unreadable, unreadable
from tests.fakes import Numbers, fastload_threads
from tests.promises.reading import DEADLINE_S, drain, in_batches

WORKERS = [0, 4]


class Bad(Numbers):
    """Its own indices, but reading one of `bad` raises what `bad` makes of it."""

    fastload_per_worker = ()  # one for all workers, to be looked at and changed

    def __init__(self, length: int, bad: Mapping[int, Callable[[int], BaseException]]) -> None:
        super().__init__(length)
        self.bad = bad

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise self.bad[index](index)
        return index


def note(error: BaseException) -> str:
    """Return the one note that fastload left."""
    notes = [text for text in getattr(error, "__notes__", []) if "fastload" in text]
    assert len(notes) == 1, notes
    return notes[0]


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
    batch: Any = SimpleNamespace(failed={}, first_failed=4)
    for position in (2, 1, 3):
        fail(batch, position, ValueError(), "")
    assert batch.first_failed == 1, "workers read no sample after it"


# on_error="skip", max_errors.


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


# A fault of the pipeline itself.


def break_in_a_thread(monkeypatch: pytest.MonkeyPatch, place: str, fault: BaseException) -> None:
    """Let a thread of the loader meet `fault` at its third passage through a place of the pipeline."""
    owner, name = {
        "serve": (readers_module, "serve"),
        "read": (Fetcher, "read"),
        "finish": (Fetcher, "finish"),
        "claim": (Window, "claim"),
        "deliver": (Window, "deliver"),
        "complete": (Window, "complete"),
        "collect": (Window, "collect"),
        "pin": (readers_module, "pin_batch"),
    }[place]
    whole = getattr(owner, name)
    passages = [*range(10_000)]  # pop() is atomic, also without the GIL

    def broken(*args: Any) -> Any:
        assert threading.current_thread().name.startswith("fastload-")
        if passages.pop(0) == 2:
            raise fault
        return whole(*args)

    monkeypatch.setattr(owner, name, broken)


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate the collector's work: here may be nothing to pin for."""
    monkeypatch.setattr(fastload.engine.pinning, "_accelerator", lambda: "cuda")
    monkeypatch.setattr(readers_module, "pin_batch", lambda batch: None)


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
    assert not [team for team in team_module._teams if team.is_running()]
    assert kind is None or broken.replace("-", " ") in note(caught.value)
    assert torch.get_num_threads() == before
    assert drain(loader) == in_batches(range(100), 10)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_batch_that_fails_before_issue_returns_is_completed_once(
    in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forced: a worker has failed each batch before `Window.issue` returns.

    The loop then found the error and completed the batch too, which ended the workers. The GIL hid it.
    """
    issue, complete = Window.issue, Window.complete
    counts = Counter[int]()
    ended = [threading.Event() for _ in range(6)]

    def issued(window: Any, ticket: Any) -> None:
        issue(window, ticket)
        if ticket.number and ticket.units:  # before the first, no worker runs
            assert ended[ticket.number].wait(DEADLINE_S)

    def completed(window: Any, ticket: Any) -> None:
        complete(window, ticket)
        counts[ticket.number] += 1
        ended[ticket.number].set()

    monkeypatch.setattr(Window, "issue", issued)
    monkeypatch.setattr(Window, "complete", completed)

    class Gap:
        def __iter__(self) -> Iterator[list[int]]:
            return map(self.batch, range(6))

        def batch(self, n: int) -> list[int]:
            if n == 2:
                raise OSError("out of the sampler")
            return [n]

    dataset, options = Bad(6, unreadable(0, 1, 3, 5)), {"num_workers": 1, "prefetch_batches": 1}
    with DataLoader(dataset, batch_sampler=Gap(), in_order=in_order, **options) as loader:
        kinds = [type(what) for what in drain(loader)]
    assert kinds == [Unreadable, Unreadable, OSError, Unreadable, list, Unreadable]
    assert counts == Counter(range(6))
