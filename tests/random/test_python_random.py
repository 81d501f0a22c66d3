"""Promises:
- Python's `random` draws from the sample's own stream in a worker, by every name. Seeding twice repeats a draw.
  See also `tests/random/test_random_is_the_sample_s.py`.
- CPython's own tests of `random` pass while a loader runs.
- In all other threads Python's `random` draws what it always drew.
"""

from __future__ import annotations

import _random
import math
import os
import random
import sys
import threading
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random, gauss, randint, shuffle
from random import random as early_random
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import pytest

from fastload.random import python_random
from tests.fakes import hasty
from tests.random.forks import in_child

T = TypeVar("T")


def _shuffled() -> list[int]:
    numbers = list(range(9))
    shuffle(numbers)
    return numbers


@pytest.fixture
def installed() -> None:
    python_random.install()


def _in_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _entered(function: Callable[[], T], own: Random | None = None) -> T:
    """Return `function()` as computed by a thread that has entered."""
    generator = own or Random(0)

    def run() -> T:
        python_random.enter(lambda: generator)
        return function()

    return _in_thread(run)


def test_names_in_modules_follow_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unloaded(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"`install` loaded this module by asking for {name}")

    reals = [real for real, _ in python_random._STAND_INS.values()]
    early = ModuleType("early")
    early.draw, early.bits = reals  # type: ignore[attr-defined]
    for module in (early, Unloaded("unloaded"), SimpleNamespace(draw=reals[0])):
        monkeypatch.setitem(sys.modules, f"_test_{id(module)}", module)
    for _ in range(2):
        random.random, random.getrandbits = reals  # as `mock.patch` does at its end
        python_random.install()
        assert early.draw is random.random
        assert _entered(early.draw) == Random(0).random()
        assert _entered(lambda: early.bits(40)) == Random(0).getrandbits(40)


def test_a_search_that_ctrl_c_ended_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, _ = python_random._STAND_INS["random"]
    random.random = real
    with monkeypatch.context() as patch:
        patch.setattr(python_random, "search", interrupted)
        with pytest.raises(KeyboardInterrupt):
            python_random.install()
    module = ModuleType("early")
    module.draw = real  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "_test_early", module)
    python_random.install()
    assert module.draw is random.random


def interrupted() -> None:
    raise KeyboardInterrupt


def test_threads_that_have_not_entered_draw_what_they_always_drew() -> None:
    """A thread, not entered, draws what it would draw alone. Another draws its own. Both while a third one installs."""
    state, own = random.getstate(), Random(1)
    ended, start = threading.Event(), threading.Barrier(3)

    def install() -> None:
        start.wait()
        for _ in range(300):
            python_random.install()

    def numbers() -> tuple[Any, ...]:
        return early_random(), random.getrandbits(50), randint(0, 10**9), gauss(0, 1), _shuffled()

    def draw() -> list[Any]:
        start.wait()
        drawn: list[Any] = []
        while not ended.is_set() or len(drawn) < 100:
            drawn.append(numbers())
        return drawn

    python_random.install()
    with hasty(), ThreadPoolExecutor(3) as pool:
        outside, inside = pool.submit(draw), pool.submit(_entered, draw, own)
        try:
            pool.submit(install).result()
        finally:
            ended.set()
    for drawn, start_state in ((outside.result(), state), (inside.result(), Random(1).getstate())):
        random.setstate(start_state)
        assert drawn == [numbers() for _ in drawn]


@pytest.mark.usefixtures("installed")
def test_a_forked_child_seeds_its_global_generator_and_leaves_the_worker_s() -> None:
    """The child of a worker is no worker. What `own` needs may be locked in it for ever."""
    asked: list[int] = []
    generator = Random(5)

    def own() -> Random:
        asked.append(os.getpid())
        return generator

    def child() -> tuple[Any, Any, list[int]]:
        state = random.getstate()
        random.seed(1)
        return state, random.random(), asked

    def worker() -> tuple[Any, float]:
        python_random.enter(own)
        return in_child(child), random.random()

    state = random.getstate()
    of_worker, then = _in_thread(worker)
    assert then == Random(5).random(), "the parent's worker goes on"
    for child_state, drawn, asked_there in (of_worker, in_child(child)):
        assert child_state not in (state, Random(5).getstate())
        assert drawn == Random(1).random()
        assert set(asked_there) <= {os.getpid()}
    assert random.getstate() == state


class OfNoThread(Random):
    """Has what a Python might have whose functions keep more in the global generator than the routing knows."""

    gauss_next = property(
        lambda self: self.__dict__["gauss_next"], lambda self, x: self.__dict__.update(gauss_next=x)
    )

    def _randbelow(self, n: int) -> int:
        return int(_random.Random.random(self) * n)


@pytest.mark.parametrize("name", ["twist", "random"])
def test_a_method_of_a_new_python_is_tried(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments are guessed."""
    monkeypatch.setattr(
        Random, "newvariate", lambda self, a, b: getattr(self, name)() + a + b, raising=False
    )
    monkeypatch.setattr(Random, "twist", lambda self: _random.Random.random(self), raising=False)
    monkeypatch.setattr(random, "__all__", [*random.__all__, "newvariate"])
    failure = python_random.unusable.__wrapped__() or ""
    assert ("drew other numbers" in failure) is (name == "twist")


def test_says_why_it_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    def failure() -> str:
        return python_random.unusable.__wrapped__() or ""

    assert failure() == ""
    for broken in ("random", "getrandbits", "seed", "getstate", "setstate"):
        with monkeypatch.context() as patch:
            patch.delattr(python_random._Routed, broken)
            assert f"`random.{broken}` is in C" in failure()
        with monkeypatch.context() as patch:
            patch.setattr(python_random._Routed, broken, getattr(_random.Random, broken))
            assert "drew other numbers" in failure(), broken
    for name in ("gauss_next", "_randbelow"):
        with monkeypatch.context() as patch:
            patch.setattr(python_random._ThreadRandom, name, getattr(OfNoThread, name))
            assert "drew other numbers" in failure(), name
    with monkeypatch.context() as patch:
        patch.setattr(
            random, "newvariate", python_random._STAND_INS["getrandbits"][0], raising=False
        )
        assert "`random.newvariate` is in C" in failure()
    with monkeypatch.context() as patch:
        patch.setattr(python_random, "_thread", SimpleNamespace(own=None, undrawn=None))
        assert "drew other numbers" in failure(), "other threads are not left alone"
    with monkeypatch.context() as patch:
        patch.setattr(python_random, "_ThreadRandom", int)
        assert "TypeError" in failure()
    with monkeypatch.context() as patch:
        patch.setitem(python_random._STAND_INS, "random", (math.sin, None))
        assert "had replaced `random.random`" in (python_random.unusable.__wrapped__() or "")


def _failures(module: Any) -> list[str]:
    """Run CPython's tests, and those of the Mersenne Twister also on `random._inst`."""

    class OnInst(module.MersenneTwister_TestBasicOps):  # type: ignore[misc]
        gen = random._inst

    load, result = unittest.defaultTestLoader.loadTestsFromTestCase, unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    load(OnInst).run(result)
    assert result.testsRun > 100
    return [f"{test}\n{trace}" for test, trace in result.failures + result.errors]


@pytest.mark.slow
@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.usefixtures("installed")
def test_the_tests_of_cpython_pass(entered: bool) -> None:
    module = pytest.importorskip("test.test_random", reason="this Python has no `test` package")
    state = random.getstate()
    failures = _entered(lambda: _failures(module)) if entered else _failures(module)
    assert failures == []
    assert (random.getstate() == state) is entered
