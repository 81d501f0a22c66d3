"""Promises:
- `predict` gives the model a batch when it is full, or when its first message has waited for `max_wait_ms`.
- Workers decode messages as they arrive, side by side, and batches keep the order of the source.
- What `decode` draws depends on the message alone.
- The error of a message names the worker that decoded it.
- A loop over `predict` that is left, a generator that is collected and the end of the interpreter do not wait for a
  source that hangs.
- A fork may begin a stream. One that goes on with its parent's gets an error, and leaves the source alone.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

import fastload
from fastload.stream import Answers, batch, batches
from tests.children import PRELUDE, run_python
from tests.contracts.sources import LONG, double
from tests.fakes import fastload_threads, hasty
from tests.promises.reading import wait_until
from tests.stream.test_predict import List, Queue, to_tensor


class Gates:
    """Decodes numbers. Those in `hold` wait until a test opens their gate."""

    fastload_per_worker = ()

    def __init__(self, hold: Iterable[int] = ()) -> None:
        self.gates = {value: threading.Event() for value in hold}
        self.reached: SimpleQueue[int] = SimpleQueue()

    def __call__(self, value: int) -> Tensor:
        self.reached.put(value)
        if (gate := self.gates.get(value)) is not None:
            assert gate.wait(30)
        return torch.tensor(float(value))

    def wait_for(self, *values: int) -> None:
        assert sorted(self.reached.get(timeout=30) for _ in values) == sorted(values)


class Run:
    """A run of `predict` in a thread, with the sizes of the batches that the model got."""

    def __init__(self, source: Any, gate: threading.Event | None = None, **how: Any) -> None:
        self.source, self.gate = source, gate
        self.sizes: list[int] = []
        self.sink = List()
        self.answers = fastload.predict(self.model, source, **{"max_wait_ms": LONG, **how})
        self.thread = threading.Thread(target=self.answers.write_to, args=(self.sink,))
        self.thread.start()

    def model(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        assert self.gate is None or self.gate.wait(30)
        return x

    @property
    def got(self) -> list[float]:
        return [answer for _, answer in self.sink.rows]

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.sink.rows) == count, f"{count} are answered")

    def end(self) -> None:
        self.source.put(None)
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextmanager
def running(source: Queue, **how: Any) -> Iterator[Run]:
    run = Run(source, **how)
    try:
        yield run
    finally:
        run.end()


def read_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each message seem to have arrived two hours before it did."""
    clock = batch.perf_counter

    def early() -> float:
        is_reader = threading.current_thread().name == "fastload-reader"
        return clock() - (7200.0 if is_reader else 0.0)

    monkeypatch.setattr(batch, "perf_counter", early)


# ---- size and deadline ----


def test_a_deadline_counts_from_the_arrival_of_the_first_message_not_from_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The deadline is an hour."""
    read_long_ago(monkeypatch)
    with running(Queue([1]), decode=to_tensor, batch_size=4) as run:
        run.wait_for(1)


def test_the_deadline_closes_a_batch_whose_messages_are_still_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_long_ago(monkeypatch)
    decode = Gates(hold=[0])
    with running(Queue([0]), decode=decode, batch_size=3, num_workers=2) as run:
        decode.wait_for(0)
        wait_until(lambda: run.answers._batches._line[0].closed, "the deadline has passed")
        run.source.put(1)
        decode.wait_for(1)
        decode.gates[0].set()
        run.wait_for(2)
    assert run.sizes == [1, 1]
    assert run.got == [0.0, 1.0]


# ---- workers ----


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_a_message_is_decoded_while_its_batch_waits_for_others(num_workers: int) -> None:
    decode = Gates()
    with running(Queue(), decode=decode, batch_size=3, num_workers=num_workers) as run:
        for value in range(3):
            assert run.sizes == []
            run.source.put(value)
            decode.wait_for(value)
        run.wait_for(3)


def test_a_slow_message_holds_its_batch_back_and_no_later_one_overtakes_it() -> None:
    decode = Gates(hold=[1])
    with running(Queue(range(6)), decode=decode, batch_size=2, num_workers=2) as run:
        decode.wait_for(0, 1, 2, 3)  # the second batch is decoded beside the first
        assert run.got == []
        decode.gates[1].set()
        run.wait_for(6)
    assert run.got == [float(k) for k in range(6)]


class Draws:
    """Draws in each way. It holds a generator, which each message keys again."""

    def __init__(self) -> None:
        self.rng = torch.Generator()

    def __call__(self, value: int) -> Tensor:
        held = torch.rand((), generator=self.rng).item()
        drawn = [random.random(), np.random.rand(), torch.rand(()).item(), held]
        return torch.tensor([value, *drawn], dtype=torch.float64)


def test_what_decode_draws_depends_on_the_message_alone() -> None:
    def rows(num_workers: int, batch_size: int, max_wait_ms: float) -> list[list[float]]:
        answers = fastload.predict(
            lambda x: x,
            range(40),
            decode=Draws(),
            num_workers=num_workers,
            batch_size=batch_size,
            max_wait_ms=max_wait_ms,
        )
        return [answer.tolist() for _, answer in answers]

    expected = rows(1, 40, LONG)
    assert [row[0] for row in expected] == [*range(40)]
    assert len({number for row in expected for number in row[1:]}) == 4 * 40
    with hasty():
        assert rows(4, 3, LONG) == rows(2, 7, 0.0) == expected


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_an_error_names_the_message_and_the_worker_that_decoded_it(num_workers: int) -> None:
    def decode(value: int) -> Tensor:
        if value % 2:
            info = get_worker_info()
            raise ValueError("" if info is None else f"; worker {info.id}")
        return to_tensor(value)

    failed: list[tuple[Any, Exception]] = []
    answers = fastload.predict(
        double,
        range(20),
        decode=decode,
        batch_size=4,
        num_workers=num_workers,
        on_failed=lambda message, error: failed.append((message.key, error)),
    )
    assert len(list(answers)) == 10
    assert [key for key, _ in failed] == [str(k) for k in range(1, 20, 2)]
    for key, error in failed:
        assert error.__notes__ == [f"fastload: message {key!r}{error}; stage: decode"]
        assert bool(num_workers) == ("worker" in str(error))


# ---- the time without messages ----


class Clock:
    """Stands still until a test moves it. `asked` is set when the loop begins to wait."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked = threading.Event()

    def __call__(self) -> float:
        if threading.current_thread() is threading.main_thread():
            self.asked.set()
        return self.now


