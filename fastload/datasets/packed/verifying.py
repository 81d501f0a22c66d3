"""The check of a whole packed set against its checksums, for the command `fastload set verify`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tqdm import tqdm

from fastload._kit.pool import in_order
from fastload.datasets.manifest import read_index
from fastload.datasets.packed.reader import PackedDataset
from fastload.errors import PackedDataError

PIECE = 64
"""Records that a worker verifies at a time."""


@dataclass(frozen=True)
class Verified:
    """The counts of what was read, and the faults: a sentence for each bad shard or record."""

    records: int
    bytes: int
    seconds: float
    bad: list[str]


def verify(
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    progress: bool = False,
    say: Callable[[str], None] | None = None,
) -> Verified:
    """Read everything in the set at `path`, and compare it with its checksums.

    Args:
        workers: threads. None: one for each CPU that this process may use. 0: only the calling thread.
        progress: a bar on standard error, if that is a terminal.
        say: called with the sentence about each fault when it is found, in the order of the records.

    Raises FileNotFoundError and `PackedDataError` if the index cannot be read. Memory: as `PackedDataset`.
    """
    dataset = PackedDataset(path, decode=False, verify="always")
    began, records, count = time.monotonic(), 0, 0
    bad: list[str] = []
    # None: hidden unless standard error is a terminal.
    bar = tqdm(total=len(dataset), unit="record", disable=None if progress else True)
    with bar, in_order(_Verifier(dataset), _pieces(path), workers) as results:
        for rows, size, found in results:
            for text in found:
                if text not in bad[-1:]:  # each piece of a bad shard says it
                    bad.append(text)
                    if say is not None:
                        say(text)
            records, count = records + rows, count + size
            bar.update(rows)
    dataset.close()
    return Verified(records, count, time.monotonic() - began, bad)


def _pieces(path: str | os.PathLike[str]) -> Iterator[tuple[str, range]]:
    """Yield the records of each shard, at most `PIECE` at a time, with the name of the shard."""
    end = 0
    for shard in read_index(os.fspath(path)).shards:
        begin, end = end, end + shard.rows
        for start in range(begin, end, PIECE):
            yield shard.name, range(start, min(start + PIECE, end))


class _Verifier:
    """Reads pieces of a set, and returns the number of records, their bytes and their faults."""

    def __init__(self, dataset: PackedDataset) -> None:
        self.dataset = dataset
        # The sentence about each bad shard, for all its pieces: each piece would read its columns again.
        self.bad_shards: dict[str, str] = {}

    def __call__(self, piece: tuple[str, range]) -> tuple[int, int, list[str]]:
        shard, records = piece
        size = 0
        bad: list[str] = []
        if shard not in self.bad_shards:
            try:
                self.dataset.load(records[0])
            except (PackedDataError, OSError) as error:
                self.bad_shards[shard] = str(error)
        for record in records:
            if shard in self.bad_shards:
                break
            try:
                size += len(self.dataset.read(record))
            except PackedDataError as error:
                if error.record is None:
                    self.bad_shards[shard] = str(error)
                else:
                    bad.append(f"{self.dataset.locate(record)}: {error.reason}")
            except OSError as error:
                bad.append(f"{self.dataset.locate(record)}: {error.strerror}")
        bad += [self.bad_shards[shard]] if shard in self.bad_shards else []
        return len(records), size, bad
