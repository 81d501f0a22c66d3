"""Random generators that a worker's copy holds. Each sample gives them a new key.

A sample's numbers must not depend on which samples the same worker read before. So every sample gives every generator
a new key, even if the previous sample drew nothing. Each time that takes about 3 us for a NumPy generator, 5 us for a
Python one and 2 us for one of torch's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import MT19937, PCG64, PCG64DXSM, SFC64, Philox, RandomState

from fastload._kit.hashing import hash64, mix64
from fastload.random.numpy_random import bit_generator_of


class Keyed:
    """The generators in one worker's copies, to which each sample gives new keys. One thread owns it.

    Args:
        generators: the path in the graph (`dataset.transform.R`) and the object. Generators that share a bit
            generator share one key, which depends on the first path. So do generators of one kind with equal states:
            they draw the same numbers, as they would in a worker process. Torch's generators for other devices than
            the CPU are not changed.
        own_state: whether a sample's draws also depend on the generator's present state. If False, they depend
            only on key and path.
    """

    def __init__(self, generators: Sequence[tuple[str, Any]], *, own_state: bool) -> None:
        self._streams: list[tuple[int, _Stream]] = []
        self._saved: list[Any] = []
        places: dict[tuple[str, str], str] = {}
        for place, source, users in _by_source(generators):
            state = repr(_plain(_state(source)))
            first = places.setdefault((type(source).__name__, state), place)
            salt = hash64(f"{first}\0{state if own_state else ''}")
            self._streams.append((salt, _stream(source, users, salt)))

    def begin(self, key: int) -> None:
        """Begin a sample, whose draws depend on `key`, 64 bits."""
        if not self._saved:
            self._saved = [stream.save() for _, stream in self._streams]
        for salt, stream in self._streams:
            stream.seed(mix64(key ^ salt))

    def restore(self) -> None:
        """Restore the state that each generator had at the first `begin()` since the last `restore()`."""
        for (_, stream), state in zip(self._streams, self._saved, strict=False):
            stream.put_back(state)
        self._saved = []  # last: if Ctrl-C strikes in the loop, another call restores all


class _Stream(NamedTuple):
    """Functions that act on the state of one generator."""

    seed: Callable[[int], object]
    save: Callable[[], Any]
    put_back: Callable[[Any], object]


def _stream(source: Any, users: list[Any], salt: int) -> _Stream:
    if isinstance(source, torch.Generator):  # torch uses the low 32 bits of a seed
        return _Stream(source.manual_seed, source.get_state, source.set_state)
    if isinstance(source, random.Random):
        base: Any = random.Random  # a subclass may override `seed`
        return _Stream(*(partial(f, source) for f in (base.seed, base.getstate, base.setstate)))
    return _numpy_stream(source, [u for u in users if isinstance(u, RandomState)], salt)


def _numpy_stream(source: Any, legacy: list[RandomState], salt: int) -> _Stream:
    """Return the stream of a bit generator and of each `RandomState` that draws from it."""
    set_key = _setter(source, salt)

    def seed(key: int) -> None:
        set_key(key)
        for user in legacy:
            RandomState.__init__(user, source)  # drops a cached normal number

    def save() -> Any:
        return source.state, [RandomState.get_state(user, legacy=False) for user in legacy]

    def put_back(saved: Any) -> None:
        source.state, states = saved
        for user, state in zip(legacy, states, strict=True):
            RandomState.set_state(user, state)

    return _Stream(seed, save, put_back)


_KINDS: tuple[Any, ...] = MT19937, PCG64, PCG64DXSM, Philox, SFC64


class _NoSeeds(np.random.bit_generator.ISeedSequence):
    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return np.ones(n_words, dtype)


def _setter(source: Any, salt: int) -> Callable[[int], object]:
    """Return a function that sets the state of a bit generator from 64 bits."""
    if isinstance(source, MT19937):
        seed = RandomState(source).seed  # 2 us for 32 bits, as torch uses; 13 us for 64
        return lambda key: seed(key & 0xFFFF_FFFF)
    kind = next((k for k in _KINDS if isinstance(source, k)), None)
    if kind is None:  # one of another library
        return lambda key: setattr(source, "state", type(source)(key).state)
    # Set all of the state: PCG64 would keep `inc`, the others their buffered numbers.
    state: Any = {**kind(_NoSeeds()).state, "bit_generator": type(source).__name__}
    words = state["state"]
    if "inc" in words:
        words["inc"] = salt << 64 | mix64(salt) | 1

    def set_state(key: int) -> None:
        more = mix64(key)
        if "inc" in words:
            words["state"] = key << 64 | more
        else:
            array = words["key" if kind is Philox else "state"]
            array[0], array[1] = key, more
        source.state = state

    return set_state


class NewGenerators:
    """Notices a random generator that a sample or `collate_fn` created and stored: nothing keys it.

    Args:
        known: the generators that are keyed, and their paths.
        search: finds all generators in the worker's copies now, and their paths.
        noticed: the set to which warnings are added, without the name of the dataset.
    """

    def __init__(
        self,
        known: Sequence[tuple[str, Any]],
        search: Callable[[], Sequence[tuple[str, Any]]],
        noticed: set[str],
    ) -> None:
        self._known = {id(x) for _, x in known}
        self._search, self._noticed = search, noticed
        self._new: dict[int, tuple[str, Any]] = {}  # they stay alive, so that their ids stay valid

    def look(self) -> None:
        """Search. A new generator that is found by two searches was stored."""
        try:
            found = self._search()
        except Exception:  # from a user's class: the search must not cost a batch
            found = []
        new = {
            id(x): (place, x)
            for place, x in found
            if id(x) not in self._known and not isinstance(x, np.random.BitGenerator)
        }
        for i in new.keys() & self._new.keys():
            self._noticed.add(
                f"seems to make the generator `{new[i][0]}` while a sample is read: what it draws depends on which "
                "worker reads which samples. Make it before the loop, in __init__ for example; then each sample has "
                "its own draws."
            )
        self._new = new


# ---- states ----


def _by_source(generators: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield the first path of each random state, its owner, and NumPy's generators that draw from it."""
    places: dict[int, tuple[str, Any, list[Any]]] = {}
    for place, generator in generators:
        if isinstance(generator, torch.Generator) and generator.device.type != "cpu":
            continue
        source = bit_generator_of(generator)
        users = places.setdefault(id(source), (place, source, []))[2]
        if source is not generator and not any(user is generator for user in users):
            users.append(generator)
    yield from places.values()


def _state(source: Any) -> Any:
    if isinstance(source, torch.Generator):
        return source.get_state().numpy()
    if isinstance(source, random.Random):
        return random.Random.getstate(source)
    return source.state


def _plain(state: Any) -> Any:
    """Return a state whose `repr` is the same in all versions and on all machines."""
    if isinstance(state, dict):
        return sorted((name, _plain(value)) for name, value in state.items())
    return state.tolist() if isinstance(state, np.ndarray) else state
