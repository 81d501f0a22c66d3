"""Which batch is read next, and which batches the loop has received: the loop's side of an epoch.

A state describes what was *delivered*. If the order is a function of seed and epoch, a loader resumes by slicing it.
Otherwise it runs the sampler again. It reads no sample for either.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from fastload._kit.texts import counted
from fastload._kit.user_errors import contained
from fastload.errors import StateError
from fastload.memory.batch import Batch
from fastload.order import sampler_state
from fastload.order.drawing import MIXED, Drawing
from fastload.order.order import Order, draw_seed
from fastload.order.sampler import PlacedBatch, RankSampler, random_batches
from fastload.order.sampler_state import RandomStates, generators, rank_sampler, single_sampler
from fastload.order.state import SampledState, as_int, known_length
from fastload.random.keys import StreamKeys
from fastload.settings import Settings


class _Delivered(NamedTuple):
    """What was delivered in an epoch of a map-style dataset, and what its sampler draws from; see `SampledState`."""

    batches: int
    position: int
    """The end of the last of them, in the order of this rank."""
    checksum: int | None
    """None after the state of another rank was loaded, until the sampler has run again."""
    ahead: dict[int, tuple[int, int] | None]
    """Batches delivered before earlier ones (in_order=False). By ordinal: the end of each, and the checksum there.
    None for a batch of a loaded state that has not come up again."""
    draws: list[RandomStates] | None = None
    own: Any = None
    ended: bool = False


class SampledOrder(Order):
    """The batches of one epoch of a map-style dataset, in its sampler's order.

    Args:
        settings: the loader's arguments.
        make_batch: makes a batch of what the sampler gave; its other arguments are those of `Batch`.
        initial, place: see `Order`.
        seed: that of the random streams. None: draw what torch draws, in the same order.
        resume: a state that passed `state.check`. The order begins after the last batch that it counts.

    Raises StateError if the sampler gives other indices than when the state was saved.
    """

    initial: SampledState
    progress: _Delivered

    def __init__(
        self,
        settings: Settings,
        make_batch: Callable[..., Batch],
        initial: SampledState,
        rank: int,
        *,
        seed: int | None,
        resume: SampledState | None,
        **place: Any,
    ) -> None:
        super().__init__(initial, **place)
        self._make_batch = make_batch
        self._sampler = sampler = settings.sampler
        self._rank = rank
        if seed is None and settings.num_workers:
            iter(sampler)  # as in torch: a draw in `__iter__` itself happens twice
            seed = draw_seed(settings)
        start = resume or initial
        self._ordinal = start.batches
        # Rounded up: it is not a multiple only at the end of an epoch, and nothing follows there.
        self._position = -(-start.position // initial.world_size)
        self._checksum = 0  # of all batches before the next one
        self.progress = _Delivered(
            start.batches,
            self._position,
            start.checksum if start.checksum_on_rank == self._rank else None,
            dict.fromkeys(start.ahead),
            start.draws,
            start.sampler_state,
        )
        self._unasked = start.draws is None and not draws_nothing(sampler)
        # Torch's RandomSampler draws a seed at its first batch, and from then on from a generator that is all its own.
        self._draws_once = _is_random(sampler) and single_sampler(sampler).generator is None
        self._has_drawn = False
        self._indices: Iterator[Any]
        if self._unasked:
            self._drawing = Drawing(initial.seed, self.epoch, None, settings.modules)
            own, before = sampler_state.own_state(sampler), self._random_states()
            with self._drawing.entered():
                self._indices = _drawn(sampler)
        elif start.draws is None:
            self._indices = _sliced(sampler, self.epoch, self._position)
        else:
            self._drawing = Drawing(initial.seed, self.epoch, start.draws, settings.modules)
            self._indices = self._run_again(start.draws)
        self.seed = draw_seed(settings) if seed is None else seed
        if self._unasked:
            self.progress = self.progress._replace(draws=[before, self._random_states()], own=own)
        self._ready: Callable[[], bool] | None = getattr(self._indices, "is_ready", None)
        self._tell: Callable[[Batch], None] | None = getattr(self._indices, "delivered", None)
        self._placed_keys = StreamKeys(self.seed, self.epoch)
        self._keys = StreamKeys(
            self.seed,
            self.epoch,
            rank=self._rank,
            world_size=initial.world_size,
            block=getattr(single_sampler(sampler), "block", 1),
        )

    def is_ready(self) -> bool:
        """See `Order`. The sampler's iterator may have a method of this name."""
        return self._ready is None or self._ready()

    def _random_states(self) -> RandomStates:
        return sampler_state.random_states(self._sampler, keyed=self.initial.seed is not None)

    def _run_again(self, draws: list[RandomStates]) -> Iterator[Any]:
        """Run the sampler again from what it drew from, and skip the earlier indices. Return the rest."""
        if draws[0].get("mixed"):
            raise StateError(MIXED)
        had = self.progress
        with self._drawing.entered():
            sampler_state.restore_own_state(self._sampler, had.own)
            sampler_state.restore_random_states(self._sampler, draws[0])
            indices = _drawn(self._sampler)
            sampler_state.restore_random_states(self._sampler, draws[-1])
            found = sampler_state.checksum_of_next(indices, had.batches, 0)
            if had.checksum not in (None, found):
                raise StateError(
                    f"checksum: the state has {had.checksum}, this loader {found}: {self.initial.sampler} gave other "
                    "indices than when the state was saved. Make the loader with seed=, or give the sampler a "
                    "generator of its own, as an attribute, or state_dict() and load_state_dict()"
                )
            self.progress = had._replace(checksum=found)
            self._checksum = sampler_state.checksum_of_next(
                indices, self._ordinal - had.batches, found
            )
            return indices

    def __next__(self) -> Batch:
        while True:
            draws = self.progress.draws
            if self._unasked and draws is not None:  # the loop may have drawn since `iter(sampler)`
                self._unasked, draws = False, [draws[0], self._random_states()]
                self.progress = self.progress._replace(draws=draws)
            place: dict[str, Any] = {"keys": self._keys, "recorders": self.recorders}
            place |= {"epoch": self.epoch, "ordinal": self._ordinal, "position": self._position}
            try:
                given = (
                    next(self._indices)
                    if draws is None or self._has_drawn
                    else self._drawing.next(self._indices, self._ordinal)
                )
                self._has_drawn = self._draws_once
                if isinstance(given, PlacedBatch):
                    place |= {"position": given.position, "keys": self._placed_keys}
                if draws is not None:
                    self._checksum = sampler_state.checksum(given, self._checksum)
                    if self._drawing.mixed:  # no state of this epoch determines its rest
                        mixed = [{**d, "mixed": True} for d in draws]
                        self.progress = self.progress._replace(draws=mixed)
                batch = self._make_batch(given, **place, checksum=self._checksum)
            except StopIteration:
                self.exhausted = True
                raise
            except BaseException as exc:
                batch = Batch(0, [], size=0, **place, checksum=self._checksum)
                batch.error, batch.where = contained(exc), f"{batch}; stage: sampler"
            self._ordinal += 1
            self._position += batch.size
            if batch.ordinal not in self.progress.ahead:
                return batch
            self.delivered(batch)

    def delivered(self, batch: Batch) -> None:
        """See `Order`. The sampler's iterator may have a method of this name."""
        if self._tell is not None:
            self._tell(batch)
        had = self.progress
        ahead = {**had.ahead, batch.ordinal: (batch.position + batch.size, batch.checksum)}
        batches, position, checksum = had.batches, had.position, had.checksum
        while (end := ahead.get(batches)) is not None:
            del ahead[batches]
            batches, (position, checksum) = batches + 1, end
        self.progress = had._replace(
            batches=batches, position=position, checksum=checksum, ahead=ahead
        )

    def end(self) -> None:
        """See `Order`."""
        had = self.progress
        if had.draws is not None:
            had = had._replace(
                draws=[self._random_states()],
                own=sampler_state.own_state(self._sampler),
            )
        self.progress = had._replace(ended=True)

    def state(self, ahead: int = 0) -> dict[str, Any]:
        """See `Order`. Raise StateError if JSON cannot hold the sampler's own state."""
        had = self._before(ahead)
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
            sampler_state=plan_state(self._sampler, self.epoch, position) or copy.deepcopy(had.own),
            checksum=had.checksum if drawn else None,
            checksum_on_rank=self._rank if drawn else None,
        ).to_json()


