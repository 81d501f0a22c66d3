"""The check of a whole packed set against its checksums, for the command `fastload verify`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.utils.data import Dataset
from tqdm import tqdm

from fastload._kit.cores import usable_cores
from fastload.datasets.manifest import read_index
from fastload.datasets.packed.reader import PackedDataset
from fastload.errors import PackedDataError
from fastload.loader import DataLoader

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
    if workers is None:
        workers = usable_cores()
    began, records, count = time.monotonic(), 0, 0
    bad: list[str] = []
    loader: DataLoader[tuple[int, int, list[str]]] = DataLoader(
        _Pieces(dataset), batch_size=None, collate_fn=tuple, num_workers=workers, seed=0
    )
    with loader, tqdm(total=len(dataset), unit="record", disable=None if progress else True) as bar:
        for rows, size, found in loader:
            for text in found:
                if text not in bad[-1:]:  # each piece of a bad shard says it
                    bad.append(text)
                    if say is not None:
                        say(text)
            records, count = records + rows, count + size
            bar.update(rows)
    dataset.close()
    return Verified(records, count, time.monotonic() - began, bad)


class _Pieces(Dataset[tuple[int, int, list[str]]]):
    """A dataset that verifies. Sample k reads up to `PIECE` records of one shard: their number, bytes and faults."""

    fastload_per_worker = ()

    def __init__(self, dataset: PackedDataset) -> None:
        self.dataset = dataset
        self.pieces: list[tuple[str, range]] = []
        # The sentence about each bad shard, for all its pieces: each piece would read its columns again.
        self.bad_shards: dict[str, str] = {}
        end = 0
        for shard in read_index(dataset.path).shards:
            begin, end = end, end + shard.rows
            starts = range(begin, end, PIECE)
            self.pieces += [(shard.name, range(k, min(k + PIECE, end))) for k in starts]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, number: int) -> tuple[int, int, list[str]]:
        shard, piece = self.pieces[number]
        size = 0
        bad: list[str] = []
        if shard not in self.bad_shards:
            try:
                self.dataset.load(piece[0])
            except (PackedDataError, OSError) as error:
                self.bad_shards[shard] = str(error)
        for record in piece:
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
        return len(piece), size, bad
