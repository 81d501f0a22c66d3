"""Python's `random` functions, routed to a generator of the calling thread, as in a worker process.

Once installed, a thread that has entered draws from its own generator, whatever name it uses for a function. All other
threads draw from the global generator, and get the same numbers as without routing.

The functions of `random` are methods of one instance, `random._inst`. `install` gives it another class, in which the
few methods that reach the C generator use the thread's own. So this routes all names that are bound to Python methods,
even those imported long before. `random.random` and `random.getrandbits` are bound to C methods: `install` replaces
them in every module that holds them.

The private names of Python that it uses. `unusable` tests them at the first use, with all methods of `random`. If one
differs, it says why: `worker_method="auto"` uses processes, and `"thread"` warns.

    random._inst            the instance that all functions share. No public name leads to it
    Random._randbelow       what `randint` and `shuffle` draw by. Replaced for speed: each try would look for the thread
    gauss_next              of the instance: the second normal of a pair
"""

from __future__ import annotations

import _random
import contextlib
import functools
import os
import random
import sys
import threading
from collections.abc import Callable
from random import Random
from types import BuiltinMethodType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

GLOBAL: Random = getattr(random, "_inst", None) or Random()  # `unusable` tells if there is none
"""The generator of the functions of `random`."""

_c_random, _c_getrandbits = _random.Random.random, _random.Random.getrandbits
_c_getstate = _random.Random.getstate


class _Thread(threading.local):
    # `Any`, because a Random has attributes that its stubs do not know.
    own: Any = None  # the thread's generator, or `undrawn` until something draws from it
    undrawn: _Undrawn | None = None
    own_before_fork: Any = None


class _Undrawn:
    """Stands for the generator that `own()` returns, and gives its place to it when something draws."""

    def __init__(self, own: Callable[[], Random]) -> None:
        vars(self)["_own"] = own

    def __getattr__(self, name: str) -> Any:
        generator = _thread.own = self._own()
        return getattr(generator, name)

    def __setattr__(self, name: str, value: Any) -> None:  # `random.setstate` begins with it
        setattr(self._own(), name, value)


_thread = _Thread()


class _Routed(_random.Random):
    """Stands between `Random` and its C base, so that `super().seed()` and similar calls in `Random` call it."""

    @functools.wraps(_c_random)  # for the signature
    def random(self, /) -> Any:  # type: ignore[override]
        own = _thread.own
        return _c_random(self) if own is None else own.random()

    @functools.wraps(_c_getrandbits)
    def getrandbits(self, k: int, /) -> Any:  # type: ignore[override]
        own = _thread.own
        return _c_getrandbits(self, k) if own is None else own.getrandbits(k)

    def seed(self, n: Any = None, /) -> None:
        own = _thread.own
        if own is None:
            super().seed(n)
        else:
            own.seed(n)

    def getstate(self) -> Any:
        own = _thread.own
        return super().getstate() if own is None else own.getstate()[1]

    def setstate(self, state: Any, /) -> None:
        own = _thread.own
        if own is None:
            super().setstate(state)
        else:
            own.setstate((own.VERSION, state, own.gauss_next))


class _ThreadRandom(Random, _Routed):
    """The class of `random._inst` once installed."""

    @property
    def gauss_next(self) -> Any:
        own = _thread.own
        return self.__dict__["gauss_next"] if own is None else own.gauss_next

    @gauss_next.setter
    def gauss_next(self, value: float | None) -> None:
        own = _thread.own
        if own is None:
            self.__dict__["gauss_next"] = value
        else:
            own.gauss_next = value

    def _randbelow(self, n: int) -> Any:
        """Do what `Random` does, but look for the thread's own generator once, not at every try."""
        own = _thread.own
        k = n.bit_length()
        r = _c_getrandbits(self, k) if own is None else own.getrandbits(k)
        while r >= n:
            r = _c_getrandbits(self, k) if own is None else own.getrandbits(k)
        return r

    def __reduce__(self) -> Any:
        return Random, (), self.getstate()  # it can be loaded without fastload


_STAND_INS: dict[str, tuple[Any, Any]] = {
    name: (getattr(random, name), MethodType(getattr(_Routed, name), GLOBAL))
    for name in ("random", "getrandbits")
}
"""The functions in C, and what replaces them."""

# Owns `_places` and what follows, and is held while the class of `GLOBAL` and the names in modules change. It is
# reentrant because garbage collection, which can come at any time, may run a loader.
_lock = threading.RLock()
_places: list[tuple[dict[str, Any], str, str]] = []  # dict of a module, name there, function in C
_modules = 0  # how many there were when they were searched
_installed = False  # whether no module holds a function in C any more


