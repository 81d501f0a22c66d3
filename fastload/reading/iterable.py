"""Reads an iterable dataset: each worker its own copy, in its own lane. See `order.lanes`."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from inspect import GEN_CLOSED, getgeneratorstate, isgenerator
from types import ModuleType
from typing import Any

from fastload._kit.user_errors import contained
from fastload.errors import StateError
from fastload.isolation.rules import own_dict
from fastload.memory.batch import Batch
from fastload.memory.collate import list_builder
from fastload.order.lanes import LaneBatch
from fastload.order.state import keeps_state, load_into
from fastload.random.keys import StreamKeys
from fastload.random.streams import Stream
from fastload.reading.failures import Failures, fail
from fastload.reading.notices import Notices
from fastload.reading.sources import Reader, Source
from fastload.settings import Settings


class Lanes(Source):
    """Reads an iterable dataset: takes the samples of a batch from its lane.

    It needs no locks: one worker at a time touches a lane.
    """

    def __init__(self, settings: Settings, notices: Notices, failures: Failures) -> None:
        super().__init__(list_builder)
        self._notices = notices
        self._failures = failures
        self._batch_size: int = settings.batch_size or 1
        self._drop_last = settings.drop_last
        self._lanes: list[Lane | None] = [None] * settings.lanes

    def fill(self, batch: Batch, start: int, stop: int, reader: Reader) -> Iterable[range]:
        """Take the samples of `batch` from its lane, each in its random stream. Nothing is missing afterwards."""
        assert isinstance(batch, LaneBatch)
        reader.stream.move(batch, None)
        lane = self._lane(batch, reader)
        self._take(batch, lane, reader)
        short = batch.size < self._batch_size
        if lane.ended and not batch.failed and (not batch.size or (short and self._drop_last)):
            batch.ended = batch.left_out = True
            batch.builder = None
        batch.state = lane.state()
        return ()

    def _lane(self, batch: LaneBatch, reader: Reader) -> Lane:
        """Return the lane of a batch. The first batch of an epoch begins another pass."""
        lane = self._lanes[batch.lane]
        if lane is not None and lane.keys is batch.keys:
            return lane
        lane = Lane(reader.dataset, batch.keys)
        try:
            lane.begin(batch, reader.stream, lambda: batch.dropped)
        except BaseException as exc:
            lane.ended = True
            fail(batch, 0, contained(exc), f"{batch}; stage: iter")
        again = batch.saved["samples"] and batch.saved["state"] is None and not lane.ended
        if again and hasattr(reader.dataset, "state_dict") and not keeps_state(reader.dataset):
            self._notices.warn(
                "other protocol",
                f"{type(reader.dataset).__name__} lacks state_dict() and load_state_dict(state) with these arguments, "
                "so its samples up to the saved position are read again. If its order depends on an epoch that it "
                "counts, set that epoch before you resume",
            )
        if batch.saved["state"] is not None and not lane.ended and _shuffles(reader.dataset):
            self._notices.warn(
                "shuffle buffer",
                f"{type(reader.dataset).__name__} resumes without its shuffle buffer: the examples in it are missing "
                "from the rest of this epoch. Save at the end of an epoch, or shuffle without a buffer, as "
                "shuffle(buffer_size=1) does",
            )
        self._lanes[batch.lane] = lane
        return lane

    def _take(self, batch: LaneBatch, lane: Lane, reader: Reader) -> None:
        """Take samples until the batch is full, the lane has ended, or a sample has failed."""
        batch.size = 0
        batch.position = lane.samples
        batch.indices = range(lane.samples, lane.samples + self._batch_size)
        batch.builder = builder = list_builder(self._batch_size)
        while batch.size < self._batch_size and not (lane.ended or batch.failed or batch.dropped):
            k = batch.size
            reader.stream.move(batch, k)
            try:
                sample = lane.take()
            except BaseException as exc:
                batch.size += 1
                self._lane_failed(batch, k, lane, exc)
            else:
                if not lane.ended:
                    batch.size += 1
                    builder.put(k, sample)
        builder.shorten(batch.size)

    def _lane_failed(self, batch: LaneBatch, k: int, lane: Lane, exc: BaseException) -> None:
        self._failures.of_sample(batch, k, lane.dataset, exc)
        if lane.is_dead() and k in batch.handled:
            self._notices.warn(
                "generator",
                f"a generator that raises has ended: {type(lane.dataset).__name__} yields no more samples in worker "
                f"{batch.lane}, although on_error handled the error. Catch the error in the dataset, or let __iter__ "
                "return an object that has __next__",
            )


class Lane:
    """One worker's pass over its copy of the dataset, in one epoch."""

    def __init__(self, dataset: Any, keys: StreamKeys) -> None:
        self.dataset = dataset
        self.keys = keys
        self.samples = 0  # taken, including those that raised
        self.ended = False
        self._iterator: Iterator[Any] = iter(())
        self._keeper: Any = None  # the dataset or its iterator, if one keeps a state

    def begin(self, batch: LaneBatch, stream: Stream, dropped: Callable[[], bool]) -> None:
        """Create the iterator and bring it to the lane's saved state, unless the batch is dropped meanwhile.

        Load the state into the dataset or its iterator. If neither keeps a state, read its samples again and skip them.
        """
        saved = batch.saved
        _take_back(self.dataset)
        # A pass that is read again draws what it drew before. A pass that begins here draws from a new stream.
        stream.begin_pass(self.keys.batch(saved["samples"] if saved["state"] is not None else 0, 0))
        if saved["ended"]:
            self.samples, self.ended = saved["samples"], True
            return
        state = saved["state"]
        self._keeper = self.dataset if keeps_state(self.dataset) else None
        if self._keeper is not None and state is not None:
            _lend(self.dataset, state)
        self._iterator = iter(self.dataset)
        if self._keeper is None and keeps_state(self._iterator):
            self._keeper = self._iterator
        if state is not None:
            if self._keeper is not self.dataset:
                load_into(self._iterator, copy.deepcopy(state), "lanes")
            self.samples = saved["samples"]
            return
        batch.indices = range(saved["samples"])
        for k in batch.indices:
            if dropped() or self.ended:
                return
            stream.move(batch, k)
            try:
                self.take()
            except BaseException as exc:
                contained(exc)  # re-raises Ctrl-C; any other error was delivered before

    def take(self) -> Any:
        """Return the next sample. After the last one, set `ended` and return None."""
        try:
            sample = next(self._iterator)
        except StopIteration:
            self.ended = True
            _take_back(self.dataset)
            return None
        except BaseException:
            self.samples += 1
            raise
        self.samples += 1
        return sample

    def is_dead(self) -> bool:
        """Return whether the iterator is a generator that has ended."""
        return isgenerator(self._iterator) and getgeneratorstate(self._iterator) == GEN_CLOSED

    def state(self) -> dict[str, Any] | Exception:
        """Return the lane's state, for `LaneBatch.saved`, or the error that the dataset's `state_dict()` raised."""
        state = None
        if self._keeper is not None:
            try:
                state = copy.deepcopy(self._keeper.state_dict())  # the dataset may change its own
            except BaseException as exc:
                return contained(exc)
        return {"samples": self.samples, "state": state, "ended": self.ended}


