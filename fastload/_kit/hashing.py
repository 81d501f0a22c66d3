"""Hashes that are the same in every process and on every machine: random streams and shuffles depend on them."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

MASK = 0xFFFF_FFFF_FFFF_FFFF


def mix64(x: int) -> int:
    """Hash 64 bits to 64 bits, bijectively: the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).

    Only the low 64 bits of `x`, any integer, count.
    """
    x = (x + 0x9E37_79B9_7F4A_7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58_476D_1CE4_E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D0_49BB_1331_11EB) & MASK
    return x ^ (x >> 31)


def mix64s(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `mix64` of each element."""
    return finalized(x + np.uint64(0x9E37_79B9_7F4A_7C15))


def finalized(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `mix64` of each element without its first step, the addition."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))


def hash64(text: str) -> int:
    """Hash a string to 64 bits."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
