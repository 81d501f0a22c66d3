"""The address at which NumPy keeps the state of its global random functions.

NumPy has no public way to change this state without its lock, so `numpy_random` reads and writes the bytes themselves.
It tests that they are as expected, and routes nothing otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np

_WORDS = 2500  # bytes of an MT19937: uint32[624], int32 position
_GAUSS = 16  # bytes of the cached normal: int32 "there is one", 4 of padding, float64
NO_GAUSS = bytes(_GAUSS)


def _memory(owner: Any, offset: int, size: int) -> Any:
    """Return `size` bytes at `offset` in an object of a C type, to be read and written."""
    if not object.__basicsize__ <= offset <= type(owner).__basicsize__ - size:
        raise ValueError("the bytes are outside of the object")
    return (ctypes.c_char * size).from_address(id(owner) + offset)


def words_of(bit_generator: Any) -> Any:
    """Return the bytes of the state of an MT19937."""
    offset = bit_generator.ctypes.state_address - id(bit_generator)
    return _memory(bit_generator, offset, _WORDS)


def gauss_of(random_state: Any) -> Any:
    """Return the bytes of the cached normal of a RandomState. Raises ValueError if they are not found."""
    return _memory(random_state, _gauss_offset(), _GAUSS)


def _gauss_offset() -> int:
    """Find the cached normal in a RandomState, by setting it."""
    probe: Any = np.random.RandomState(0)
    every = _memory(probe, start := object.__basicsize__, type(probe).__basicsize__ - start)
    kind, key, position, *_ = probe.get_state()
    probe.set_state((kind, key, position, 0, 0.0))
    without = every.raw
    probe.set_state((kind, key, position, 1, value := 1.2345678901234567e-77))
    gauss = np.int64(1).tobytes() + np.float64(value).tobytes()
    at = every.raw.find(gauss)
    if at < 0 or every.raw != without[:at] + gauss + without[at + _GAUSS :]:
        raise ValueError("no cached normal")
    return int(start + at)


def words_are_as_expected() -> bool:
    """Return whether the bytes of an MT19937 are its words and its position."""
    bit_generator = np.random.MT19937(0)
    key = np.arange(624, dtype=np.uint32) * 2654435761
    bit_generator.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": 321}}
    return bool(words_of(bit_generator).raw == key.tobytes() + np.int32(321).tobytes())


def draws(random_state: Any) -> list[str]:
    """Return what each method of a RandomState draws."""
    drawn = []
    for name in sorted(set(dir(random_state)) - _NO_DRAWS):
        for arguments in () if name[0] == "_" else _ARGUMENTS:
            with contextlib.suppress(Exception):  # it takes other arguments
                drawn.append(f"{name} {getattr(random_state, name)(*arguments)!r}")
                break
    return drawn


_NO_DRAWS = {"seed", "get_state", "set_state", "random_integers"}  # the last one warns

_ARGUMENTS: tuple[tuple[Any, ...], ...] = ((), (9,), (0.5,), (9, 0.5), (0.5, 0.5), (0.1, 0.5, 0.9))
_ARGUMENTS += (9, 5, 4), ([0.5, 0.5],), (3, [0.5, 0.5]), ([0.0], [[1.0]])
"""Each method takes one of these, as methods do that NumPy does not have yet."""
