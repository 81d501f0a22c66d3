"""Passes over shards of a set, which threads read and check. Verifying and copying use them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence

from torch.utils.data import Dataset
from tqdm import tqdm

from fastload.datasets.manifest import Index, Shard
from fastload.errors import PackedDataError, in_one_line
from fastload.loader import DataLoader

Pieces = Callable[[str, Index, Shard], Iterator[memoryview]]
"""Yields, in order, the bytes of a shard of the set at a path. Raises `PackedDataError` if a byte is wrong or missing.

A piece is valid until the next one is requested.
"""


class Checks(Dataset[str]):
    """A dataset that checks. Sample k says in a sentence what is wrong with shard k of the set at `path`, or is "".

    Once `stopped` is set, each worker ends after its present piece.
    """

    fastload_per_worker = ()

    def __init__(self, path: str, index: Index, shards: Sequence[Shard], pieces: Pieces) -> None:
        self.path, self.index, self.shards, self.pieces = path, index, shards, pieces
        self.stopped = False

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, number: int) -> str:
        try:
            for _ in self.checked(self.shards[number]):
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


def each(work: Checks, *, workers: int, progress: bool, what: str) -> Iterator[tuple[Shard, str]]:
    """Yield each shard and its sample, in order. The bar advances by the bytes of each shard."""
    loader: DataLoader[str] = DataLoader(work, batch_size=None, num_workers=min(workers, len(work)))
    with (
        loader,
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
            for shard, result in zip(work.shards, loader, strict=True):
                bar.update(shard.bytes)
                yield shard, result
        finally:
            work.stopped = True
