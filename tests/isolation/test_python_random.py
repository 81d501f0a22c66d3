"""Python's `random` acts on a generator of the calling thread, in threads that have entered, by whatever name.

In all other threads, and after the last `remove`, it is what it always was.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import unittest
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random, gauss, getstate, randint, seed, setstate, shuffle
from random import getrandbits as early_getrandbits
from random import random as early_random
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import pytest

from fastload.isolation import python_random

T = TypeVar("T")

# Arguments for all functions of the module that draw.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "betavariate": (2, 3),
    "choice": (range(1000),),
    "choices": (range(1000), None),
    "expovariate": (1.5,),
    "gammavariate": (2, 3),
    "gauss": (0, 1),
    "getrandbits": (70,),
    "lognormvariate": (0, 1),
    "normalvariate": (0, 1),
    "paretovariate": (2,),
    "randbytes": (9,),
    "randint": (0, 10**30),
    "random": (),
    "randrange": (0, 999, 7),
    "sample": (range(1000), 9),
    "triangular": (0, 1, 0.3),
    "uniform": (2, 3),
    "vonmisesvariate": (1, 2),
    "weibullvariate": (1, 2),
} | ({"binomialvariate": (50, 0.3)} if sys.version_info >= (3, 12) else {})

# The same functions by other names. Lambdas, because `install` replaces names in modules, not in lists.
NAMES: dict[str, tuple[Callable[[int], None], Callable[[], object]]] = {
    "module": (lambda s: random.seed(s), lambda: random.random()),
    "early, C": (lambda s: seed(s), lambda: (early_random(), early_getrandbits(40))),
    "early, Python": (lambda s: seed(s), lambda: (randint(0, 10**9), gauss(0, 1))),
    "_inst": (lambda s: random._inst.seed(s), lambda: random._inst.random()),
    "shuffle": (lambda s: seed(s), lambda: _shuffled()),
    "bytes": (lambda s: random.seed(str(s)), lambda: random.randbytes(5)),
}


def _shuffled() -> list[int]:
    numbers = list(range(9))
    shuffle(numbers)
    return numbers


def _attributes() -> dict[str, Any]:
    """Return all that `install` may change."""
    early = {"early random": early_random, "early getrandbits": early_getrandbits}
    names = {name: value for name, value in vars(random).items() if not name.startswith("__")}
    return {**names, "class": type(random._inst), **early}


def _changed(before: dict[str, Any]) -> list[str]:
    return [name for name, value in _attributes().items() if before.get(name) is not value]


@pytest.fixture
def installed() -> Iterator[None]:
    """Install, and see afterwards that everything is as before."""
    before = _attributes()
    python_random.install()
    yield
    python_random.remove()
    assert _changed(before) == []


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


def test_is_usable_here() -> None:
    assert python_random.unusable() is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("install", [True, False])
def test_another_thread_draws_between_two_equal_seeds(name: str, install: bool) -> None:
    """The order is forced. Without `install` the second draw is another's, so the test sees what it is for."""
    plant, draw = NAMES[name]
    seeded, drawn = threading.Barrier(2), threading.Barrier(2)

    def image_and_mask() -> bool:
        plant(7)
        image = draw()
        plant(7)
        seeded.wait()
        drawn.wait()
        return image == draw()

    def other() -> None:
        seeded.wait()
        plant(8)
        draw()
        drawn.wait()

    def run(function: Callable[[], T]) -> T:
        own = Random()
        python_random.enter(lambda: own)
        return function()

    if install:
        python_random.install()
    try:
        state = random.getstate()
        with ThreadPoolExecutor(2) as pool:
            equal, _ = pool.submit(run, image_and_mask), pool.submit(run, other)
        assert equal.result() is install
        assert (random.getstate() == state) is install
    finally:
        if install:
            python_random.remove()


def test_the_table_of_functions_is_complete() -> None:
    others = {"Random", "SystemRandom", "seed", "getstate", "setstate", "shuffle"}
    assert set(ARGUMENTS) == set(random.__all__) - others


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.usefixtures("installed")
def test_every_function_acts_on_the_own_generator(name: str) -> None:
    """The third draw shows what `gauss` keeps."""
    arguments, own, like_own, like_global = ARGUMENTS[name], Random(5), Random(5), Random(6)
    random.seed(6)

    def draw() -> list[Any]:
        return [getattr(random, name)(*arguments) for _ in range(3)]

    def expected(generator: Random) -> list[Any]:
        return [getattr(generator, name)(*arguments) for _ in range(3)]

    assert _entered(draw, own) == expected(like_own)
    assert own.getstate() == like_own.getstate()
    assert random.getstate() == Random(6).getstate()
    assert draw() == expected(like_global)
    assert random.getstate() == like_global.getstate()