# ---- the end ----


class Hangs:
    """A plain iterable that gives one value and then waits until a test frees it."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def __iter__(self) -> Iterator[int]:
        yield 0
        assert self.free.wait(30)


def answers_of(source: Any) -> Answers:
    return fastload.predict(double, source, decode=to_tensor, max_wait_ms=0, num_workers=2)


def leaves(source: Hangs) -> None:
    for _ in answers_of(source):
        break


def is_collected(source: Hangs) -> None:
    """The generator is part of a circle."""
    got = iter(answers_of(source))
    next(got)
    circle: list[Any] = [got]
    circle.append(circle)
    del got, circle
    gc.collect()


@pytest.mark.parametrize("ends", [leaves, is_collected])
def test_a_loop_that_is_left_waits_for_nothing(
    ends: Callable[[Hangs], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(threads: Any, seconds: float) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr(batches.threads, "wait", wait)
    source = Hangs()
    ends(source)
    wait_until(lambda: fastload_threads() == ["fastload-reader"], "the workers have ended")
    source.free.set()
    wait_until(lambda: fastload_threads() == [], "the reader has ended")


def test_close_ends_the_threads_and_the_loop_that_waits() -> None:
    source = Queue()
    with running(source, decode=to_tensor, num_workers=2) as run:
        wait_until(lambda: len(fastload_threads()) == 3, "the threads run")
        run.answers.close()
        run.thread.join(30)
        assert not run.thread.is_alive()
    assert source.closed
    assert fastload_threads() == []


def test_close_names_a_call_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.engine.threads.JOIN_SECONDS", 0.01)
    source = Hangs()
    answers = answers_of(source)
    next(iter(answers))
    with pytest.warns(RuntimeWarning, match="fastload-reader did not return from a call"):
        answers.close()
    source.free.set()


def test_ctrl_c_ends_a_loop_that_waits_for_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, struck = Clock(), threading.Event()
    monkeypatch.setattr(batches, "perf_counter", clock)

    def strike(*_: object) -> None:
        struck.set()
        raise KeyboardInterrupt

    class Source(Queue):
        def __iter__(self) -> Iterator[Any]:
            assert clock.asked.wait(30)
            os.kill(os.getpid(), signal.SIGINT)
            # Python looks for signals before it waits. One that comes in between has no effect until another comes.
            while not struck.wait(1):
                os.kill(os.getpid(), signal.SIGINT)
            yield from super().__iter__()

    source = Source()
    before = signal.signal(signal.SIGINT, strike)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(iter(answers_of(source)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert source.closed
    assert fastload_threads() == []


ENDS = """
import atexit, threading, time
began = []
atexit.register(lambda: print(time.monotonic() - began[0], *threads()))  # after fastload's own, which comes now
from tests.stream.test_predict import Queue

def hangs():
    yield 1
    threading.Event().wait()

runs = [iter(fastload.predict(lambda x: x, source, decode=torch.tensor, max_wait_ms=0, num_workers=2))
        for source in (hangs(), Queue([1]))]
for got in runs:
    next(got)
atexit.register(lambda: began.append(time.monotonic()))
"""


def test_the_end_of_the_interpreter_stops_a_source_and_does_not_wait_for_one_that_hangs() -> None:
    ended = run_python("-c", PRELUDE + ENDS)
    assert (ended.returncode, ended.stderr) == (0, "")
    seconds, *threads = ended.stdout.split()
    assert threads == ["fastload-reader"], "all others have ended"
    assert float(seconds) < 4.0, "close() waits for five seconds"


# ---- forks ----

FORKS = """
def answers(source):
    return fastload.predict(lambda x: x, source, decode=torch.tensor, batch_size=2, num_workers={workers})

def in_fork(does):
    if (pid := os.fork()) == 0:
        signal.alarm(30)
        does()
        os._exit(6)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 6

def begins():
    assert len(list(early)) == 9
    assert not threads()

def goes_on():
    try:
        list(got)
    except fastload.errors.StreamError as error:
        assert "is a fork of it" in str(error)
        assert not source.closed
    else:
        os._exit(1)

from tests.stream.test_predict import Queue
early = answers(range(9))
in_fork(begins)
source = Queue([*range(9), None])
got = iter(answers(source))
next(got)
in_fork(goes_on)
print(len(list(got)))
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fork_may_begin_a_stream_and_not_go_on_with_one(workers: int) -> None:
    ended = run_python("-c", PRELUDE + FORKS.format(workers=workers))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "8\n", "")
