"""A rank's part of an iterable dataset, if the ranks must get equally many batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from fastload._kit.user_errors import contained
from fastload.random.streams import random_stream


@dataclass(eq=False)
class Part(IterableDataset[Any]):
    """Every rank reads all samples, in groups of `size * world_size`, and gives `size` of each group.

    The last group is filled up with samples of the first, as Accelerate's `IterableDatasetShard` does. Unlike it, a
    part's iterator tells in its state how many samples of the last group are new.

    Args:
        dataset: it gives the same samples on all ranks. All that it draws comes from `seed`, so that it does.
        size: of a rank's batch.
        drop_last: leave the last group out if it is not full.
    """

    dataset: Any
    size: int
    rank: int
    world_size: int
    drop_last: bool
    seed: int
    epoch: int = 0

    def __len__(self) -> int:
        """Return the number of all samples. Raise TypeError if the dataset does not know it."""
        return len(self.dataset)

    def batches(self) -> int:
        """Return the number of a rank's batches. Raise TypeError if the dataset has no length."""
        full, rest = divmod(len(self), self.size * self.world_size)
        return full + bool(rest and not self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, also in the dataset."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return _Groups(self)


class _Groups(Iterator[Any]):
    """One pass. Its state is a count: to resume, the samples are read again, with the same random numbers."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._key = [part.seed, part.epoch]
        self._samples: Iterator[Any] | None = None
        self._first: list[Any] = []  # the first group
        self._group: list[Any] = []  # the one that is being read
        self._count = 0
        self._new = 0
        self._mine: list[Any] = []  # of the latest group, what was not given yet

    def __next__(self) -> Any:
        if not self._mine:
            self._read_group()
        return self._mine.pop(0)

    def _read_group(self) -> None:
        part = self._part
        full = part.size * part.world_size
        seed, epoch = self._key
        worker = get_worker_info()
        with random_stream(
            seed=seed, epoch=epoch, position=self._count, index=worker.id if worker else 0
        ):
            if self._samples is None:
                self._samples = iter(part.dataset)
            while len(self._group) < full:
                try:
                    self._group.append(next(self._samples))
                except StopIteration:
                    break
        group, self._group = self._group, []
        if not group or (len(group) < full and part.drop_last):
            raise StopIteration
        self._first = self._first or group
        self._count += 1
        self._new = len(group) % full
        while len(group) < full:
            group = group + self._first
        self._mine = group[part.rank * part.size : (part.rank + 1) * part.size]

    def state_dict(self) -> dict[str, Any]:
        left = len(self._mine)
        return {"key": self._key, "groups": self._count, "left": left, "new": self._new}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._key = state["key"]
        while self._count < state["groups"]:
            try:
                self._read_group()
            except StopIteration:
                break
            except Exception as error:
                contained(error)  # it was delivered before
        self._mine = self._mine[len(self._mine) - state["left"] :]
