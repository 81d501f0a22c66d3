"""Hashes that are the same in every process and on every machine: random streams and shuffles depend on them."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

MASK = 0xFFFF_FFFF_FFFF_FFFF
GOLDEN = 0x9E37_79B9_7F4A_7C15
"""2**64 / the golden ratio: the fractions of its multiples lie evenly, however many."""


def mix64(x: int) -> int:
    """Hash 64 bits to 64 bits, bijectively: the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).

    Only the low 64 bits of `x`, any integer, count.
    """
    x = (x + GOLDEN) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58_476D_1CE4_E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D0_49BB_1331_11EB) & MASK
    return x ^ (x >> 31)


def mix64s(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `mix64` of each element."""
    return finalized(x + _GOLDEN)


def finalized(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `mix64` of each element without its first step, the addition."""
    x = (x ^ (x >> _30)) * _FIRST
    x = (x ^ (x >> _27)) * _SECOND
    return x ^ (x >> _31)


# Arrays, because NumPy takes 0.2 us to make one of a number, as long as the arithmetic of a batch's.
_WORDS = GOLDEN, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB, 30, 27, 31
_GOLDEN, _FIRST, _SECOND, _30, _27, _31 = (np.array(word, np.uint64) for word in _WORDS)


def hash64(text: str) -> int:
    """Hash a string to 64 bits."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