def install() -> None:
    """Let the functions of `random` act on the generator of the calling thread, in threads that have entered.

    It lasts as long as the process. Every call looks again: Ctrl-C may have ended the one before, and other code may
    have put back a function.
    """
    global _installed
    with _lock:
        GLOBAL.__class__ = _ThreadRandom
        for name, (real, stand_in) in _STAND_INS.items():
            if vars(random).get(name) is real:  # first: what is imported meanwhile has the stand-in
                _installed = False
                setattr(random, name, stand_in)
        if not _installed:
            search()
            for held, key, name in _places:
                real, stand_in = _STAND_INS[name]
                if held.get(key) is real:
                    held[key] = stand_in
            _installed = True


def search() -> None:
    """Find the names in all modules that hold a function in C, whatever they are. A fork of this process knows them.

    This takes some milliseconds in a large program, and touches all modules.
    """
    global _modules
    names = {id(real): name for name, (real, _) in _STAND_INS.items()}
    with _lock:
        modules = list(sys.modules.values())
        for module in modules if len(modules) != _modules else ():
            # Not `isinstance`: cffi's libraries claim to be modules, but have no `__dict__`.
            if issubclass(type(module), ModuleType):
                held = object.__getattribute__(module, "__dict__")  # does not load a lazy module
                # At C speed, for few modules hold one: a program has a hundred thousand names.
                if not names.keys().isdisjoint(map(id, list(held.values()))):
                    found = [(key, id(value)) for key, value in list(held.items())]
                    _places.extend((held, key, names[i]) for key, i in found if i in names)
        _modules = len(modules)


def enter(own: Callable[[], Random] | None) -> None:
    """From now on, let `random` act on the generator that `own()` returns, in this thread.

    The first draw calls `own`, which may seed the generator. So does the first draw after `again`. If `own` is None,
    `random` acts on the global generator.
    """
    _thread.own = _thread.undrawn = own and _Undrawn(own)


def again() -> None:
    """Let the next draw of this thread call `own` again, if the thread has entered."""
    if _thread.own is not None:  # it is None in a fork
        _thread.own = _thread.undrawn


@functools.cache
def unusable() -> str | None:
    """Return a clause that says why `install` cannot be used here, or None if it can.

    The first call tests the routing on private generators, in 1 ms.
    """
    for name, (real, _) in _STAND_INS.items():
        if not isinstance(real, BuiltinMethodType) or real.__self__ is not GLOBAL:
            return f"other code had replaced `random.{name}`"
    methods = {k for k, v in vars(_random.Random).items() if type(v) is MethodDescriptorType}
    functions = {k for k, v in vars(random).items() if isinstance(v, BuiltinMethodType)}
    of_inst = {k for k in functions if getattr(random, k).__self__ is GLOBAL}
    if new := (methods - vars(_Routed).keys()) | (of_inst - _STAND_INS.keys()):
        return f"`random.{min(new)}` is in C, and nothing patches it"
    try:
        return None if _works() else "a test at the start drew other numbers than Python's `random`"
    except Exception as error:
        return f"a test at the start failed ({error!r})"


def _works() -> bool:
    """Return whether a thread that has entered draws from its own generator, and all others from the global one."""
    routed, own, was = Random(1), Random(2), (_thread.own, _thread.undrawn)
    global_state = _c_getstate(routed), {**vars(routed)}
    routed.__class__ = _ThreadRandom
    outside: list[Any] = []
    other = threading.Thread(target=lambda: outside.append(_draws(routed)))
    expected = _draws(Random())
    try:
        enter(lambda: own)
        right = [_draws(routed) == expected, (_c_getstate(routed), vars(routed)) == global_state]
        other.start()
        other.join()
    finally:
        _thread.own, _thread.undrawn = was
    right += [outside == [expected], own.getstate() == expected[-1]]
    return all(right) and _c_getstate(routed) == expected[-1][1]


def _draws(generator: Random) -> list[Any]:
    """Return what every method of `random` draws, even one that Python does not have yet, and the state after them."""
    generator.seed("fastload")
    drawn = [generator.gauss(0.0, 1.0)]
    state = generator.getstate()  # with the next normal
    drawn += [generator.gauss(0.0, 1.0), generator.random()]
    generator.setstate(state)
    tried: list[Any] = [(), (70,), ("abc",), ([1, 2, 3],), ("abc", 2), (1, 9), (9, 0.5)]
    for name in sorted(set(random.__all__) & {*dir(Random)} - {"seed", "setstate"}):
        for arguments in tried:
            with contextlib.suppress(Exception):  # it takes other arguments
                drawn.append(getattr(generator, name)(*arguments))
                break
    return [*drawn, generator.gauss(0.0, 1.0), generator.getstate()]


def _before_fork() -> None:
    # In the child, this thread is not a worker. There, Python's own handler must seed the global generator.
    _lock.acquire()
    _thread.own_before_fork, _thread.own = _thread.own, None


def _after_in_parent() -> None:
    _thread.own, _thread.own_before_fork = _thread.own_before_fork, None
    _lock.release()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_lock.release
)
