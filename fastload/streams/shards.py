"""The source of streams: shards of files, dealt to readers."""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload._kit.hashing import mix64
from fastload._kit.integers import integer
from fastload._kit.user_errors import annotate
from fastload.remote.files import StoredPath, store_from
from fastload.streams.chain import Stream
from fastload.streams.formats import Format, Record, format_of
from fastload.streams.passes import Draws, Element, Mark, Pass, Place, Run


class Shards(Stream):
    """A stream of the samples of files, each of which holds many.

    Each file is a shard. The order of the shards depends on the seed and the epoch. A shard is read from its beginning
    to its end. The workers of all ranks, the readers, take the shards of that order in turn. If there are fewer
    shards than readers, each shard is divided into as many ranges as are needed, if its format can seek.

    Args:
        paths: names of the files, the same on all ranks and in the same order. Or what `read` opens.
        read: "jsonl", "jsonl.gz", "parquet", "arrow", "tar", or a function that returns an iterator over a shard.
            None: the ending of the first path says which.
        counts: the number of samples of each path, if you know them. Then `EvenSteps` needs no word between ranks.
        shuffle: whether the order of the shards depends on the epoch. If not, it is that of `paths`.
        seed: makes that order.
        rank, world_size: those of this process. None: of torch.distributed, if that is initialised as an epoch begins,
            else 0 and 1.
        store: reads `paths`, which are then paths or URLs in it: a `fastload.remote.Store`, or what `open_store` takes,
            such as a file system of fsspec. A function `read` may call `path.store.open(path)`.

    Examples:
        >>> stream = fastload.streams.Shards(["numbers.jsonl"], seed=7)
        >>> [*stream]
        [[1, 2], [3]]
    """

    def __init__(
        self,
        paths: Sequence[Any],
        read: str | Callable[[Any], Iterator[Any]] | None = None,
        *,
        counts: Sequence[int] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        store: Any = None,
    ) -> None:
        if isinstance(paths, str) or not (
            hasattr(paths, "__getitem__") and hasattr(paths, "__len__")
        ):
            raise TypeError(
                f"paths must be a sequence of paths in an order that all ranks know, got a {type(paths).__name__}. "
                "Use sorted()"
            )
        self.paths = list(paths)
        if not self.paths:
            raise ValueError("paths must name at least one shard, got none")
        if counts is not None and (len(counts) != len(self.paths) or min(counts) < 0):
            raise ValueError(
                f"counts must be {len(self.paths)} numbers of 0 or more, one for each path, got {len(counts)} from "
                f"{min(counts)}"
            )
        self.counts = None if counts is None else np.array([integer("counts", n) for n in counts])
        self.store = store_from(store)
        """Reads the shards, or None if their paths say what does."""
        self.format: Format = format_of(read, self.paths[0])
        super().__init__()
        names = [_name_of(path) for path in self.paths]
        self._names = zlib.crc32("\0".join(names).encode("utf-8", "surrogateescape"))
        self.shuffles, self.seed = bool(shuffle), integer("seed", seed)
        rank_of(rank, world_size)  # it raises for wrong ones
        self._place = rank, world_size

    def __getstate__(self) -> dict[str, Any]:
        # A worker process knows no ranks.
        return {**vars(self), "_place": rank_of(*self._place)}

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return rank_of(*self._place)[0]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return rank_of(*self._place)[1]

    @property
    def form(self) -> str:
        """See `Stream`. The files may be in another folder when it is resumed."""
        kind = type(self.format).__name__
        paths = f"{len(self.paths)} paths of checksum {self._names:x}, read as {kind}"
        return f"Shards({paths}, shuffle={self.shuffles}, seed={self.seed})"

    def count(self, place: Place) -> int | None:
        """See `Stream`. That of ranges of shards is not known."""
        if self.counts is None or (self.format.seeks and place.readers > len(self.paths)):
            return None
        return int(self.counts[self.order(place.epoch)[place.reader :: place.readers]].sum())

    def warning(self, workers: int) -> str:
        """See `Stream`."""
        if (
            self._place == (None, None)
            and self.world_size == 1
            and os.environ.get("WORLD_SIZE", "1") not in ("0", "1")
        ):
            return (
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialised, so "
                "every rank reads all shards. Initialise it first, or give rank and world_size"
            )
        readers, n = workers * self.world_size, len(self.paths)
        if self.format.seeks or readers <= n:
            return ""
        return (
            f"{readers - n} of {readers} workers have nothing to read, for a shard is read from its beginning, and "
            f"paths names {n}. Take fewer workers, or write more shards"
        )

    def open(self, place: Place, mark: Mark = None) -> Pass:
        """See `Stream`. The mark has a share, the place in its list of items, and the position in that item.

        A share names the items that a reader reads: [readers, reader, number of ranges of each shard, what is left].
        What is left is None for all, or the items of passes that were dealt anew.
        """
        if mark is None:
            ranges = -(-place.readers // len(self.paths)) if self.format.seeks else 1
            mark = [[place.readers, place.reader, ranges, None], 0, None]
        return _ShardsPass(self, place, *mark)

    def items(self, share: Any) -> list[list[Any]]:
        """Return what a reader reads, in order: for each the number of a range of a shard, and where it begins."""
        readers, reader, ranges, left = share
        if left is None:
            return [[k, None] for k in range(reader, len(self.paths) * ranges, readers)]
        whole = np.flatnonzero(_bits(left["whole"]))
        return [*left["begun"], *([int(k), None] for k in whole)][reader::readers]

    def deal(self, marks: list[Mark], place: Place) -> list[Mark]:
        """See `Stream`. The rest of each range goes to one reader. If there are too few, each is divided again."""
        begun: list[Any] = []
        readers = place.readers
        ranges = marks[0][0][2]
        whole = np.zeros(len(self.paths) * ranges, bool)
        for share, k, position in marks:
            for number, start in self.items(share)[k:]:
                at = start if position is None else position
                position = None  # it belongs to the first item
                if at is None:
                    whole[number] = True
                else:
                    begun.append([number, at])
        left = len(begun) + int(whole.sum())
        parts = -(-readers // left) if self.format.seeks and left else 1
        if parts > 1 and len(whole) * parts <= _MOST_RANGES:
            # The parts of a range lie within it, for all formats divide a shard evenly.
            begun = [[number * parts + j, at] for number, at in begun for j in range(parts)]
            whole, ranges = whole.repeat(parts), ranges * parts
        packed = base64.b64encode(np.packbits(whole).tobytes()).decode()
        rest = {"begun": sorted(begun), "whole": packed}
        return [[[readers, reader, ranges, rest], 0, None] for reader in range(readers)]

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the numbers of the shards in the order of an epoch: int64[n]."""
        n = len(self.paths)
        if not self.shuffles:
            return np.arange(n)
        key = mix64(mix64(self.seed) ^ epoch)
        return np.random.Generator(np.random.Philox(key=key)).permutation(n)


_MOST_RANGES = 1 << 16
"""Into how many ranges all shards may be divided again: the state has a bit for each."""


class _ShardsPass(Run):
    def __init__(self, stream: Shards, place: Place, share: Any, item: int, position: Any) -> None:
        self._stream, self._share = stream, share
        self._item, self._position = item, position
        self._items, self._order = stream.items(share), stream.order(place.epoch)
        self._shard, self._draws = 0, Draws(stream, place)
        self._records: Iterator[Record] | None = None  # of the present item

    def mark(self) -> Mark:
        """See `Pass`."""
        return [self._share, self._item, self._position]

    def take(self, elements: list[Element], count: int) -> None:
        """See `Pass`."""
        wanted, sample_of = len(elements) + count, self._stream.format.sample
        try:
            while len(elements) < wanted and self._item < len(self._items):
                records = self._records or self._opened()
                for position, self._position, record in islice(records, wanted - len(elements)):
                    elements.append(((self._shard << 48) + position, sample_of(record)))
                if len(elements) < wanted:
                    self._item, self._position, self._records = self._item + 1, None, None
        except BaseException as error:
            path, before = self._stream.paths[self._shard], self._position
            annotate(error, f"shard {path}; before position {before}")
            raise

    def _opened(self) -> Iterator[Record]:
        self._records = iter(())  # if it cannot be opened, the next call passes it over
        number, start = self._items[self._item]
        form, ranges = self._stream.format, self._share[2]
        self._shard = int(self._order[number // ranges])
        path, begin, stop = self._stream.paths[self._shard], 0, None
        if self._stream.store is not None:
            path = StoredPath(path, self._stream.store)
        if ranges > 1:
            begin, stop = form.bounds(path, number % ranges, ranges)
        if self._position is None:
            self._position = begin if start is None else max(begin, start)
        if form.seeks:
            self._records = form.read(path, self._position, stop)
        else:  # a function that draws must draw the same for the samples that are passed over
            records = self._draws.each(form.read(path, 0, None), mix64(self._shard))
            self._records = islice(records, self._position, None)
        return self._records


def _name_of(path: Any) -> str:
    if isinstance(path, str | os.PathLike):
        return os.path.basename(os.fsdecode(path))
    return str(path) if isinstance(path, int) else type(path).__name__


def _bits(text: str) -> NDArray[np.uint8]:
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8))


def rank_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank and the number of ranks: those given, or those of torch.distributed."""
    import torch.distributed as dist

    if (rank is None) != (world_size is None):
        raise ValueError(f"give rank and world_size both or neither, got {rank=} and {world_size=}")
    if rank is None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    ours = rank or 0, world_size or 1
    if not 0 <= ours[0] < ours[1]:
        raise ValueError(f"rank must be from 0 to world_size - 1, got {rank=} and {world_size=}")
    return ours
