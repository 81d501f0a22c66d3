"""What is read next, and what the loop has had of it: the loop's own side of an epoch.

A state describes what was *delivered*. It is restored by slicing the order where the order is a
function, else by running the sampler again up to there; never by reading samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
)

from fastload import draws
from fastload.batch import Batch
from fastload.draws import Draws, single_sampler
from fastload.faults import contained
from fastload.fetch import Fetcher
from fastload.randomness import StreamKeys
from fastload.sampler import RankSampler, random_batches
from fastload.telemetry import Recorder

_LOOKS = 5
"""How often it is looked what a sampler draws from: once for its beginning, then that each of four indices
or batches changed it is no chance, as a worker's draw in the same moment would be."""


class Order(ABC):
    """The batches of one epoch, and which of them the loop has had.

    Args:
        epoch, rank: which part of which epoch.
        sampler_epoch: the sampler's own number of it, where it has one that may be another.
        about: what a state must agree on; see `state.describe`.

    Everything here but `state` runs on the loop's thread, as in torch: the sampler is user code, and so races
    with nothing.
    """

    def __init__(
        self, *, epoch: int, rank: int, about: dict[str, Any], sampler_epoch: int | None = None
    ) -> None:
        self.epoch = epoch
        self._sampler_epoch = sampler_epoch
        self.about = about
        self.recorders: list[Recorder] = []  # of this epoch, by worker
        self.exhausted = False  # there are no more batches
        self._rank = rank

    def begin(self, seed: int, recorders: list[Recorder]) -> None:
        """Fix the random streams, by `seed`; from now on batches may be asked for."""
        self.seed = seed
        self.recorders = recorders

    @abstractmethod
    def __next__(self) -> Batch:
        """The next batch to be read; at the end sets `exhausted`, and raises StopIteration."""

    @abstractmethod
    def delivered(self, batch: Batch) -> None:
        """The loop has had `batch`: its data, its error, or nothing where it was left out."""

    @abstractmethod
    def end(self) -> None:
        """The loop has been told that there is no more."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what was delivered, as JSON values; see `DataLoader.state_dict`. Any thread may call it.

        What changes as batches are delivered is one tuple, replaced at once: no lock is needed.
        """

    def _common(self, *, ended: bool) -> dict[str, Any]:
        return {
            **self.about,
            "stream_seed": self.seed,
            "epoch": self.epoch,
            "sampler_epoch": self._sampler_epoch,
            "ended": ended,
        }


class _Delivered(NamedTuple):
    """What was delivered of an epoch of a map-style dataset."""

    batches: int
    position: int
    """Where in the order the last of them ended."""
    ahead: dict[int, int | None]
    """Delivered before batches that were not (in_order=False): where each ended, by ordinal. None if it comes from a
    saved state and has not been read again."""
    ended: bool = False
    draws: Draws | None = None
    """What the sampler draws from once the epoch has ended."""


