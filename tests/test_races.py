"""Promise: What several threads share is right in any order of their steps, also those that the GIL keeps together.

Each test forces the order. Where another thread would have to stop between two steps of the interpreter, its step is
taken there, in the same thread.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from fastload import DataLoader, RankSampler
from fastload._kit import torch_private
from fastload.engine.iterator import LoaderIterator
from fastload.order.epochs import Epochs
from fastload.order.order import Order
from fastload.random import streams, torch_random
from tests.fakes import Numbers

JOIN_S = 30.0


def at_line(code: CodeType, line: int, act: Callable[[], object], call: Callable[[], Any]) -> Any:
    """Return what `call` returns if `act` comes before the `line`-th line of `code`, or None past its end."""
    struck = []
    before = sys.gettrace()  # that of coverage

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line":
            struck.append(frame.f_lineno)
            if len(struck) == line:
                sys.settrace(None)
                act()
        return trace

    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(before)
    return result if len(struck) >= line else None


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


# ---- what is exchanged once ----


class Watched:
    """A lock that says if a thread waits for it."""

    def __init__(self, lock: Any, waits: threading.Event) -> None:
        self.lock, self.waits = lock, waits

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.waits.set()
            self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_a_second_thread_waits_until_torchs_seeding_functions_are_exchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It used to begin at once, and its samples seeded the loop's generator."""
    torch_random.install(streams._seeded)
    module: Any = torch.random
    for name in torch_private._SEEDING:
        *_, theirs = getattr(module, f"_fastload_{name}").args
        inspect.unwrap(getattr(module, name)).__code__ = theirs.__code__
    on, unwrap, threads = threading.Event(), inspect.unwrap, list[threading.Thread]()
    monkeypatch.setattr(torch_random, "_lock", Watched(threading.Lock(), on))
    monkeypatch.setattr(torch_random, "_installed", False)

    def seed_in_a_sample() -> None:
        stream = streams.Stream()
        with streams.entered(stream):
            stream.move(streams.Fixed(1), None)
            torch.manual_seed(5)
        on.set()

    def unwrapped(function: Any) -> Any:  # the first thread is halfway
        if not threads:
            threads.append(started(seed_in_a_sample))
            assert on.wait(JOIN_S)
        return unwrap(function)

    monkeypatch.setattr(torch_private.inspect, "unwrap", unwrapped)
    before = torch.default_generator.get_state()
    torch_random.install(streams._seeded)
    threads[0].join(JOIN_S)
    assert torch.equal(torch.default_generator.get_state(), before)


# ---- threads that share an iterator ----


def test_the_thread_that_takes_a_batch_gives_the_warnings_and_begins_the_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two threads used to look whether there is a warning, and one of them found none."""
    said, begin = list[bool](), LoaderIterator.begin
    sampler = RankSampler(Numbers(8), rank=0, world_size=1, seed=1)
    with DataLoader(Numbers(8), 2, sampler=sampler, num_workers=1) as loader:
        iterator: Any = iter(loader)
        iterator._notices.warn("kind", "a warning")
        sampler.set_epoch(3)

        def record(*_: object, **__: object) -> None:
            said.append(iterator._window.taking._is_owned())

        def begun(self: Any, *given: Any) -> None:
            record()
            begin(self, *given)

        monkeypatch.setattr(warnings, "warn", record)
        monkeypatch.setattr(LoaderIterator, "begin", begun)
        next(iterator)
    assert said == [True, True]


# ---- what must agree ----


class Deliveries(Order):
    """Another thread asks for the state while a batch is counted: the loop holds it, and it must not count."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(epoch=0), workers=0)  # type: ignore[arg-type]
        self.progress = 0
        self.states: list[Any] = []

    def __next__(self) -> Any:
        raise StopIteration

    def delivered(self, batch: Any) -> None:
        self.states.append(self._before(1))
        self.progress += 1
        self.states.append(self._before(1))

    def end(self) -> None:
        pass

    def state(self, ahead: int = 0) -> dict[str, Any]:
        return {}


def test_a_state_before_the_last_batch_never_counts_that_batch() -> None:
    order, batch = Deliveries(), SimpleNamespace(error=None, left_out=False)
    for _ in range(3):
        order.count(batch)  # type: ignore[arg-type]
    assert order.states == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("line", range(1, 9))
def test_a_state_beside_one_that_is_loaded_is_the_one_before_or_after(line: int) -> None:
    """Neither the beginning of an epoch, nor an error."""
    with DataLoader(Numbers(8), 2, num_workers=1, seed=1) as loader:
        iterator = iter(loader)
        next(iterator)
        one = loader.state_dict()
        next(iterator)
        two = loader.state_dict()

        def load() -> None:
            loader.load_state_dict(one)

        code = Epochs.state_dict.__code__
        found = at_line(code, line, load, loader.state_dict)
        assert found in (None, one, two)
        loader.load_state_dict(one)
        # The next epoch begins, and resumes.
        found = at_line(code, line, lambda: iter(loader), loader.state_dict)
        assert found in (None, one)
