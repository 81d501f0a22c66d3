"""Promises:
- `predict` gives the model a batch when it is full, or when its first message has waited for `max_wait_ms`.
- Workers decode messages as they arrive, side by side, and batches keep the order of the source.
- What `decode` draws depends on the message alone.
- The error of a message names the worker that decoded it.
- A loop over `predict` that is left, a generator that is collected and the end of the interpreter do not wait for a
  source that hangs.
"""

from __future__ import annotations

import decimal
import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

import fastload
import fastload.telemetry.stages
from fastload.errors import SharedStateWarning
from fastload.safety import libraries
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


def test_messages_that_waited_past_the_deadline_come_in_full_batches() -> None:
    source, gate = Queue([0]), threading.Event()
    with running(source, gate=gate, decode=to_tensor, batch_size=4, max_wait_ms=0) as run:
        wait_until(lambda: run.sizes == [1], "the model has the first batch")
        for value in range(1, 12):
            source.put(value)
        wait_until(lambda: source.read == 1 + 2 * 4, "the reader is as far ahead as it may be")
        gate.set()
        run.wait_for(12)
    assert run.sizes[:3] == [1, 4, 4]
    assert run.got == [float(k) for k in range(12)]


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


def test_a_slow_message_holds_no_other_back_even_if_all_before_were_quick() -> None:
    decode = Gates(hold=[64])
    with running(Queue(range(72)), decode=decode, batch_size=8, num_workers=2) as run:
        run.wait_for(64)
        decode.wait_for(*range(72))
        decode.gates[64].set()
        run.wait_for(72)


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


def test_decode_sees_its_worker_and_collate_sees_none() -> None:
    def decode(value: int) -> Tensor:
        info = get_worker_info()
        assert info is not None
        assert info.num_workers == 3
        return torch.tensor(info.id)

    def collate(samples: list[Tensor]) -> Any:
        assert get_worker_info() is None
        return default_collate(samples)

    answers = fastload.predict(
        lambda x: x, range(50), decode=decode, collate_fn=collate, batch_size=5, num_workers=3
    )
    assert {answer.item() for _, answer in answers} <= {0, 1, 2}
    assert answers.answered == 50


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


def test_user_code_that_exits_in_a_worker_makes_its_message_poison() -> None:
    def decode(value: int) -> Tensor:
        if value == 1:
            raise SystemExit(3)
        return to_tensor(value)

    failed: list[Exception] = []
    answers = fastload.predict(
        double, range(3), decode=decode, on_failed=lambda _, error: failed.append(error)
    )
    assert len(list(answers)) == 2
    [error] = failed
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, SystemExit)


SEEN: list[int] = []


def test_the_loop_warns_of_what_all_workers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_allowed", set())  # so that the code of this file is read

    class Counts:
        def __call__(self, value: int) -> Tensor:
            SEEN.append(value)
            return to_tensor(value)

    answers = fastload.predict(double, range(20), decode=Counts(), batch_size=1, num_workers=1)
    with pytest.warns(SharedStateWarning, match="SEEN`, which all threads share"):
        assert len(list(answers)) == 20


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


def test_the_time_without_messages_is_measured_and_decoding_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(batches, "perf_counter", clock)

    def source() -> Iterator[int]:
        assert clock.asked.wait(30)
        clock.now += 10.0
        yield 1

    def decode(value: int) -> Tensor:
        clock.now += 5.0
        return to_tensor(value)

    answers = fastload.predict(double, source(), decode=decode, batch_size=1, num_workers=0)
    assert len(list(answers)) == 1
    assert clock.now == 15.0
    assert answers.idle_s == 10.0


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
    def join(threads: Any) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr(batches.threads, "join", join)
    source = Hangs()
    ends(source)
    wait_until(lambda: fastload_threads() == ["fastload-reader"], "the workers have ended")
    source.free.set()
    wait_until(lambda: fastload_threads() == [], "the reader has ended")


@pytest.mark.parametrize("value", [1, None])
def test_the_reader_closes_the_source_of_a_loop_that_is_left(value: int | None) -> None:
    """The source waits for another message, or it has ended."""
    source = Queue([0])
    got = iter(answers_of(source))
    next(got)
    source.put(value)
    del got
    wait_until(lambda: fastload_threads() == [], "the threads have ended")
    assert source.closed
    assert source.acknowledged == []


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


def test_a_profiler_sees_the_stages_that_decode_names(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def entered(name: str) -> Any:
        seen.append(name)
        return nullcontext()

    monkeypatch.setattr(fastload.telemetry.stages, "profiler_is_on", lambda: True)
    monkeypatch.setattr(fastload.telemetry.stages, "record_function", entered)

    def decode(value: int) -> Tensor:
        with fastload.stage("parse"):
            return torch.tensor(float(value))

    list(fastload.predict(double, [1, 2], decode=decode, max_wait_ms=0, num_workers=1))
    assert seen.count("fastload.parse") == 2


def test_the_messages_of_a_failed_batch_are_decoded_once_and_keep_their_draws() -> None:
    def decode(value: dict[str, float]) -> Tensor:
        return torch.tensor([value.pop("x"), torch.rand(()).item()])

    def run(poison: float) -> dict[Any, list[float]]:
        def model(x: Tensor) -> Tensor:
            if (x[:, 0] == poison).any():
                raise ValueError("poison")
            return x

        source = [{"x": float(k)} for k in range(4)]
        how: dict[str, Any] = {"batch_size": 4, "max_wait_ms": LONG, "num_workers": 2}
        answers = fastload.predict(
            model, source, decode=decode, on_failed=lambda message, error: None, **how
        )
        return {key: answer.tolist() for key, answer in answers}

    whole, others = run(-1.0), run(2.0)
    assert sorted(others) == ["0", "1", "3"]
    assert all(others[key] == whole[key] for key in others)


def test_decimal_contexts_and_torch_threads_are_those_of_the_caller_afterwards() -> None:
    def decode(value: int) -> Tensor:
        decimal.getcontext().prec = 5
        list(fastload.predict(double, [1], decode=torch.tensor, num_workers=1))
        return torch.tensor(float(value))

    before = decimal.getcontext().prec
    found: list[int] = []
    list(fastload.predict(double, [1, 2], decode=decode, num_workers=2))
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert (decimal.getcontext().prec, found) == (before, [torch.get_num_threads()])


def test_answers_that_are_being_written_are_not_ended_by_a_second_call() -> None:
    run = Run(range(3), threading.Event(), decode=to_tensor, num_workers=1)
    with pytest.raises(RuntimeError, match="only once"):
        run.answers.write_to(List())
    assert run.gate is not None
    run.gate.set()
    run.thread.join(30)
    assert len(run.sink.rows) == 3


def test_a_stream_ends_in_the_child_of_a_fork() -> None:
    program = """
import os, signal
import torch, fastload
from tests.stream.test_predict import Queue
answers = iter(fastload.predict(lambda x: x, Queue([1]), decode=torch.tensor, max_wait_ms=0, num_workers=1))
next(answers)
child = os.fork()
if not child:
    signal.alarm(20)
    os._exit(next(answers, None) is not None)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
answers.close()
"""
    ended = run_python("-W", "ignore", "-c", program)
    assert (ended.stdout.split(), ended.stderr) == (["0"], "")


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
