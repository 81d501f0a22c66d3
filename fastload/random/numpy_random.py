"""NumPy's global random functions, routed to a state of the calling thread.

`np.random.rand` and its kin are methods of one RandomState, `np.random.mtrand._rand`, and many modules hold them by
names of their own. Every draw takes the lock of the bit generator. `install` gives that RandomState another bit
generator, by the public `np.random.set_bit_generator`. It has the original's memory and a lock of ours. In a thread
that called `enter`, taking the lock puts the thread's state into the memory, and releasing it puts the main state back.
Outside of draws the memory always holds the main state. All other threads take the original's lock, in C.

The private names of NumPy that it uses, beside the memory that `numpy_memory` finds. `_probe` tests all of them as the
module is loaded. If one differs, `unusable` says why: `worker_method="auto"` uses processes, and `"thread"` warns.

    np.random.mtrand._rand  the RandomState of the global functions: no public name leads to it
    _legacy_seeding()       what `np.random.seed` calls on its bit generator, here on the thread's state
    _seed_seq               what pickles and children of a bit generator are made from
    _bit_generator          what a RandomState draws from: a dataset may hold one

Before NumPy 2.4, `seed`, `get_state` and `set_state` touch the cached normal without the lock. So a sample that calls
them in a thread acts on the cached normal of the main state. Its words are the thread's own in all versions.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np

from fastload.random import numpy_memory

_USED_UP = np.int32(624).tobytes()  # the position from which the next draw computes 624 new words

_random: Any = np.random  # Any: the stubs know less of it
_MT19937: Any = np.random.MT19937
_RandomState: Any = np.random.RandomState
_rand: Any = np.random.mtrand._rand
_original: Any = _random.get_bit_generator()


class ThreadState:
    """The state of one thread: that of MT19937, and the cached normal. It is random until it is seeded."""

    __slots__ = ("gauss", "key", "words")

    def __init__(self) -> None:
        self.key: int | None = int.from_bytes(os.urandom(8), "little")  # None: not seeded since
        self.words = b""
        self.gauss = numpy_memory.NO_GAUSS

    def seed(self, key: int) -> None:
        """Start the stream of `key` at the next draw. Only 64 bits of `key` count.

        Only the thread that draws from the state may call this, and never during a draw.
        """
        self.key = key


def bit_generator_of(x: Any) -> Any:
    """Return what one of NumPy's generators draws from, or `x` itself if it is none."""
    if isinstance(x, np.random.Generator):
        return x.bit_generator
    return x._bit_generator if isinstance(x, _RandomState) else x


def unusable() -> str | None:
    """Return why `install` must not be called, as one clause, or None if it may."""
    if _failure is not None:
        return _failure
    if _random.get_bit_generator() in (_original, _route.bit_generator):
        return None
    return "np.random.set_bit_generator has replaced the global bit generator"


def install() -> None:
    """Route the global functions by thread. It lasts as long as the process, unless other code sets a bit generator."""
    _route.holding(_install)


def _install() -> None:
    if _random.get_bit_generator() is _original:
        gauss = _route.gauss.raw  # which setting a bit generator loses
        _random.set_bit_generator(_route.bit_generator)
        _route.gauss.raw = gauss


def enter(own: Callable[[], ThreadState] | None) -> None:
    """From now on, let the global functions act on the state that `own()` returns, in this thread.

    `own` is called at every draw. If it is None, they act on the global state again.
    """
    _route.enter(own)


class _Hook(threading.local):
    """The lock of the routed bit generator. Each thread has an `enter` and an `exit` of its own.

    Finding them runs no Python code. So in a thread without a state of its own, no signal handler can raise between
    taking and releasing the lock.
    """

    __enter__ = property(attrgetter("enter"))
    __exit__ = property(attrgetter("exit"))

    def __init__(self, lock: Any) -> None:
        self.enter: Callable[[], object] = lock.__enter__
        self.exit: Callable[..., object] = lock.__exit__
        self.swap: _Swap | None = None
        self.held = False


