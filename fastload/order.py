"""What is read next, and what the loop has had of it: the loop's own side of an epoch.

A state describes what was *delivered*. If the order is a function, it is restored by slicing; else by running the
sampler again up to there. No sample is read for it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from fastload import sampler_state
from fastload.batch import Batch
from fastload.errors import StateError
from fastload.partition import partition
from fastload.sampler import RankSampler, random_batches
from fastload.sampler_state import RandomStates, generators, single_sampler
from fastload.settings import Settings
from fastload.state import SampledState, State, as_int, known_length
from fastload.stream_keys import StreamKeys
from fastload.telemetry import Recorder
from fastload.user_errors import contained


class Order(ABC):
    """The batches of one epoch, and which of them the loop has had.

    Args:
        initial: the loader's state as the epoch begins: what a state of this order must agree on.
        rank: whose part of the epoch.

    Everything here but `state` runs on the loop's thread, as in torch: the sampler is user code, and so races
    with nothing.
    """

    def __init__(self, initial: State, *, rank: int) -> None:
        self.initial = initial
        self.epoch = initial.epoch
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


class _Delivered(NamedTuple):
    """What was delivered of an epoch of a map-style dataset, and what its sampler draws from; see `SampledState`."""

    batches: int
    position: int
    """Where in the order of this rank the last of them ended."""
    checksum: int | None
    """None if the batches come from a state of another rank, until the sampler has been run again."""
    ahead: dict[int, tuple[int, int] | None]
    """Delivered before batches that were not (in_order=False), by ordinal: where each ended, and the checksum there.
    None if it comes from a saved state and has not been read again."""
    draws: list[RandomStates] | None = None
    own: Any = None
    ended: bool = False


class SampledOrder(Order):
    """The batches of one epoch of a map-style dataset, in its sampler's order.

    Args:
        sampler: torch's "index sampler": of batches, or without batching of indices.
        make_batch: makes a batch of what the sampler gave; its other arguments are those of `Batch`.
        resume: a state that passed `state.check`: begin after what it says was delivered.
        the others: see `Order`.

    Raises StateError if the sampler does not give again what the state says was delivered.
    """

    initial: SampledState

    def __init__(
        self,
        sampler: Any,
        make_batch: Callable[..., Batch],
        initial: SampledState,
        *,
        rank: int,
        resume: SampledState | None = None,
    ) -> None:
        super().__init__(initial, rank=rank)
        self._make_batch = make_batch
        self._sampler = sampler
        start = resume or initial
        self._ordinal = start.batches
        # Rounded up: only the end of an epoch is no multiple, and nothing comes after it.
        self._position = -(-start.position // initial.world_size)
        self._checksum = 0  # of all batches before the next one
        self._delivered = _Delivered(
            start.batches,
            self._position,
            start.checksum if start.checksum_on_rank == rank else None,
            dict.fromkeys(start.ahead),
            start.draws,
            start.sampler_state,
        )
        self._unasked = start.draws is None and not draws_nothing(sampler)
        if self._unasked:
            own, before = sampler_state.own_state(sampler), sampler_state.random_states(sampler)
            self._delivered = self._delivered._replace(draws=[before], own=own)
            self._indices: Iterator[Any] = _drawn(sampler)
        else:
            self._indices = self._rest()

    def begin(self, seed: int, recorders: list[Recorder]) -> None:
        """See `Order`. From now on the sampler is asked."""
        super().begin(seed, recorders)
        self._keys = StreamKeys(
            seed, self.epoch, rank=self._rank, world_size=self.initial.world_size
        )
        if self._unasked:
            self._keep_draws()

    def following(self) -> SampledOrder:
        """Return the next epoch's order, begun."""
        initial = replace(self.initial, epoch=self.epoch + 1)
        order = SampledOrder(self._sampler, self._make_batch, initial, rank=self._rank)
        order.begin(self.seed, [Recorder() for _ in self.recorders])
        return order

    def _keep_draws(self) -> None:
        """Keep what the sampler draws its first index from, beside what `iter(sampler)` drew from."""
        had = self._delivered
        assert had.draws is not None
        self._delivered = had._replace(
            draws=[had.draws[0], sampler_state.random_states(self._sampler)]
        )

    def _rest(self) -> Iterator[Any]:
        """Return what the sampler has left from here on. One that draws is run again up to here."""
        had = self._delivered
        if had.draws is None:
            return _sliced(self._sampler, self.epoch, self._position)
        with torch.random.fork_rng(devices=[]):
            sampler_state.restore_own_state(self._sampler, had.own)
            sampler_state.restore_random_states(self._sampler, had.draws[0])
            indices = _drawn(self._sampler)
            sampler_state.restore_random_states(self._sampler, had.draws[-1])
            found = sampler_state.checksum_of_next(indices, had.batches, 0)
            if had.checksum not in (None, found):
                raise StateError(
                    f"checksum: the state has {had.checksum}, this loader {found}: "
                    f"{self.initial.sampler} gave other indices than when the state was saved. "
                    "Let it draw from a torch.Generator of its own, as its attribute `generator`, or give it "
                    "state_dict() and load_state_dict()"
                )
            self._delivered = had._replace(checksum=found)
            self._checksum = sampler_state.checksum_of_next(
                indices, self._ordinal - had.batches, found
            )
            # What is drawn with the first index is drawn here.
            return indices if self._ordinal else chain(list(islice(indices, 1)), indices)

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
        if self._unasked:
            self._keep_draws()
            self._unasked = False
        place: dict[str, Any] = {
            "keys": self._keys,
            "recorders": self.recorders,
            "epoch": self.epoch,
            "ordinal": self._ordinal,
            "position": self._position,
        }
        try:
            given = next(self._indices)
            if self._delivered.draws is not None:
                self._checksum = sampler_state.checksum(given, self._checksum)
            return self._make_batch(given, **place, checksum=self._checksum)
        except StopIteration:
            raise
        except BaseException as exc:
            batch = Batch(0, [], size=0, **place, checksum=self._checksum)
            batch.error, batch.where = contained(exc), f"{batch}; stage: sampler"
            return batch

    def delivered(self, batch: Batch) -> None:
        """See `Order`."""
        had = self._delivered
        ahead = {**had.ahead, batch.ordinal: (batch.position + batch.size, batch.checksum)}
        batches, position, checksum = had.batches, had.position, had.checksum
        while (end := ahead.get(batches)) is not None:
            del ahead[batches]
            batches, (position, checksum) = batches + 1, end
        self._delivered = had._replace(
            batches=batches, position=position, checksum=checksum, ahead=ahead
        )

    def end(self) -> None:
        """See `Order`."""
        had = self._delivered
        if had.draws is not None:
            had = had._replace(
                draws=[sampler_state.random_states(self._sampler)],
                own=sampler_state.own_state(self._sampler),
            )
        self._delivered = had._replace(ended=True)

    def state(self) -> dict[str, Any]:
        """See `Order`. Raises StateError if the sampler's own state is no JSON."""
        had = self._delivered
        if isinstance(had.own, StateError):
            raise had.own
        position = position_after(self._sampler, self.initial.world_size, had.batches)
        if position is None:
            position = had.position * self.initial.world_size
        drawn = had.draws is not None
        return replace(
            self.initial,
            stream_seed=self.seed,
            ended=had.ended,
            batches=had.batches,
            position=position,
            ahead=sorted(had.ahead),
            ahead_on_rank=self._rank if had.ahead else None,
            draws=had.draws,
            sampler_state=copy.deepcopy(had.own),
            checksum=had.checksum if drawn else None,
            checksum_on_rank=self._rank if drawn else None,
        ).to_json()