@pytest.mark.usefixtures("installed")
def test_state_can_be_kept_and_put_back() -> None:
    def draw_twice() -> tuple[object, object]:
        gauss(0, 1)  # the second of the pair is part of the state
        state = getstate()
        first = gauss(0, 1), random.random()
        setstate(state)
        return first, (random.gauss(0, 1), early_random())

    state = random.getstate()
    first, second = _entered(draw_twice)
    assert first == second
    assert random.getstate() == state


@pytest.mark.usefixtures("installed")
def test_gauss_keeps_its_second_value_for_each_generator() -> None:
    random.seed(1)
    first, other = random.gauss(0, 1), _entered(lambda: random.gauss(0, 1), Random(2))
    expected = Random(1)
    assert [first, random.gauss(0, 1)] == [expected.gauss(0, 1), expected.gauss(0, 1)]
    assert other == Random(2).gauss(0, 1)


def test_own_is_asked_at_every_draw_and_the_thread_can_leave(installed: None) -> None:
    generators = [Random(i) for i in range(3)]

    def draw() -> list[float]:
        following = iter(generators)
        python_random.enter(lambda: next(following))
        drawn = [random.random() for _ in generators]
        python_random.enter(None)
        return [*drawn, random.random()]

    random.seed(9)
    assert _in_thread(draw) == [Random(i).random() for i in (0, 1, 2, 9)]


def test_a_thread_may_enter_before_install() -> None:
    def draw() -> float:
        python_random.enter(lambda: own)
        python_random.install()
        try:
            return random.random()
        finally:
            python_random.remove()

    own = Random(3)
    assert _in_thread(draw) == Random(3).random()


def test_names_in_modules_follow_and_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unloaded(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"`install` loaded this module by asking for {name}")

    real = random.random, random.getrandbits
    early, late = ModuleType("early"), ModuleType("late")
    early.draw, early.bits = real  # type: ignore[attr-defined]
    for module in (early, late, Unloaded("unloaded"), SimpleNamespace(draw=real[0])):
        monkeypatch.setitem(sys.modules, f"_test_{id(module)}", module)
    for _ in range(2):
        python_random.install()
        late.draw, late.bits = random.random, random.getrandbits  # type: ignore[attr-defined]
        for module in (early, late):
            assert _entered(module.draw) == Random(0).random()
            assert _entered(lambda m=module: m.bits(40)) == Random(0).getrandbits(40)  # type: ignore[misc]
        python_random.remove()
        for module in (early, late):
            assert module.draw is real[0]
            assert module.bits is real[1]


def test_modules_are_searched_only_when_something_holds_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Modules(dict[str, ModuleType]):
        searched = 0

        def values(self) -> Any:
            self.searched += 1
            return super().values()

    def searches() -> int:
        before = modules.searched
        python_random.install()
        python_random.remove()
        return modules.searched - before

    modules = Modules(sys.modules)
    stand_in = SimpleNamespace(getrefcount=sys.getrefcount, modules=modules)
    monkeypatch.setattr(python_random, "sys", stand_in)
    searches()  # learns the names of other modules
    assert searches() == 0
    modules["new"] = ModuleType("new")
    modules["new"].draw = random.random  # type: ignore[attr-defined]
    assert searches() == 1
    assert searches() == 0