class _Swap:
    """Exchanges the main state for the state of one thread while that thread draws."""

    own: Callable[[], ThreadState]
    state: ThreadState
    main_words: bytes
    main_gauss: bytes

    # After a call, signal handlers and finalizers may run and draw. After reading an attribute, none runs.
    acquired = property(methodcaller("acquire"))

    def __init__(self, route: _Route) -> None:
        self.route, self.words, self.gauss = route, route.words, route.gauss
        self.acquire, self.release = route.lock.acquire, route.lock.release
        self.depth = 0  # 2 if a draw calls code that draws: `shuffle` calls `__setitem__`

    def enter(self) -> None:
        """Take the lock and put the thread's state in."""
        if self.depth:
            self.depth += 1
            return
        state = self.own()
        key = state.key
        words, gauss = self.words, self.gauss
        self.acquired  # noqa: B018
        self.main_words = words.raw
        self.main_gauss = gauss.raw
        self.state = state
        self.depth = 1
        if key is not None:
            state.words = self.route.first_words(key)
            state.gauss = numpy_memory.NO_GAUSS
            state.key = None
        words.raw = state.words
        gauss.raw = state.gauss

    def exit(self, *_: object) -> None:
        """Take the thread's state out, put the main state back and release the lock."""
        if self.depth == 1:
            state, words, gauss = self.state, self.words, self.gauss
            state.words = words.raw
            state.gauss = gauss.raw
            words.raw = self.main_words
            gauss.raw = self.main_gauss
            self.depth = 0
            self.release()
        else:
            self.depth -= 1


class _Route:
    """The link between a RandomState and its bit generator, whose memory and lock it uses."""

    def __init__(self, original: Any, random_state: Any = None) -> None:
        self.original = original
        # Owns the state in `words`, the cached normal in `gauss`, and the two scratch generators.
        self.lock = original.lock
        self.hook = _Hook(self.lock)
        self.bit_generator = _Routed(self)
        self.random_state = random_state or _RandomState(self.bit_generator)
        self.words = numpy_memory.words_of(original)
        self.gauss = numpy_memory.gauss_of(self.random_state)
        self.scratch = _MT19937(0)
        self.scratch._legacy_seeding(0)  # drops its SeedSequence
        self.scratch_words = numpy_memory.words_of(self.scratch)
        self.mixer = np.random.SFC64(0)
        self.mixer_words = np.ones(4, np.uint64)
        self.mixer_state: Any = {
            **self.mixer.state,
            "state": {"state": self.mixer_words},
        }

    def first_words(self, key: int) -> bytes:
        """Return 624 words that depend on all 64 bits of `key`, in less time than `RandomState.seed` takes."""
        self.mixer_words[:3] = key & 0xFFFFFFFFFFFFFFFF
        self.mixer.state = self.mixer_state
        return self.mixer.random_raw(12 + 312)[12:].tobytes() + _USED_UP  # 12: as SFC64 asks for

    def enter(self, own: Callable[[], ThreadState] | None) -> None:
        """See the function `enter`."""
        hook = self.hook
        swap = hook.swap
        if swap is None:
            swap = hook.swap = _Swap(self)
        while swap.depth:  # KeyboardInterrupt can keep `exit` from running
            swap.exit()
        if own is None:
            hook.enter, hook.exit, hook.swap = self.lock.__enter__, self.lock.__exit__, None
        else:
            hook.enter, hook.exit, swap.own = swap.enter, swap.exit, own

    def holding(self, act: Callable[..., Any], *args: Any) -> Any:
        """Call `act` while this thread holds the hook. Before NumPy 2.4 a thread cannot take the lock twice.

        It is not a context manager: Ctrl-C at the beginning of its `__exit__` would leave the lock taken.
        """
        hook = self.hook
        if hook.held:
            return act(*args)
        with hook:
            hook.held = True
            try:
                return act(*args)
            finally:
                hook.held = False

    def on_current(self, act: Callable[..., Any], *args: Any) -> Any:
        """Call `act` with a bit generator that has this thread's state, and store the state afterwards."""
        return self.holding(self._on_current, act, *args)

    def _on_current(self, act: Callable[..., Any], *args: Any) -> Any:
        if self.hook.swap is None:
            return act(self.original, *args)
        # The methods of the original would take its lock again, and forget its SeedSequence.
        self.scratch_words.raw = self.words.raw
        result = act(self.scratch, *args)
        self.words.raw = self.scratch_words.raw
        return result


