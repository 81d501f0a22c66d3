"""Promises:
- NumPy's global random functions draw from the sample's own stream in a worker, by every name. Seeding twice repeats
  a draw.
- NumPy's own tests of its random functions pass while a loader runs.
- In all other threads NumPy's global random functions are what they always were.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.random import get_state as early_get_state
from numpy.random import rand as early_rand
from numpy.random import randn as early_randn
from numpy.random import seed as early_seed
from numpy.random import set_state as early_set_state
from numpy.random import shuffle as early_shuffle

from fastload.random import numpy_memory, numpy_random
from fastload.random.numpy_random import ThreadState
from tests.fakes import hasty
from tests.random.forks import in_child

ROOT = Path(__file__).parents[2]
HELD = np.random.mtrand._rand
ORIGINAL = numpy_random.GLOBAL[0]
since_2_4 = pytest.mark.skipif(
    tuple(map(int, np.__version__.split(".")[:2])) < (2, 4),
    reason="before, a sample that seeds NumPy in a thread drops the cached normal of the main state",
)


@pytest.fixture(autouse=True)
def _main_state() -> Iterator[None]:
    """Install, and leave the main state as it was."""
    state = np.random.get_state()
    numpy_random.install()
    yield
    np.random.set_state(state)


@contextmanager
def entered(state: ThreadState) -> Iterator[None]:
    numpy_random.enter(lambda: state)
    try:
        yield
    finally:
        numpy_random.enter(None)


def in_thread(function: Callable[[], Any]) -> Any:
    """Return what `function` returns in a thread that has a state of its own."""

    def call() -> Any:
        with entered(ThreadState()):
            return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(60)


def draws() -> list[Any]:
    """Return draws by all kinds of names. The last one leaves a cached normal."""
    shuffled = list(range(9))
    early_shuffle(shuffled)
    found = [
        *(early_rand(), HELD.randint(10**6), np.random.uniform(2, 3), np.random.bytes(9)),
        *(np.random.choice(list("abcdef")), np.random.permutation(9).tolist()),
        *(np.random.gamma(2.0), np.random.normal(size=200).tolist(), shuffled),
    ]
    if np.random.get_state()[3] == 0:
        found.append(early_randn())
    return [*found, np.random.get_state()[3]]


def same(a: Any, b: Any) -> bool:
    """Return whether two states are equal, in either form."""
    if isinstance(a, dict):
        a, b = ({**s, **s["state"]} for s in (a, b))
        return all(np.array_equal(a[k], b[k]) for k in ("key", "pos", "has_gauss", "gauss"))
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@since_2_4
def test_the_numbers_of_every_name_are_those_of_a_random_state_of_the_same_seed() -> None:
    np.random.seed(3)
    right = draws()
    main = np.random.get_state()

    def seeded(seed: Callable[[Any], None]) -> list[Any]:
        seed(3)
        return draws()

    for seed in (np.random.seed, early_seed, HELD.seed):
        assert in_thread(lambda seed=seed: seeded(seed)) == right
    assert same(np.random.get_state(), main)


@since_2_4
@pytest.mark.parametrize("legacy", [True, False])
def test_states_have_the_cached_normal_of_the_thread(legacy: bool) -> None:
    np.random.seed(1)
    np.random.randn()
    main = np.random.get_state(legacy)

    def of_the_thread() -> None:
        for get_state, set_state in (
            (np.random.get_state, np.random.set_state),
            (early_get_state, early_set_state),
            (HELD.get_state, HELD.set_state),
        ):
            np.random.seed(2)
            no_normal = get_state(legacy)
            first = np.random.randn()
            with_normal = get_state(legacy)
            assert type(with_normal) is type(main)
            rest = draws()
            set_state(with_normal)
            assert same(get_state(legacy), with_normal)
            assert draws() == rest
            set_state(no_normal)
            assert np.random.randn() == first
            if legacy:
                set_state(with_normal[:3])  # the form without a cached normal
                assert get_state()[3] == 0

    in_thread(of_the_thread)
    assert same(np.random.get_state(legacy), main)


def test_a_key_is_a_stream_of_all_its_64_bits() -> None:
    state = ThreadState()

    def drawn(key: int) -> tuple[float, ...]:
        state.seed(key)
        np.random.randn()
        state.seed(key)  # drops the cached normal
        return (np.random.randn(), *np.random.rand(700))

    keys = [0, 1, 2, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1]
    with entered(state):
        streams = [drawn(key) for key in keys]
        assert streams == [drawn(key) for key in keys]
        assert drawn(1 << 64) == drawn(0)
        assert np.random.rand() != drawn(0)[-1]
    values = np.array(streams)[:, 1:]
    assert len(np.unique(values)) == values.size
    assert np.abs(np.corrcoef(values) - np.eye(len(keys))).max() < 0.2  # 5 standard deviations


def test_another_thread_draws_what_it_always_drew() -> None:
    numbers, started, ended = 5_000, threading.Event(), threading.Event()

    def draw() -> list[Any]:
        np.random.seed(1)
        started.set()
        found: list[Any] = []
        for i in range(numbers):
            found.append(HELD.standard_normal())
            if i % 100 == 0:
                np.random.set_state(np.random.get_state())
        ended.set()
        return [*found, np.random.get_state()[2]]

    right = draw()
    started.clear(), ended.clear()
    rounds = 0
    with hasty(), ThreadPoolExecutor(1) as pool:
        job = pool.submit(draw)
        assert started.wait(60)
        while rounds < 250 or not ended.is_set():
            numpy_random.install()
            with entered(ThreadState()):
                np.random.randn()
            rounds += 1
        assert job.result(60) == right


_before_fork: list[Callable[[], None]] = []
os.register_at_fork(before=lambda: [call() for call in _before_fork])


class Waiting(list[Any]):
    """A list that waits for a fork when `shuffle` sets an element."""

    inside, fork = threading.Event(), threading.Event()

    def __setitem__(self, at: Any, value: Any) -> None:
        self.inside.set()
        assert self.fork.wait(60)
        super().__setitem__(at, value)


def test_a_child_forked_during_a_draw_of_another_thread_draws() -> None:
    np.random.seed(4)
    right = np.random.RandomState(4).rand()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(in_thread, lambda: np.random.shuffle(Waiting(range(2000))))
        assert Waiting.inside.wait(60)
        _before_fork.append(Waiting.fork.set)
        try:
            assert in_child(np.random.rand) == right
        finally:
            _before_fork.clear()
        job.result(60)


def loaded_alone() -> Any:
    """Return a second instance of the module, which NumPy and the standard library are enough for."""
    np.random.set_bit_generator(ORIGINAL)
    spec: Any = importlib.util.spec_from_file_location("alone", numpy_random.__file__)
    module = importlib.util.module_from_spec(spec)
    with mock.patch("os.register_at_fork"):  # each fork would take NumPy's lock a second time
        spec.loader.exec_module(module)
    return module


class Lockless(np.random.RandomState):
    """Does what a NumPy might do that begins to draw without the lock."""

    def normal(self, *args: Any) -> float:
        memory = self._bit_generator.ctypes
        return float(memory.next_double(memory.state))


class AnotherDraw(Lockless):
    """Has a method that NumPy does not have yet, and draws by it without the lock."""

    normal = np.random.RandomState.normal

    def newvariate(self, a: float, b: float, c: float) -> float:
        return Lockless.normal(self) + a + b + c


@pytest.mark.parametrize("kind", [Lockless, AnotherDraw])
def test_a_numpy_that_draws_without_the_lock_cannot_be_used(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(np.random, "RandomState", kind)
    monkeypatch.setattr(np.random.mtrand, "_rand", kind())
    assert "drew other numbers" in loaded_alone().unusable()


def test_every_method_that_draws_is_tried() -> None:
    tried = {drawn.partition(" ")[0] for drawn in numpy_memory.draws(np.random.RandomState(0))}
    every = {name for name in dir(np.random.RandomState) if not name.startswith("_")}
    assert every - tried == {"seed", "get_state", "set_state", "random_integers"}


def test_an_unknown_layout_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(np.random.RandomState):
        """A RandomState that keeps no cached normal."""

        def set_state(self, state: Any) -> None:
            super().set_state(state[:3])

    assert loaded_alone().unusable() is None
    monkeypatch.setattr(np.random, "RandomState", Other)
    monkeypatch.setattr(np.random.mtrand, "_rand", Other())
    assert "no cached normal" in loaded_alone().unusable()


def test_no_memory_outside_of_an_object_is_touched() -> None:
    size = type(ORIGINAL).__basicsize__
    assert len(numpy_memory._memory(ORIGINAL, size - 16, 16)) == 16
    for offset in (-8, 0, size - 15):
        with pytest.raises(ValueError, match="outside"):
            numpy_memory._memory(ORIGINAL, offset, 16)


PLUGIN = """
from fastload.random import numpy_random
assert numpy_random.unusable() is None
numpy_random.install()
state = numpy_random.ThreadState()
{enter}
"""


@since_2_4
@pytest.mark.slow
@pytest.mark.parametrize(
    "enter", ["", "numpy_random.enter(lambda: state)"], ids=["outside", "entered"]
)
def test_numpys_own_tests_pass(tmp_path: Path, enter: str) -> None:
    tests = [f"numpy.random.tests.{name}" for name in ("test_random", "test_randomstate")]
    if importlib.util.find_spec("numpy.random.tests") is None:
        pytest.skip("this NumPy comes without its tests")
    (tmp_path / "routed.py").write_text(PLUGIN.format(enter=enter))
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "routed", "--pyargs", *tests],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTEST_ADDOPTS": ""},
        check=False,
    )
    assert result.returncode == 0, result.stdout


def test_ctrl_c_as_any_function_begins_leaves_the_lock_to_others_though_its_traceback_is_kept() -> (
    None
):
    """As in a notebook, which keeps the last traceback."""
    files = {numpy_random.__file__, contextlib.__file__}
    kept: list[BaseException] = []

    def strike_at(point: int) -> None:
        calls = itertools.count()

        def strike(frame: FrameType, event: str, argument: Any) -> None:
            if frame.f_code.co_filename in files and next(calls) == point:
                raise KeyboardInterrupt

        outer = sys.gettrace()
        sys.settrace(strike)
        try:
            np.random.set_bit_generator(ORIGINAL)
            numpy_random.install()
            np.random.set_state(np.random.get_state())
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.settrace(outer)

    def is_free() -> bool:
        taken: bool = ORIGINAL.lock.acquire(timeout=5)
        if taken:
            ORIGINAL.lock.release()
        return taken

    with ThreadPoolExecutor(1) as other:
        for point in itertools.count():
            strike_at(point)
            assert other.submit(is_free).result(), f"struck as function {point} began"
            if len(kept) == point:
                break
    assert len(kept) > 5
