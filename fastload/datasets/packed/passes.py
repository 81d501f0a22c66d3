"""Passes over shards of a set, which threads read and check. Verifying and copying use them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence

from tqdm import tqdm

from fastload._kit.pool import in_order
from fastload.datasets.manifest import Index, Shard
from fastload.errors import PackedDataError, in_one_line

Pieces = Callable[[str, Index, Shard], Iterator[memoryview]]
"""Yields, in order, the bytes of a shard of the set at a path. Raises `PackedDataError` if a byte is wrong or missing.

A piece is valid until the next one is requested.
"""


class Checks:
    """Checks shards of the set at `path`. Once `stopped` is set, each thread ends after its present piece."""

    def __init__(self, path: str, index: Index, shards: Sequence[Shard], pieces: Pieces) -> None:
        self.path, self.index, self.shards, self.pieces = path, index, shards, pieces
        self.stopped = False

    def __call__(self, shard: Shard) -> str:
        """Return a sentence about what is wrong with a shard, or ""."""
        try:
            for _ in self.checked(shard):
                pass
        except (PackedDataError, OSError) as error:
            return in_one_line(error)
        return ""

    def checked(self, shard: Shard) -> Iterator[memoryview]:
        """Yield the pieces of a shard. Raises `PackedDataError` if one is wrong, InterruptedError after `stopped`."""
        for piece in self.pieces(self.path, self.index, shard):
            if self.stopped:
                raise InterruptedError(errno.EINTR, "stopped", os.path.join(self.path, shard.name))
            yield piece


def each(
    work: Checks, *, workers: int | None, progress: bool, what: str
) -> Iterator[tuple[Shard, str]]:
    """Yield each shard and what `work` returns for it, in order. The bar advances by the bytes of each shard."""
    with (
        in_order(work, work.shards, workers) as results,
        tqdm(
            desc=what,
            total=sum(shard.bytes for shard in work.shards),
            unit="B",
            unit_scale=True,
            leave=False,
            disable=None if progress else True,  # None: hidden unless standard error is a terminal
        ) as bar,
    ):
        try:
            for shard, result in zip(work.shards, results, strict=True):
                bar.update(shard.bytes)
                yield shard, result
        finally:
            work.stopped = True  # before the pool waits for calls in progress
