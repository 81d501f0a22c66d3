"""The plan of an epoch in batches by a budget: which samples share a batch. It is a pure function of its arguments.

All is arithmetic of integers, and no Python code runs for each sample. So 100 million samples take seconds, and the
plan is the same on every machine and with every version of NumPy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload._kit.hashing import mix64

# Words computed at a time: large enough to hide NumPy's call overhead, small enough for the cache.
_CHUNK = 1 << 15
_AT_ONCE = 1 << 20  # samples sorted at a time, unless a pool is larger
_ROUNDS = 4  # of the bijection. With one or two, samples a fixed distance apart often share a pool
_Words = NDArray[np.uint64]


class TokenPlan(NamedTuple):
    """The batches of an epoch. Batch `k` has the samples `order[starts[k] : starts[k + 1]]`."""

    order: NDArray[Any]
    """The indices of all samples: uint32[samples], or int64 if there are 2**32 or more."""
    starts: NDArray[Any]
    """[batches + 1], of the dtype of `order`."""
    useful: int
    """The sum of all lengths."""
    padded: int
    """The sum over all batches of samples x longest."""


def make_plan(
    lengths: NDArray[Any],
    buckets: NDArray[Any] | None,
    key: int | None,
    *,
    budget: int,
    max_samples: int | None,
    pool: int,
) -> TokenPlan:
    """Return the plan that `key` selects, or the one in the order of the dataset for None.

    Samples are dealt to pools of about `pool` samples. A pool's samples are sorted by bucket, and longest first. Then
    each batch takes as many neighbours as the budget allows.

    Args:
        lengths: integers[samples], each from 1 to `budget`.
        buckets: integers[samples], each 0 or more.

    Raises ValueError if pool, bucket and length of a sample need more than 64 bits.
    """
    n = len(lengths)
    layout = _Layout(lengths, buckets, key, pool)
    dtype: Any = np.uint32 if n < 1 << 32 else np.int64
    order, starts = np.empty(n, dtype), [np.zeros(0, dtype)]
    cost = done = 0
    for begin in range(0, 1 << layout.bits if n else 0, layout.at_once):
        words = layout.sorted_words(begin)
        found = _starts(layout, words, min(budget, layout.top * n), max_samples or n)
        sizes = np.diff(found, append=len(words))
        cost += int((sizes * layout.lengths(words[found])).sum())
        starts.append((found + done).astype(dtype))
        layout.put_indices(words, order[done : done + len(words)])
        done += len(words)
    useful = int(lengths.sum(dtype=np.uint64))
    ends = np.array([n], dtype)
    return TokenPlan(order, np.concatenate([*starts, ends]), useful, cost)


class _Layout:
    """How a sample becomes a word of 64 bits. In the order of the words, those that may share a batch are neighbours.

    From the highest bits on: pool | bucket | longest of all - length | place in the pool. Pool and place together are
    what a bijection makes the index of. So the samples of a pool are known before any are sorted.
    """

    def __init__(
        self, lengths: NDArray[Any], buckets: NDArray[Any] | None, key: int | None, pool: int
    ) -> None:
        n = len(lengths)
        self._given, self._buckets = lengths, buckets
        self.top, self.bottom = (int(lengths.max()), int(lengths.min())) if n else (1, 1)
        groups = 0 if buckets is None else int(buckets.max(initial=0))
        self.bits = max(n - 1, 0).bit_length()
        # The number of pools is the power of two that is the closest to n / pool.
        pools = min(self.bits, ((n * n // (2 * pool * pool)).bit_length() + 1) // 2)
        place = self.bits - pools
        bucket = place + (self.top - self.bottom + 1).bit_length()
        needed = max(bucket + groups.bit_length() + pools, (n * self.top).bit_length() + 2)
        if needed > 64:
            raise ValueError(
                f"{n:,} samples, lengths from {self.bottom} to {self.top} and buckets need words of {needed} bits, and "
                "the plan has words of 64. Give lengths and budget in a coarser unit, and count buckets from 0"
            )
        self._index = _Bijection(self.bits, key)
        self._place, self._bucket = np.uint64(place), np.uint64(bucket)
        self._pool = np.uint64(bucket + groups.bit_length())
        self.at_once = max(1 << place, _AT_ONCE)

    def sorted_words(self, begin: int) -> _Words:
        """Return the sorted words of the samples in the pools at `begin` and the next: `at_once` places."""
        end = min(begin + self.at_once, 1 << self.bits)
        words, n = np.empty(end - begin, np.uint64), 0
        for a in range(begin, end, _CHUNK):
            x = np.arange(a, min(a + _CHUNK, end), dtype=np.uint64)
            index = self._index(x)
            inside = index < len(self._given)
            x, index = x[inside], index[inside].astype(np.int64)
            word = x >> self._place << self._pool | x & _ones(self._place)
            shorter = self.top - self._given[index].astype(np.int64)
            word |= shorter.astype(np.uint64) << self._place
            if self._buckets is not None:
                word |= self._buckets[index].astype(np.uint64) << self._bucket
            words[n : n + len(word)] = word
            n += len(word)
        words[:n].sort()
        return words[:n]

    def lengths(self, words: _Words) -> NDArray[np.int64]:
        """Return the lengths of samples."""
        below = words >> self._place & _ones(self._bucket - self._place)
        return self.top - below.astype(np.int64)

    def groups(self, words: _Words) -> _Words:
        """Return a number for the pool and the bucket of each sample."""
        return words >> self._bucket

    def first_of(self, words: _Words, length: NDArray[np.int64]) -> _Words:
        """Return the least word with the pool and the bucket of each of `words`, and a length of at most `length`."""
        below = (self.top - np.maximum(length, self.bottom - 1)).astype(np.uint64)
        return self.groups(words) << self._bucket | below << self._place

    def put_indices(self, words: _Words, out: NDArray[Any]) -> None:
        """Write the indices of samples to `out`."""
        for a in range(0, len(words), _CHUNK):
            word = words[a : a + _CHUNK]
            out[a : a + _CHUNK] = self._index(
                word >> self._pool << self._place | word & _ones(self._place)
            )


class _Bijection:
    """The bijection of 0..2**bits - 1 that `key` selects, or the identity for None.

    It multiplies by odd numbers, and mixes the upper half of the bits into the lower one.
    """

    def __init__(self, bits: int, key: int | None) -> None:
        self._bits = bits
        rounds = range(0 if key is None else _ROUNDS)
        self._rounds = [
            (mix64(2 * i ^ (key or 0)), mix64(2 * i + 1 ^ (key or 0)) | 1) for i in rounds
        ]

    def __call__(self, x: _Words) -> _Words:
        """Return the images of `x`."""
        x = x.copy()
        for more, odd in self._rounds:
            x += np.uint64(more)
            x *= np.uint64(odd)
            x &= _ones(self._bits)
            x ^= x >> np.uint64((self._bits + 1) // 2)
        return x


def _starts(layout: _Layout, words: _Words, budget: int, max_samples: int) -> NDArray[np.int64]:
    """Return the places at which batches begin among sorted words.

    All pools are cut at once. In each, a step finds the batches that come next and have equal numbers of samples.
    """
    n = len(words)
    begins = [np.zeros(min(1, n), np.int64)]
    for a in range(0, n, _CHUNK):
        groups = layout.groups(words[a : a + _CHUNK + 1])
        begins.append(np.flatnonzero(groups[1:] != groups[:-1]) + a + 1)
    at = np.concatenate(begins)
    end = np.append(at, n)[1:]
    runs = [(at[:0], at[:0], at[:0])]
    while len(at):
        longest = layout.lengths(words[at])
        count = np.minimum(budget // longest, max_samples)
        # Batches have more samples once these are short enough, but not more than allowed.
        more = np.where(count < max_samples, budget // (count + 1), 0)
        until = words.searchsorted(layout.first_of(words[at], more))
        number = -((at - until) // count)
        runs.append((at, count, number))
        at = at + count * number
        at, end = at[at < end], end[at < end]
    at, count, number = (np.concatenate(column) for column in zip(*runs, strict=True))
    firsts = np.repeat(np.cumsum(number) - number, number)
    nth = np.arange(len(firsts)) - firsts  # of its run
    starts: NDArray[np.int64] = np.repeat(at, number) + np.repeat(count, number) * nth
    starts.sort()
    return starts


def _ones(bits: int | np.uint64) -> np.uint64:
    return np.uint64((1 << int(bits)) - 1)