class SampledOrder(Order):
    """The batches of one epoch of a map-style data set, in its sampler's order.

    Args:
        sampler: torch's "index sampler": of batches, or without batching of indices.
        fetcher: makes the batches.
        resume: a state that passed `state.check`: begin behind what it says was delivered.
        the others: see `Order`.
    """

    def __init__(
        self,
        sampler: Any,
        fetcher: Fetcher,
        *,
        epoch: int,
        resume: dict[str, Any] | None = None,
        **part: Any,
    ) -> None:
        super().__init__(epoch=epoch, **part)
        self._fetcher = fetcher
        self._sampler = sampler
        self._world_size = self.about["world_size"]
        self._ordinal = resume["batches"] if resume else 0
        # Rounded up: only the end of an epoch is no multiple, and behind it there is nothing.
        self._position = -(-resume["position"] // self._world_size) if resume else 0
        self._delivered = _Delivered(
            self._ordinal, self._position, dict.fromkeys(resume["ahead"]) if resume else {}
        )
        # What the sampler draws from, as it was before; None where it draws nothing.
        self._draws: Draws | None = resume["draws"] if resume else None
        # Looks at what it draws from as it is asked: the first, then some that tell of each index.
        self._looks, self._changes = 0, Counter[str]()
        self._early: Draws = {}  # what it drew from in `__iter__`; a generator will when it is asked
        indices: Iterator[Any] | None = None
        if is_function(sampler):
            self._looks = _LOOKS
        elif self._draws is not None:
            self._looks = 1
        else:
            before = draws.take(sampler)
            indices = _behind(sampler, epoch, self._ordinal, self._position)
            self._early = draws.changed(before, draws.take(sampler))
            self._draws = before
        self._indices = indices or self._rest()

    def begin(self, seed: int, recorders: list[Recorder]) -> None:
        """See `Order`. From now on the sampler is asked."""
        super().begin(seed, recorders)
        self._keys = StreamKeys(seed, self.epoch, rank=self._rank, world_size=self._world_size)
        if not self._looks:
            self._draws = {**draws.take(self._sampler), **self._early}

    def _rest(self) -> Iterator[Any]:
        """What the sampler has left from here on, run again up to here."""
        with draws.drawing_as_then(self._sampler, self._draws):
            rest = _behind(self._sampler, self.epoch, self._ordinal, self._position)
            return rest if is_function(self._sampler) else chain(list(islice(rest, 1)), rest)

    def __next__(self) -> Batch:
        while True:
            try:
                batch = self._next()
            except StopIteration:
                self.exhausted = True
                raise
            self._ordinal += 1
            self._position += batch.size
            if batch.ordinal not in self._delivered.ahead:
                return batch
            self.delivered(batch)

    def _next(self) -> Batch:
        place: dict[str, Any] = {
            "keys": self._keys,
            "recorders": self.recorders,
            "epoch": self.epoch,
            "ordinal": self._ordinal,
            "position": self._position,
        }
        try:
            given = next(self._indices) if self._looks >= _LOOKS else self._watched(self._indices)
            return self._fetcher.batch(given, **place)
        except StopIteration:
            raise
        except BaseException as exc:
            batch = Batch(0, [], size=0, **place)
            batch.error, batch.where = contained(exc), f"{batch}; stage: sampler"
            return batch

    def _watched(self, indices: Iterator[Any]) -> Any:
        """What `indices` gives next; what the sampler draws from is kept of `_draws` at first, and counted then."""
        before = draws.take(self._sampler)
        given = next(indices)
        drawn = draws.changed(before, draws.take(self._sampler))
        if not self._looks:
            unused = {name: None for name in ("numpy", "python") if name not in drawn}
            self._draws = {**before, **unused, **self._early}
        else:
            self._changes.update(list(drawn))
        self._looks = _LOOKS if draws.is_torchs(self._sampler) else self._looks + 1
        return given

    @property
    def draws_late(self) -> list[str]:
        """The global states that the sampler seems to draw from with each index: no state can bring that back."""
        return [what for name, what in draws.GLOBAL.items() if self._changes[name] == _LOOKS - 1]

    def delivered(self, batch: Batch) -> None:
        """See `Order`."""
        had = self._delivered
        ahead = {**had.ahead, batch.ordinal: batch.position + batch.size}
        batches, position = had.batches, had.position
        while (end := ahead.get(batches)) is not None:
            del ahead[batches]
            batches, position = batches + 1, end
        self._delivered = _Delivered(batches, position, ahead)

    def end(self) -> None:
        """See `Order`."""
        after = self._draws
        if after is not None:
            after = {**draws.take(self._sampler), "numpy": None, "python": None}
        self._delivered = self._delivered._replace(ended=True, draws=after)

    def state(self) -> dict[str, Any]:
        """See `Order`."""
        had = self._delivered
        position = position_behind(self._sampler, self._world_size, had.batches)
        if position is None:
            position = had.position * self._world_size
        return {
            **self._common(ended=had.ended),
            "batches": had.batches,
            "position": position,
            "ahead": sorted(had.ahead),
            "ahead_on_rank": self._rank if had.ahead else None,
            "draws": had.draws if had.ended else self._draws,
        }


def position_behind(sampler: Any, world_size: int, batches: int) -> int | None:
    """The global position behind so many batches, which is the same on ranks that had fewer samples in the last one.

    None where it is no function of their number.
    """
    if not is_function(sampler):
        return None
    single = single_sampler(sampler)
    step = world_size * (1 if sampler is single else sampler.batch_size)
    length = single.length if isinstance(single, RankSampler) else len(single) * world_size
    return int(min(batches * step, length))


def partition(sampler: Any, dataset: Any) -> tuple[int, int]:
    """The rank and the world size by which positions stride: the sampler's, the data set's, or torch.distributed's."""
    single = single_sampler(sampler)
    if isinstance(single, RankSampler):
        return single.rank, single.world_size
    if isinstance(single, DistributedSampler):
        return int(single.rank), int(single.num_replicas)
    part = _part_of_rank(dataset)
    if part is not None and hasattr(part, "world_size"):
        return int(part.rank), int(part.world_size)
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _part_of_rank(dataset: Any) -> Any:
    """Return what holds only the samples of its rank: the dataset, or one in torch's wrappers. None if nothing does."""
    if getattr(dataset, "partitioned_by_rank", False):
        return dataset
    held: Iterable[Any] = ()
    if isinstance(dataset, Subset):
        held = (dataset.dataset,)
    elif isinstance(dataset, ConcatDataset):
        held = dataset.datasets
    elif isinstance(dataset, StackDataset):
        held = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
    return next((part for part in map(_part_of_rank, held) if part is not None), None)


def refuse_two_partitions(dataset: Any, samplers: list[Any]) -> None:
    """Raise ValueError if a sampler would take a rank's part of what is one already."""
    part = _part_of_rank(dataset)
    if part is None:
        return
    for sampler in samplers:
        world_size = getattr(sampler, "world_size", getattr(sampler, "num_replicas", 1))
        if world_size > 1:
            raise ValueError(
                f"{type(part).__name__} holds only the part of its rank, and {type(sampler).__name__} "
                f"would take one of {world_size} parts of that: give the whole data set to the sampler, "
                "or drop the sampler"
            )


def is_function(sampler: Any) -> bool:
    """Whether the order is a function of what the sampler says of itself: nothing is drawn."""
    single = single_sampler(sampler)
    return type(single) in (RankSampler, SequentialSampler) and type(sampler) in (
        BatchSampler,
        type(single),
    )


def _behind(sampler: Any, epoch: int, batches: int, samples: int) -> Iterator[Any]:
    """What `sampler` gives in an epoch after so many batches with so many samples."""
    single = single_sampler(sampler)
    if type(sampler) is BatchSampler and (samples or is_function(sampler)):
        rest = _behind(single, epoch, samples, samples)
        return iter(BatchSampler(rest, sampler.batch_size, sampler.drop_last))
    if type(sampler) is BatchSampler and type(single) is RandomSampler and not single.replacement:
        return islice(random_batches(sampler), batches, None)
    if sampler is single and type(single) is RankSampler:
        return single.ordered(epoch, samples)
    if sampler is single and type(single) is SequentialSampler:
        return iter(range(samples, len(single)))
    return islice(iter(sampler), batches, None) if batches else iter(sampler)