class _Routed(_MT19937):  # type: ignore[misc]
    """Stands for the original bit generator. Its copies and pickles are plain MT19937 objects."""

    def __init__(self, route: _Route) -> None:
        super().__init__(0)
        self._route = route

    lock = property(lambda self: self._route.hook)
    capsule = property(lambda self: self._route.original.capsule)
    cffi = property(lambda self: self._route.original.cffi)
    ctypes = property(lambda self: self._route.original.ctypes)
    seed_seq = property(lambda self: self._route.original.seed_seq)
    _seed_seq = property(lambda self: self._route.original._seed_seq)

    @property
    def state(self) -> Any:
        return self._route.on_current(attrgetter("state"))

    @state.setter
    def state(self, value: Any) -> None:
        self._route.on_current(setattr, "state", value)

    def _legacy_seeding(self, seed: Any) -> None:
        self._call("_legacy_seeding", seed)
        if (swap := self._route.hook.swap) is not None:
            swap.state.gauss = numpy_memory.NO_GAUSS  # `seed` itself resets it in the memory

    def random_raw(self, size: Any = None, output: Any = True) -> Any:
        return self._call("random_raw", size, output)

    def jumped(self, jumps: Any = 1) -> Any:
        return self._route.on_current(methodcaller("jumped", jumps))

    def spawn(self, n_children: int) -> Any:
        return self._route.original.spawn(n_children)

    def __reduce__(self) -> Any:
        return self._route.on_current(methodcaller("__reduce__"))

    def _call(self, name: str, *args: Any) -> Any:
        """Call a method that itself takes the lock of its bit generator."""
        route = self._route
        if route.hook.swap is None:
            return getattr(route.original, name)(*args)
        return route.on_current(methodcaller(name, *args))


_Routed.__name__ = _Routed.__qualname__ = "MT19937"  # `str(np.random.mtrand._rand)` names it


def _probe() -> str | None:
    """Return a clause that says how NumPy or Python differs from what this module expects, or None."""
    if type(_original) is not _MT19937 or type(_rand) is not _RandomState:
        return "the global functions do not use NumPy's MT19937"
    try:
        if numpy_memory.words_are_as_expected():
            return None if _works() else "a test at the start drew other numbers than NumPy"
    except Exception as error:
        return f"NumPy's random state is not laid out as expected ({error!r})"
    return "NumPy's random state is not laid out as expected"


def _works() -> bool:
    """Return whether a thread's draws act on its own state only. All objects are our own."""
    route = _Route(_MT19937(0))
    routed, main, own = route.random_state, _RandomState(1), _RandomState(bits := _MT19937(0))
    state = ThreadState()
    state.seed(2)
    numpy_memory.words_of(bits).raw = route.first_words(2)
    routed.seed(1)
    right = [bit_generator_of(own) is bits]
    right += [routed.standard_normal() == main.standard_normal()]  # and the next one is cached
    route.enter(lambda: state)
    right += [numpy_memory.draws(routed) == numpy_memory.draws(own)]
    right += [routed.standard_normal() == own.standard_normal() for _ in range(2)]
    outside: list[list[str]] = []
    other = threading.Thread(target=lambda: outside.append(numpy_memory.draws(routed)))
    other.start()
    other.join()
    route.enter(None)
    right += [outside == [numpy_memory.draws(main)]]
    right += [routed.standard_normal() == main.standard_normal() for _ in range(2)]
    route.enter(lambda: state)
    routed.standard_normal()  # and the next one is cached
    routed.seed(3)
    right += [routed.standard_normal() == _RandomState(3).standard_normal()]
    route.enter(None)
    return all(right)


GLOBAL = [_original]
"""The bit generators of NumPy's global functions: the original, and the one that stands for it once installed."""

_failure = _probe()
if _failure is None:
    _route = _Route(_original, _rand)
    GLOBAL.append(_route.bit_generator)
    # If another thread held the lock during a fork, the child could never take it.
    os.register_at_fork(
        before=_route.lock.acquire,
        after_in_parent=_route.lock.release,
        after_in_child=_route.lock.release,
    )
