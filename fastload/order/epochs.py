"""Which epoch a loader runs, and how much of it was delivered. A loader and its iterators share this."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset

from fastload.memory.batch import Batch
from fastload.order.batches import SampledOrder, plan_state, sampled_state
from fastload.order.lanes import LaneOrder, dealt_anew, iterable_state
from fastload.order.order import Order
from fastload.order.partition import partition
from fastload.order.sampler import RankSampler, epoch_number
from fastload.order.state import SampledState, State, as_int
from fastload.settings import Settings


class Epochs:
    """The numbers of a loader's epochs, and the position in the latest one.

    Args:
        samplers: the samplers that may know of epochs: the batch sampler, what it batches, the sampler.
        dataset: an iterable one with `set_epoch` counts as a sampler.
    """

    def __init__(self, samplers: list[Any], dataset: Any = None) -> None:
        tells = isinstance(dataset, IterableDataset) and hasattr(dataset, "set_epoch")
        self._stream = dataset if tells else None
        # Those that count epochs themselves, and the others.
        self._ours = [s for s in samplers if isinstance(s, RankSampler)]
        self._others = [dataset] if tells else [s for s in samplers if s not in self._ours]
        self._next = 0
        self.number = -1
        """The epoch of the latest `iter()`."""
        self.is_set = False
        """Whether `set` chose the epoch of the next `iter()`."""
        self._sampler_epoch: int | None = None
        # The order of the latest epoch, and the state that the next one resumes from. One tuple, which is replaced:
        # another thread may call `state_dict` at any time.
        self._at: tuple[Order | None, State | None] = None, None
        self._ended_seed: int | None = None  # of a loaded epoch that had ended

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy. A copy continues to count, but does not own the running epoch."""
        return {**self.__dict__, "_at": (None, self.resume)}

    @property
    def resume(self) -> State | None:
        """The state that the next epoch resumes from."""
        return self._at[1]

    def set(self, number: int) -> None:
        """Set the epoch of the next `iter()`, also in the samplers."""
        self._next = epoch_number(number)
        self.is_set = True
        for sampler in (*self._others, *self._ours):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self._next)
        self._sampler_epoch = self._own_of_sampler()

    @contextmanager
    def beginning(self, *, seeded: bool) -> Iterator[None]:
        """Advance to the next epoch, which the block begins. If the block raises, go back.

        Drop a loaded state of another epoch.
        """
        with self.restoring():
            self.number = self.coming()
            for sampler in self._ours:
                sampler.begin_epoch()
            self._sampler_epoch = self._own_of_sampler()
            self._next = self.number + 1
            self.is_set = False
            self._ended_seed = None
            resume = self.resume
            if resume is not None and resume.ended:
                self._at, self._ended_seed = (self._at[0], None), resume.stream_seed
            elif resume is not None and resume.epoch != self.number:
                warnings.warn(
                    f"fastload: epoch {self.number} starts from its first batch, because set_epoch() chose it. The "
                    f"loaded state is of epoch {resume.epoch}, and is dropped. To resume, set no other epoch after "
                    "loading",
                    stacklevel=7,  # the caller of `iter(loader)`
                )
                self._at = self._at[0], None
            # With a seed, tell it to a stream. Not to one without `epoch`: the loop may have set another.
            tells = seeded or getattr(self._stream, "fastload_exact", False)
            if tells and self._stream is not None and self._sampler_epoch is not None:
                self._stream.set_epoch(self.number)
                self._sampler_epoch = self.number
            yield

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """If the block raises, go back to the epoch, and the loaded state, of before."""
        before, epochs = dict(vars(self)), [(s, s.epoch, s.is_set) for s in self._ours]
        try:
            yield
        except BaseException:
            vars(self).update(before)
            for sampler, epoch, is_set in epochs:
                sampler.epoch, sampler.is_set = epoch, is_set
            raise

    def begin_order(
        self,
        settings: Settings,
        make_batch: Callable[..., Batch],
        workers: int,
        running: int | None,
        ahead: Order | None = None,
        *,
        early: bool = False,
    ) -> Order:
        """Return the order of the latest epoch, begun. It resumes after a loaded state.

        Args:
            settings: the loader's arguments.
            make_batch: makes a batch of what the sampler gave; its other arguments are those of `Batch`.
            workers: how many read it, 0 if the loop does.
            running: the seed of an order that workers have read, which persistent workers keep.
            ahead: an order that was begun early. It is returned if it is that of the latest epoch.
            early: begin the epoch after the latest one, while its last batches are still read.

        Raises StateError if the sampler gives other indices than when the state was saved.
        """
        resume: Any = None if early else self.resume
        fresh: Any
        fresh, rank = fresh_state(settings, self.number + early, self._sampler_epoch)
        order = ahead
        if order is None or resume is not None or order.initial != fresh:
            loaded = self._ended_seed if settings.persistent_workers and not early else None
            seeds = settings.seed, loaded if resume is None else resume.stream_seed, running
            seed = next((one for one in seeds if one is not None), None)
            given: Any = {"seed": seed, "resume": resume, "workers": workers}
            if settings.iterable:
                order = LaneOrder(settings, fresh, **given)
            else:
                order = SampledOrder(settings, make_batch, fresh, rank, **given)
        if not early:
            self._at = order, None
        return order

    def state_dict(self, settings: Callable[[], Settings], ahead: int) -> dict[str, Any]:
        """See `DataLoader.state_dict`. Call `settings` only if the next epoch has not begun."""
        order, resume = self._at
        if isinstance(resume, SampledState):
            # The weights of a mixture may have changed since. After an ended epoch, the next one begins.
            now = settings()
            place = (resume.epoch + 1, 0) if resume.ended else (resume.epoch, resume.position)
            own = plan_state(now.sampler, *place) or resume.sampler_state
            resume = replace(resume, sampler_state=own)
        if resume is not None:
            return copy.deepcopy(resume.to_json())
        if order is None:
            fresh, _ = fresh_state(now := settings(), self.coming(), self._own_of_sampler())
            if isinstance(fresh, SampledState):
                fresh = replace(fresh, sampler_state=plan_state(now.sampler, fresh.epoch, 0))
            return fresh.to_json()
        return order.state(ahead)

    def load(self, state: State) -> None:
        """Let the next `iter()` resume after `state`."""
        self._next = state.epoch + state.ended
        own = state.sampler_epoch
        for sampler in self._others:  # first: a batch sampler of the user's may pass its epoch on
            if hasattr(sampler, "set_epoch") and (own is not None or sampler is not self._stream):
                sampler.set_epoch(state.epoch if own is None else own)
        for ours in self._ours:
            if isinstance(state, SampledState):
                ours.load_plan(state.sampler_state, state.epoch, ended=state.ended)
            ours.set_epoch(self._next)
        self._sampler_epoch = self._own_of_sampler()
        self._at = None, state

    def coming(self) -> int:
        """Return the epoch of the next `iter()`.

        A RankSampler counts epochs itself. For another sampler, return its own epoch if that has
        changed since the loader last read it. Otherwise return the loader's next number.
        """
        if self._ours:
            return self._ours[0].next_epoch
        own = self._own_of_sampler()
        return self._next if own is None or own == self._sampler_epoch else own

    def _own_of_sampler(self) -> int | None:
        """Return the attribute `epoch` of the first sampler that has one and is not a RankSampler, or None."""
        for sampler in self._others:
            own = as_int(getattr(sampler, "epoch", None))
            if own is not None and own >= 0:
                return own
        return None


def fresh_state(settings: Settings, number: int, sampler_epoch: int | None) -> tuple[State, int]:
    """Return the state of a loader as an epoch begins, and its rank."""
    rank, world_size = partition(settings.sampler, settings.dataset)
    if settings.iterable:
        return iterable_state(settings, number, sampler_epoch, rank, world_size), rank
    return sampled_state(settings, number, sampler_epoch, world_size), rank


def state_for(settings: Settings, given: Any, ours: State) -> Any:
    """Return the state that a loader gets: `given`, or what a stream has left, of which each reader gets its part."""
    if settings.exact:
        return dealt_anew(settings.dataset, given, ours)
    return type(ours).from_json(given)