@pytest.mark.usefixtures("installed")
def test_functions_look_as_ever() -> None:
    python_random.remove()
    functions = [name for name in random.__all__ if callable(getattr(random, name))]
    before = {name: inspect.signature(getattr(random, name)) for name in functions}
    documented = {name: getattr(random, name).__doc__ for name in functions}
    python_random.install()
    assert {name: inspect.signature(getattr(random, name)) for name in functions} == before
    assert {name: getattr(random, name).__doc__ for name in functions} == documented
    assert isinstance(random._inst, Random)
    for name in set(functions) - {"Random", "SystemRandom"}:
        assert getattr(random, name).__self__ is random._inst
        assert getattr(random, name).__name__ == name
    with pytest.raises(TypeError):
        random.random(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        random.getrandbits(k=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="number of bits"):
        random.getrandbits(-1)


@pytest.mark.usefixtures("installed")
def test_other_generators_are_untouched() -> None:
    class Own(Random):
        def random(self) -> float:
            return 0.25

    def draw() -> object:
        return Random(4).random(), Own().uniform(0, 1), random.SystemRandom().random()

    state = random.getstate()
    number, uniform, system = _entered(draw)  # type: ignore[misc]
    assert (number, uniform) == (Random(4).random(), 0.25)
    assert 0 <= system < 1
    assert random.getstate() == state


LOADER = """
import pickle, sys
inst, *functions = pickle.load(sys.stdin.buffer)
drawn = inst.random(), [f(*args) for f, args in functions]
assert "fastload" not in sys.modules
assert type(inst).__module__ == "random"
sys.stdout.buffer.write(pickle.dumps(drawn))
"""


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
@pytest.mark.usefixtures("installed")
def test_pickles_load_without_fastload(protocol: int) -> None:
    def pickled() -> bytes:
        held = [
            random._inst,
            (random.random, ()),
            (random.randint, (0, 99)),
            (early_getrandbits, (9,)),
        ]
        return pickle.dumps(held, protocol)

    def unpickled(pickle_: bytes) -> Any:
        command = [sys.executable, "-I", "-c", LOADER]
        return pickle.loads(
            subprocess.run(command, input=pickle_, capture_output=True, check=True).stdout
        )

    for planted, made in (
        (random.getstate(), pickled()),
        (Random(0).getstate(), _entered(pickled)),
    ):
        expected = Random()
        expected.setstate(planted)
        number = expected.random()
        bits = [expected.random(), expected.randint(0, 99), expected.getrandbits(9)]
        assert unpickled(made) == (number, bits)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.usefixtures("installed")
def test_copies_are_plain_generators(copied: Callable[[Random], Random]) -> None:
    twin = copied(random._inst)
    assert type(twin) is Random
    assert [twin.random(), twin.gauss(0, 1)] == [random.random(), random.gauss(0, 1)]
    own = Random(5)
    assert _entered(lambda: copied(random._inst), own).getstate() == own.getstate()


@pytest.mark.parametrize("count", [20_000])
def test_no_draw_is_wrong_under_stress(count: int, installed: None) -> None:
    """Eight threads seed twice and compare what they draw, by all names in turn."""
    threads, names = 8, list(NAMES.values())
    start = threading.Barrier(threads)

    def wrong(rank: int) -> int:
        own, found = Random(), 0
        python_random.enter(lambda: own)
        start.wait()
        for i in range(count // threads):
            plant, draw = names[i % len(names)]
            plant(i * threads + rank)
            first = draw()
            state = getstate()
            second = draw()
            setstate(state)
            repeated = draw()
            plant(i * threads + rank)
            found += first != draw() or second != repeated
        return found

    random.seed(3)
    random.gauss(0, 1)
    state, interval = random.getstate(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            assert sum(pool.map(wrong, range(threads))) == 0
    finally:
        sys.setswitchinterval(interval)
    assert random.getstate() == state


def test_install_and_remove_while_others_draw() -> None:
    """Two threads install and remove. A third, not entered, draws what it would draw alone; a fourth draws its own."""
    before, state, rounds = _attributes(), random.getstate(), 1_000
    ended = threading.Event()
    start = threading.Barrier(4)

    def install() -> None:
        start.wait()
        for _ in range(rounds):
            python_random.install()
            python_random.remove()

    def draw() -> list[Any]:
        start.wait()
        drawn: list[Any] = []
        while not ended.is_set() or len(drawn) < 100:
            numbers = early_random(), random.getrandbits(50), randint(0, 10**9), gauss(0, 1)
            drawn.append((numbers, _shuffled()))
        return drawn

    def draw_own() -> list[Any]:
        python_random.enter(lambda: own)
        python_random.install()
        try:
            return draw()
        finally:
            python_random.remove()

    own, interval = Random(1), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            outside, inside = pool.submit(draw), pool.submit(draw_own)
            for future in [pool.submit(install), pool.submit(install)]:
                future.result()
            ended.set()
    finally:
        ended.set()
        sys.setswitchinterval(interval)
    for drawn, start_state in ((outside.result(), state), (inside.result(), Random(1).getstate())):
        random.setstate(start_state)
        assert drawn == [
            ((random.random(), random.getrandbits(50), randint(0, 10**9), gauss(0, 1)), _shuffled())
            for _ in drawn
        ]
    assert _changed(before) == []


def _in_child(function: Callable[[], T]) -> T:
    """Return `function()` as computed by a child of `os.fork`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, pickle.dumps(function()))
        finally:
            os._exit(0)
    os.close(writer)
    try:
        with open(reader, "rb") as pipe:
            result: T = pickle.load(pipe)
            return result
    finally:
        os.kill(child, signal.SIGKILL)  # it may hang
        os.waitpid(child, 0)


@pytest.mark.usefixtures("installed")
def test_a_forked_child_seeds_its_global_generator_and_leaves_the_worker_s() -> None:
    """The child of a worker is no worker. What `own` needs may be locked in it for ever."""
    asked: list[int] = []
    generator = Random(5)

    def own() -> Random:
        asked.append(os.getpid())
        return generator

    def child() -> tuple[Any, Any, int]:
        state = random.getstate()
        random.seed(1)
        return state, random.random(), len(asked)

    def worker() -> tuple[tuple[Any, Any, int], float]:
        python_random.enter(own)
        return _in_child(child), random.random()

    state = random.getstate()
    for (child_state, drawn, asked_there), then in (_in_thread(worker), (_in_child(child), None)):
        assert child_state not in (state, Random(5).getstate())
        assert drawn == Random(1).random()
        assert asked_there == len(asked) - (then is not None)
        assert then in (None, Random(5).random())  # the parent's worker goes on
    assert random.getstate() == state


def test_a_fork_waits_for_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child finds the lock free, though another thread was inside of `install` when the fork began."""
    inside, forking = threading.Event(), threading.Event()
    real = python_random._replace

    def slow(old: list[Any], new: list[Any]) -> None:
        inside.set()
        assert forking.wait(30)
        real(old, new)

    def install_and_draw() -> float:
        python_random.install()
        random.seed(2)
        return random.random()

    monkeypatch.setattr(python_random, "_replace", slow)
    os.register_at_fork(before=forking.set)  # runs first, before the fork waits for the lock
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(python_random.install)
        assert inside.wait(30)
        assert _in_child(install_and_draw) == Random(2).random()
        future.result()
    python_random.remove()


def _send_draws(queue: Any) -> None:
    state = random.getstate()
    random.seed(4)
    queue.put((state, early_random()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.usefixtures("installed")
def test_processes_of_multiprocessing_draw(method: str) -> None:
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=_send_draws, args=(queue,))
    process.start()
    state, drawn = queue.get()
    process.join()
    process.close()
    queue.close()
    assert state != random.getstate()
    assert drawn == Random(4).random()


def test_says_why_it_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(python_random, "_TESTED", ())
        assert "on which it was not tested" in (python_random.unusable() or "")
    for broken in ("random", "getrandbits", "seed", "getstate", "setstate"):
        with monkeypatch.context() as patch:
            patch.delattr(python_random._Routed, broken)
            assert "drew other numbers" in (python_random._failure.__wrapped__() or ""), broken
    with monkeypatch.context() as patch:
        patch.setitem(python_random._STAND_INS, "random", ([math.sin], [None]))
        assert "had replaced `random.random`" in (python_random._failure.__wrapped__() or "")


def _cpython_tests() -> Any:
    try:
        return importlib.import_module("test.test_random")
    except ImportError:
        pytest.skip("this Python has no `test` package, which has CPython's own tests of `random`")


def _failures(module: Any) -> list[str]:
    """Run CPython's tests, and those of the Mersenne Twister also on `random._inst`."""

    class OnInst(module.MersenneTwister_TestBasicOps):  # type: ignore[misc]
        gen = random._inst

    load, result = unittest.defaultTestLoader.loadTestsFromTestCase, unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    load(OnInst).run(result)
    assert result.testsRun > 100
    return [f"{test}\n{trace}" for test, trace in result.failures + result.errors]


@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.usefixtures("installed")
def test_the_tests_of_cpython_pass(entered: bool) -> None:
    module = _cpython_tests()
    state = random.getstate()
    failures = _entered(lambda: _failures(module)) if entered else _failures(module)
    assert failures == []
    assert (random.getstate() == state) is entered


def test_after_ctrl_c_in_install_the_next_one_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(old: Any, new: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(python_random, "_replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            python_random.install()
    python_random.install()
    try:
        assert _entered(random.random) == Random(0).random()
    finally:
        python_random.remove()
        python_random.remove()
    assert type(random._inst) is Random  # type: ignore[attr-defined]
