"""The keys of random streams: pure functions of seed, epoch, position and index."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload._kit.hashing import hash64, mix64, mix64s
from fastload._kit.integers import as_indices, global_position

_BATCH = 0x6261_7463_6800_0000  # separates the stream of a batch from that of its first sample


class StreamKeys:
    """The keys of all streams of one epoch, on one rank. Immutable.

    Args:
        seed, epoch: integers.
        rank, world_size, block: where local positions lie among all, as in `RankSampler`, so that a sample draws the
            same in a world of another size.
    """

    __slots__ = ("_place", "_seeded", "_unseeded")

    def __init__(
        self, seed: int, epoch: int, *, rank: int = 0, world_size: int = 1, block: int = 1
    ) -> None:
        self._seeded = mix64(mix64(seed) ^ epoch)
        self._unseeded = mix64(mix64(0) ^ epoch)
        self._place = rank, world_size, block

    def sample(self, position: int, index: Any, *, seeded: bool = True) -> int:
        """Return 64 bits for the sample `index` at a local position. With `seeded=False` they ignore the seed."""
        place = global_position(position, *self._place)
        key = self._seeded if seeded else self._unseeded
        return mix64(mix64(key ^ place) ^ _index_bits(index))

    def samples(self, position: int, indices: Sequence[Any]) -> NDArray[np.uint64]:
        """Return `sample` of each of `indices`, the first of which is at `position`: uint64[len(indices)]."""
        numbers = as_indices(indices)
        if numbers is None:
            keys = [self.sample(position + k, index) for k, index in enumerate(indices)]
            return np.array(keys, np.uint64)
        places = global_position(position + np.arange(len(numbers)), *self._place)
        mixed = mix64s(np.uint64(self._seeded) ^ places.astype(np.uint64))
        return mix64s(mixed ^ numbers.astype(np.uint64))

    def batch(self, position: int, first: Any, *, seeded: bool = True) -> int:
        """Return 64 bits for the batch that begins at a local position with the sample `first`."""
        return mix64(self.sample(position, first, seeded=seeded) ^ _BATCH)


def _index_bits(index: Any) -> int:
    try:
        return operator.index(index)
    except TypeError:  # another kind of key: hash its text, which is the same in every process
        return hash64(repr(index))