def _shuffles(dataset: Any) -> bool:
    """Return whether a Hugging Face dataset has a shuffle buffer, which its state does not save."""
    todo: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    for source in todo:
        if type(source).__name__ == "BufferShuffledExamplesIterable" and source.buffer_size > 1:
            return True
        if source is not None:
            todo += [getattr(source, "ex_iterable", None), *getattr(source, "ex_iterables", ())]
    return False


_lent: dict[int, list[tuple[dict[str, Any], str, Any, Any, dict[str, Any]]]] = {}
"""By the id of a dataset: where it holds the state that it loaded for its latest pass, and what was there."""


def _lend(dataset: Any, state: Any) -> None:
    """Load a copy of `state` into a dataset for one pass. Parts that the dataset takes out of it may be for all."""
    of_hub = hasattr(dataset, "_ex_iterable") and isinstance(state, dict)
    if of_hub and state.get("epoch", dataset.epoch) != dataset.epoch:
        # Hugging Face's datasets then begin at the front, in silence.
        raise StateError(
            f"lanes: the state is of epoch {state['epoch']} of the {type(dataset).__name__}, which is at epoch "
            f"{dataset.epoch}. Call its set_epoch({state['epoch']}) before the epoch begins"
        )
    memo: dict[int, Any] = {}  # where deepcopy keeps the originals
    own = copy.deepcopy(state, memo)
    before = [(held, dict(held)) for held in _attributes(dataset)]
    load_into(dataset, own, "lanes")
    originals = {id(memo[id(part)]): part for part in memo.get(id(memo), ())}
    _lent[id(dataset)] = [
        (held, name, part, originals[id(part)], {k: old[k] for k in (name,) if k in old})
        for held, old in before
        for name, part in list(held.items())
        if id(part) in originals and (part is own or "_ex_iterable" in held)
    ]
    weakref.finalize(dataset, _lent.pop, id(dataset), None).atexit = False


def _take_back(dataset: Any) -> None:
    """Take a loaded state out of a dataset that still holds it, so that the next pass begins at the front.

    Hugging Face's datasets keep it for good. A state that has changed since is the dataset's own, and stays.
    """
    for held, name, part, original, before in _lent.pop(id(dataset), ()):
        with suppress(Exception):  # tensors cannot be compared
            if held.get(name) is part and part == original:
                del held[name]
                held.update(before)


def _attributes(source: Any) -> Iterator[dict[str, Any]]:
    """Yield the attributes of an object, and of all objects that attributes lead to. No code of a class runs."""
    todo, seen = [source], set[int]()
    while todo:
        x = todo.pop()
        held = {} if issubclass(type(x), ModuleType) else own_dict(x)
        if held and id(held) not in seen:
            seen.add(id(held))
            todo += held.values()
            yield held
