"""The order of an iterable dataset. Each worker reads its own copy in its own *lane*; batches come from them in turn.

The order is torch's: the lanes take turns, and a lane that has ended is skipped. So the order depends on the number of
workers. So may the samples, if the dataset calls `get_worker_info()`.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

from fastload._kit.hashing import mix64
from fastload._kit.user_errors import annotate
from fastload.errors import StateError
from fastload.memory.batch import Batch
from fastload.order.order import Order, draw_seed
from fastload.order.state import IterableState, as_int
from fastload.random.keys import StreamKeys
from fastload.settings import Settings


class LaneBatch(Batch):
    """A batch from one lane. Its position, size and indices are known only once it is read.

    The "index" of a sample, which errors name, is its number in the worker's copy.
    """

    __slots__ = ("ended", "saved", "state")

    def __init__(self, lane: int, size: int, saved: dict[str, Any], **place: Any) -> None:
        super().__init__(1, [], size=size, position=0, lane=lane, **place)
        self.saved = saved  # the lane's state at the beginning of this epoch
        self.ended = False  # whether the lane had ended before this batch
        self.state: dict[str, Any] | Exception = saved  # of the lane after this batch, or its error

    def __str__(self) -> str:
        return f"batch {self.ordinal} of epoch {self.epoch}, from worker {self.lane}"

    def first_index(self, start: int) -> None:
        """Return None: a sample cannot be read again by its number."""


class _Delivered(NamedTuple):
    """What was delivered in an epoch of an iterable dataset."""

    turn: int
    """The lane of the next batch."""
    lanes: tuple[dict[str, Any] | Exception, ...]
    ended: bool = False


class LaneOrder(Order):
    """The batches of one epoch of an iterable dataset, from its lanes in turn."""

    initial: IterableState
    progress: _Delivered

    def __init__(
        self,
        settings: Settings,
        initial: IterableState,
        *,
        seed: int | None,
        resume: IterableState | None,
        **place: Any,
    ) -> None:
        super().__init__(initial, **place)
        start = resume or initial
        self.seed = draw_seed(settings) if seed is None else seed
        self._batch_size = settings.batch_size or 1
        self._ordinal = 0
        # With a seed, pass the epoch to each copy: persistent workers do not see `set_epoch` of the loop's dataset.
        tells = initial.seed is not None or settings.exact
        told = initial.sampler_epoch if tells else None
        self._began: list[dict[str, Any]] = [{**lane, "epoch": told} for lane in start.lanes]
        self._active = [not lane["ended"] for lane in self._began]
        self._turn = start.turn  # of the next batch to be read
        self.progress = _Delivered(self._turn, tuple(start.lanes))
        n, mine = len(self._began), mix64(self.seed) ^ initial.rank  # each lane has its own streams
        self._keys = [StreamKeys(mine, self.epoch, rank=i, world_size=n) for i in range(n)]

    def __next__(self) -> Batch:
        if not any(self._active):
            self.exhausted = True
            raise StopIteration
        n = len(self._began)
        lane = next(k % n for k in range(self._turn, self._turn + n) if self._active[k % n])
        self._turn = (lane + 1) % n
        self._ordinal += 1
        return LaneBatch(
            lane,
            self._batch_size,
            self._began[lane],
            keys=self._keys[lane],
            recorders=self.recorders,
            epoch=self.epoch,
            ordinal=self._ordinal - 1,
        )

    def delivered(self, batch: Batch) -> None:
        """See `Order`. A batch that is left out may report that its lane had ended."""
        assert isinstance(batch, LaneBatch)
        turn, lanes, _ = self.progress
        lanes = (*lanes[: batch.lane], batch.state, *lanes[batch.lane + 1 :])
        if batch.ended:
            self._active[batch.lane] = False
        else:
            turn = (batch.lane + 1) % len(lanes)
        self.progress = _Delivered(turn, lanes)

    def end(self) -> None:
        """See `Order`."""
        self.progress = self.progress._replace(ended=True)

    def state(self, ahead: int = 0) -> dict[str, Any]:
        """See `Order`."""
        turn, lanes, ended = self._before(ahead)
        for k, lane in enumerate(lanes):
            if isinstance(lane, Exception):
                annotate(lane, f"no state: state_dict() of the dataset raised in worker {k}")
                raise lane
        return replace(
            self.initial,
            stream_seed=self.seed,
            ended=ended,
            turn=turn,
            lanes=copy.deepcopy(list[Any](lanes)),
        ).to_json()


def iterable_state(
    settings: Settings, epoch: int, sampler_epoch: int | None, rank: int, world_size: int
) -> IterableState:
    """Return the state of a loader of an iterable dataset at the beginning of an epoch."""
    batch = as_int(settings.batch_size)
    return IterableState(
        seed=settings.seed,
        rank=rank,
        world_size=world_size,
        global_batch=None if batch is None else batch * world_size,
        drop_last=bool(settings.drop_last),
        epoch=epoch,
        sampler_epoch=sampler_epoch,
        workers=int(settings.num_workers),  # that read the dataset
        lanes=[_lane(None) for _ in range(settings.lanes)],
    )


def _lane(state: Any) -> dict[str, Any]:
    return {"samples": 0, "state": state, "ended": False, "seen": 0, "draws": {}}


def _warn_of_losses(dataset: Any, states: list[IterableState], *, others: bool) -> None:
    begun = [lane["state"] for state in states for lane in state.lanes if lane["state"]]
    if any(state.get("approximate") for state in begun):
        why = "no state has them. Let its function return an object that keeps a state, or give it a size"
    elif begun and others and dataset.applies:
        why = "they stay with the readers that saved them. Give it a size"
    else:
        return
    warnings.warn(
        f"fastload: the resume is approximate. Samples that a generator of .apply() held are lost: {why}",
        stacklevel=5,  # the caller of `load_state_dict`
    )


def dealt_anew(dataset: Any, given: Any, ours: Any) -> IterableState:
    """Return the state of this rank for what is left of an exact stream.

    Args:
        dataset: the stream.
        given: the state of a rank, or a list with those of all ranks. If as many ranks and workers saved them, this
            rank gets its own back.
        ours: the state of this loader as an epoch begins.

    Raises:
        StateError: that of a rank is missing.
    """
    states: list[IterableState] = [
        *map(IterableState.from_json, given if isinstance(given, list) else [given])
    ]
    if not states:
        raise StateError("rank: load_state_dict([]) has no state. Pass those of all ranks")
    first = states[0]
    ranks, workers = first.world_size, len(first.lanes)
    for lane in first.lanes:
        if lane["state"] is not None:
            dataset.check(lane["state"])
    others = (ranks, workers) != (ours.world_size, len(ours.lanes))
    _warn_of_losses(dataset, states, others=others)
    if len(states) == 1 and not others:
        return replace(first, workers=ours.workers)
    states = sorted(states, key=lambda state: state.rank)
    found = [(state.rank, state.world_size, state.epoch, len(state.lanes)) for state in states]
    if found != [(k, ranks, first.epoch, workers) for k in range(ranks)]:
        raise StateError(
            f"rank: a stream resumes with other ranks or workers from the states of all {ranks} ranks, saved after "
            f"the same batch: load_state_dict([state_0, state_1, ...]). Found those of ranks {[k for k, *_ in found]}"
        )
    # A rank that ended before others has an empty rest, so that all go on in the same epoch.
    ended = all(state.ended for state in states)
    if not others:
        return replace(states[int(ours.rank)], workers=ours.workers, ended=ended)
    # In the order of the readers: the ranks in turn, for each worker.
    lanes = [lane for each in zip(*(state.lanes for state in states), strict=True) for lane in each]
    readers = ours.world_size * len(ours.lanes)
    left = dataset.redealt([lane["state"] for lane in lanes], first.epoch, readers)
    return replace(
        first,
        rank=ours.rank,
        world_size=ours.world_size,
        global_batch=ours.global_batch,
        workers=ours.workers,
        ended=ended,
        turn=0,
        lanes=[_lane(state) for state in left[ours.rank :: ours.world_size]],
    )
