"""Integers that users give: an argument, or the indices of a sampler."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", int, NDArray[np.int64])

BOOLS = {bool, np.bool_}
"""Integers for Python and NumPy, but not for torch, to which a bool is no index of a sample."""


def integer(name: str, value: object) -> int:
    """Return `value` as an int. Raise TypeError with the argument's name if it is not an integer."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def positive(name: str, value: object) -> int | None:
    """Return `value` as an int of 1 or more, or None. Raise TypeError or ValueError with the argument's name if not."""
    found = None if value is None else integer(name, value)
    if found is not None and found < 1:
        raise ValueError(f"{name} must be 1 or more, got {value}")
    return found


def global_position(k: T, rank: int, world_size: int, block: int = 1) -> T:
    """Return where local position `k` of a rank lies in the order of all, if blocks of neighbours go to ranks in turn.

    `k` is an int or an array of them.
    """
    if block == 1:
        return k * world_size + rank
    return (k // block * world_size + rank) * block + k % block


def as_indices(indices: Sequence[Any], length: int | None = None) -> NDArray[np.int64] | None:
    """Return indices as int64[n], or None if NumPy does not make int64 of them.

    With `length`, also return None if one is not from 0 to `length - 1`.
    """
    try:
        found = np.array(indices)
    except ValueError:  # some are sequences
        return None
    # NumPy makes integers of bools among integers. For torch a bool is no index of a sample.
    if found.dtype != np.int64 or found.ndim != 1 or not BOOLS.isdisjoint(map(type, indices)):
        return None
    # As uint64 a negative index is huge, so the largest one shows both ends.
    inside = length is None or not len(found) or int(np.max(found.view(np.uint64))) < length
    return found if inside else None