def sampled_state(
    settings: Settings, epoch: int, sampler_epoch: int | None, world_size: int
) -> SampledState:
    """Return the state of a loader of a map-style dataset at the beginning of an epoch."""
    sampler = settings.sampler
    single = single_sampler(sampler)
    size = as_int(getattr(sampler, "batch_size", None))
    batch = 1 if sampler is single and not settings.batched else size
    ours = rank_sampler(sampler)
    varies = ours is not None and ours.sources_vary
    if ours is not None:
        own = ours.arguments()
    elif isinstance(single, DistributedSampler):
        own = {"sampler_seed": as_int(single.seed), "shuffle": bool(single.shuffle)}
    else:
        own = {"sampler_length": known_length(single)}
    return SampledState(
        seed=settings.seed,
        world_size=world_size,
        global_batch=None if batch is None else batch * world_size,
        drop_last=bool(getattr(sampler, "drop_last", False)),
        epoch=epoch,
        sampler_epoch=sampler_epoch,
        samples=None if varies else known_length(settings.dataset),
        sampler=type(single if _batches_plainly(sampler) else sampler).__name__,
        generators=len(generators(sampler)),
        set_id=None if varies else set_id_of(settings.dataset),
        ahead=[],
        **own,
    )


def position_after(sampler: Any, world_size: int, batches: int) -> int | None:
    """Return the global position after `batches` batches, or None if their number does not determine it.

    It is the same on all ranks, even if some of them had fewer samples in the last batch.
    """
    if not has_pure_order(sampler):
        return None
    single = single_sampler(sampler)
    step = world_size * (1 if sampler is single else sampler.batch_size)
    if _is_planned(single):
        return batches * step  # its epochs have whole global batches only
    length = len(single) * world_size if type(single) is SequentialSampler else single.length
    return int(min(batches * step, length))