def sampled_state(settings: Settings, epoch: int, sampler_epoch: int | None) -> SampledState:
    """Return the state of a loader of a map-style dataset as an epoch begins."""
    sampler = settings.sampler
    single = single_sampler(sampler)
    size = as_int(getattr(sampler, "batch_size", None))
    batch = 1 if sampler is single and not settings.batched else size
    _, world_size = partition(sampler, settings.dataset)
    ours = isinstance(single, RankSampler)
    by_rank = isinstance(single, RankSampler | DistributedSampler)
    length = None if by_rank else known_length(single)
    return SampledState(
        seed=settings.seed,
        world_size=world_size,
        global_batch=None if batch is None else batch * world_size,
        drop_last=bool(getattr(sampler, "drop_last", False)),
        epoch=epoch,
        sampler_epoch=sampler_epoch,
        samples=known_length(settings.dataset),
        sampler=type(single if type(sampler) is BatchSampler else sampler).__name__,
        sampler_length=single.length if ours else length,
        generators=len(generators(sampler)),
        sampler_seed=as_int(single.seed) if by_rank else None,
        shuffle=bool(single.shuffle) if by_rank else None,
        ends=single.ends if ours else None,
        window=single.window if ours else None,
        run=single.run if ours else None,
        set_id=getattr(settings.dataset, "set_id", None),
        ahead=[],
    )


def position_after(sampler: Any, world_size: int, batches: int) -> int | None:
    """The global position behind so many batches, which is the same on ranks that had fewer samples in the last one.

    None where it is no function of their number.
    """
    if not has_pure_order(sampler):
        return None
    single = single_sampler(sampler)
    step = world_size * (1 if sampler is single else sampler.batch_size)
    length = single.length if isinstance(single, RankSampler) else len(single) * world_size
    return int(min(batches * step, length))


def _is_plain(sampler: Any, *kinds: type) -> bool:
    """Return whether it is a sampler of one of these classes, in torch's batches or not, and of no subclass."""
    single = single_sampler(sampler)
    return type(single) in kinds and type(sampler) in (BatchSampler, type(single))


def has_pure_order(sampler: Any) -> bool:
    """Return whether the order is a function of what the sampler says of itself."""
    return _is_plain(sampler, RankSampler, SequentialSampler)


def draws_nothing(sampler: Any) -> bool:
    """Return whether the order is a function of what the sampler says of itself, and of the epoch that it was told."""
    return _is_plain(sampler, RankSampler, SequentialSampler, DistributedSampler)


def fits_any_world(sampler: Any) -> bool:
    """Return whether another number of ranks can resume its epoch: batches have a fixed size, and the ranks stride."""
    return _is_plain(sampler, RankSampler, DistributedSampler)


def _sliced(sampler: Any, epoch: int, samples: int) -> Iterator[Any]:
    """Return what a sampler that draws nothing gives in an epoch after the first `samples` indices."""
    single = single_sampler(sampler)
    rest: Iterator[int]
    if type(single) is RankSampler:
        rest = single.ordered(epoch, samples)
    elif type(single) is SequentialSampler:
        rest = iter(range(samples, len(single)))
    elif not samples:
        return iter(sampler)  # which may read the sampler's epoch as late as at its first index
    else:
        rest = islice(iter(single), samples, None)
    if sampler is single:
        return rest
    return iter(BatchSampler(rest, sampler.batch_size, sampler.drop_last))


def _drawn(sampler: Any) -> Iterator[Any]:
    """Return what a sampler that draws gives in an epoch."""
    single = single_sampler(sampler)
    if type(sampler) is BatchSampler and type(single) is RandomSampler and not single.replacement:
        return random_batches(sampler)
    return iter(sampler)