def in_world(sampler: Any, state: SampledState, world_size: int) -> SampledState:
    """Return a state as a loader of another world would have saved it. Raise StateError if none can have.

    Only a sampler that plans whole batches deals them anew. With all others a rank has equally many in every world.
    """
    if not _is_planned(sampler) or state.world_size == world_size:
        return state
    batches, rest = divmod(state.position, world_size)
    if rest:
        raise StateError(
            f"position: the state ends after {counted(state.position, 'batch')} of all ranks, which {world_size} "
            "ranks do not share evenly. Save the state after an optimizer step, or use its number of ranks"
        )
    return replace(state, batches=batches, world_size=world_size)


def plan_state(sampler: Any, epoch: int, position: int) -> Any:
    """Return what a planned order must have in a state after a global position, or None."""
    ours = rank_sampler(sampler)
    return None if ours is None else ours.plan_state(epoch, position)


def _is_plain(sampler: Any, *kinds: type) -> bool:
    """Return whether `sampler`, or the sampler in torch's BatchSampler, is exactly of one of these classes."""
    single = single_sampler(sampler)
    planned = RankSampler in kinds and _is_planned(single)
    return (planned or type(single) in kinds) and (sampler is single or _batches_plainly(sampler))


def _is_planned(sampler: Any) -> bool:
    """Return whether `sampler` is a RankSampler with a pure order of its own. One that overrides `__iter__` is not."""
    iterates = getattr(type(sampler), "__iter__", None)
    return bool(getattr(sampler, "planned", False)) and iterates is RankSampler.__iter__


def _batches_plainly(sampler: Any) -> bool:
    """Return whether `sampler` makes batches as torch's BatchSampler does."""
    return getattr(type(sampler), "__iter__", None) is BatchSampler.__iter__


def has_pure_order(sampler: Any) -> bool:
    """Return whether the order is a function of the sampler's attributes and the epoch, and can be sliced."""
    return _is_plain(sampler, RankSampler, SequentialSampler)


def can_run_ahead(sampler: Any) -> bool:
    """Return whether the order is fixed before the first batch, so that taking later ones early changes nothing."""
    return draws_nothing(sampler) or _is_random(sampler)


def draws_nothing(sampler: Any) -> bool:
    """Return whether the sampler draws from no generator, so that the order depends on its attributes alone."""
    return _is_plain(sampler, RankSampler, SequentialSampler, DistributedSampler)


def fits_any_world(sampler: Any) -> bool:
    """Return whether another number of ranks can resume the epoch: batches have a fixed size, and ranks stride."""
    return _is_plain(sampler, RankSampler, DistributedSampler)


def _sliced(sampler: Any, epoch: int, samples: int) -> Iterator[Any]:
    """Return an epoch's indices after the first `samples`, if the sampler draws nothing."""
    single = single_sampler(sampler)
    rest: Iterator[int]
    if (ours := rank_sampler(sampler)) is not None:
        rest = ours.ordered(epoch, samples)
    elif type(single) is SequentialSampler:
        rest = iter(range(samples, len(single)))
    elif not samples:
        return iter(sampler)  # it may read the sampler's epoch only at its first index
    else:
        rest = islice(iter(single), samples, None)
    if sampler is single:
        return rest
    return iter(BatchSampler(rest, sampler.batch_size, sampler.drop_last))


def _drawn(sampler: Any) -> Iterator[Any]:
    """Return an epoch's indices, if the sampler draws."""
    return random_batches(sampler) if _is_random(sampler) else iter(sampler)


def _is_random(sampler: Any) -> bool:
    """Return whether `random_batches` gives what `sampler` does."""
    single = single_sampler(sampler)
    return _is_plain(sampler, RandomSampler) and sampler is not single and not single.replacement


def set_id_of(dataset: Any) -> str | None:
    """Return the id of the set that a dataset reads, even through torch's wrappers, or None if it reads no set."""
    if isinstance(dataset, Subset):
        return set_id_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        ids = [set_id_of(part) for part in dataset.datasets]
        return repr(ids) if any(ids) else None
    found = getattr(dataset, "set_id", None)
    return found if isinstance(found, str) else None
