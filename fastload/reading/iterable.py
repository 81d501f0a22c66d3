"""Reads an iterable dataset: each worker its own copy, in its own lane. See `order.lanes`."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from inspect import GEN_CLOSED, getgeneratorstate, isgenerator
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
import torch

from fastload._kit.user_errors import contained, shown
from fastload.errors import StateError
from fastload.memory.batch import Batch
from fastload.memory.collate import list_builder
from fastload.order.lanes import LaneBatch
from fastload.order.state import keeps_state, load_into
from fastload.random.keys import StreamKeys
from fastload.random.streams import Stream
from fastload.reading import hub_streams
from fastload.reading.failures import Failures, fail
from fastload.reading.notices import Notices
from fastload.reading.sources import Reader, Source
from fastload.settings import Settings

_FIRST = 8
"""How many samples of a pass are in its checksum. A difference that begins later is not noticed."""
_RUN_SECONDS = 0.001
"""How long the samples of a stream that are taken at once should last, so that a dropped batch is left soon."""
_PARTS, _ELEMENTS = 256, 1 << 16
"""How many parts of a sample are, and elements of a tensor or array."""


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
        self._exact = settings.exact
        if self._exact and (said := settings.dataset.warning(settings.lanes)):
            notices.warn("readers", said)
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
        batch.state = lane.state(reader.stream)
        return ()

    def _lane(self, batch: LaneBatch, reader: Reader) -> Lane:
        """Return the lane of a batch. The first batch of an epoch begins another pass."""
        lane = self._lanes[batch.lane]
        if lane is None or lane.keys is not batch.keys:
            self._lanes[batch.lane] = lane = Lane(reader.dataset, batch.keys, exact=self._exact)
            self._begin(batch, lane, reader)
        return lane

    def _begin(self, batch: LaneBatch, lane: Lane, reader: Reader) -> None:
        """Begin a lane. If that fails, the batch fails, and the lane has ended."""
        try:
            lane.begin(batch, reader.stream, self._notices)
        except BaseException as exc:
            lane.ended = True
            fail(batch, 0, contained(exc), f"{batch}; stage: iter")

    def _take(self, batch: LaneBatch, lane: Lane, reader: Reader) -> None:
        """Take samples until the batch is full, the lane has ended, or a sample has failed."""
        batch.size = 0
        batch.position = lane.samples
        batch.indices = range(lane.samples, lane.samples + self._batch_size)
        batch.builder = builder = list_builder(self._batch_size)
        while batch.size < self._batch_size and not (lane.ended or batch.failed or batch.dropped):
            reader.stream.move(batch, batch.size)
            samples: list[Any] = []
            error = None
            try:
                lane.take(samples, self._batch_size - batch.size)
            except BaseException as exc:
                error = exc
            for k, sample in enumerate(samples, batch.size):
                builder.put(k, sample)
            batch.size += len(samples)
            if error is None:
                continue
            if lane.is_untried and isinstance(error, Exception):
                lane.drop_state(error)
                self._begin(batch, lane, reader)
                self._take(batch, lane, reader)
                return
            batch.size += 1
            self._lane_failed(batch, batch.size - 1, lane, error)
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

    def __init__(self, dataset: Any, keys: StreamKeys, *, exact: bool) -> None:
        self.dataset = dataset
        self.keys = keys
        self._exact = exact  # its samples draw from streams of their own
        self.samples = 0  # taken, including those that raised
        self.ended = False
        self._run = 1  # how many samples of an exact stream are taken at once
        self._seen = 0  # the checksum of the first samples
        self._iterator: Iterator[Any] = iter(())
        self._keeper: Any = None  # the dataset or its iterator, if one keeps a state
        self._fault = ""  # why a state that the dataset keeps is not used
        self._streams = [] if exact else hub_streams.streams(dataset)
        if hub_streams.shuffles(self._streams):
            self._fault = "has a shuffle buffer, which its state does not hold"
        self.is_untried = False
        """Whether a Hugging Face stream has a state that it loads at its next sample."""

    def begin(self, batch: LaneBatch, stream: Stream, notices: Notices) -> None:
        """Create the iterator and bring it to the lane's saved state, unless the batch is dropped meanwhile.

        Load the state into the dataset or its iterator. If neither keeps a state, read its samples again and skip them.
        """
        saved = batch.saved
        hub_streams.take_back(self.dataset, self._streams)
        if saved["epoch"] is not None:
            self.dataset.set_epoch(saved["epoch"])
        _check_epoch(self.dataset, saved["state"])
        if saved["samples"] and hub_streams.unseeded(self._streams):
            raise StateError(
                "lanes: the stream shuffles in another order each time. Give shuffle() a seed"
            )
        state = None if self._fault else saved["state"]
        # A pass that is read again draws what it drew before.
        if not self._exact:
            stream.begin_pass(self.keys.batch(0, 0), {} if state is None else saved["draws"])
        if saved["ended"]:
            self.samples, self.ended = saved["samples"], True
            return
        self._keeper = self.dataset if keeps_state(self.dataset) and not self._fault else None
        if self._keeper is not None and state is not None:
            hub_streams.lend(self.dataset, state, self._streams)
        self._iterator = iter(self.dataset)
        if self._keeper is None and not self._fault and keeps_state(self._iterator):
            self._keeper = self._iterator
        if state is not None:
            if self._keeper is not self.dataset:
                load_into(self._iterator, copy.deepcopy(state), "lanes")
            self.samples, self._seen = saved["samples"], saved["seen"]
            self.is_untried = bool(self._streams)
            return
        if saved["samples"] and self._keeper is None and hasattr(self.dataset, "state_dict"):
            reason = (
                self._fault or "lacks state_dict() and load_state_dict(state) with these arguments"
            )
            notices.warn(
                "read again",
                f"{type(self.dataset).__name__} {reason}, so its samples up to the saved position are read again. That "
                "takes as long as before. If its order depends on an epoch that it counts, set that epoch before you "
                "resume",
            )
        batch.indices = range(saved["samples"])
        for k in batch.indices:
            if batch.dropped:
                return
            if self.ended:
                break
            stream.move(batch, k)
            try:
                self.take([], 1)
            except BaseException as exc:
                contained(exc)  # re-raises Ctrl-C; any other error was delivered before
        if (self.samples, self._seen) != (saved["samples"], saved["seen"]):
            notices.warn(
                "other samples",
                f"{type(self.dataset).__name__} gave other samples as it was read again up to the saved position. If "
                "its order is another one, some samples come twice, and others never. Let it depend on fixed seeds and "
                "set_epoch() alone, or give the dataset state_dict() and load_state_dict(state)",
            )

    def drop_state(self, exc: Exception) -> None:
        """Let `begin` read again, because the dataset cannot load its state. A sample's own error comes again."""
        self._fault = f"cannot load its saved state ({type(exc).__name__}: {shown(exc, str):.100})"
        self.samples, self._seen, self.is_untried = 0, 0, False

    def take(self, samples: list[Any], count: int) -> None:
        """Append the next sample, or of an exact stream up to `count`. After the last one, set `ended`."""
        before = len(samples)
        try:
            if self._exact:
                self._take_several(samples, count)
            else:
                samples.append(next(self._iterator))
                if self.samples < _FIRST:
                    self._seen = checksum(samples[-1], self._seen)
        except StopIteration:
            self.ended = True
            hub_streams.take_back(self.dataset, self._streams)
        except BaseException:
            self.samples += 1
            raise
        finally:
            self.samples += len(samples) - before
        self.is_untried = False

    def _take_several(self, samples: list[Any], count: int) -> None:
        """Append some samples. Raise StopIteration after the last one."""
        began, count = perf_counter(), min(count, self._run)
        wanted = len(samples) + count
        self._iterator.take(samples, count)  # type: ignore[attr-defined]
        self._run = max(self._run, 2 * count) if perf_counter() - began < _RUN_SECONDS else 1
        if len(samples) < wanted:
            raise StopIteration

    def is_dead(self) -> bool:
        """Return whether the iterator is a generator that has ended."""
        return isgenerator(self._iterator) and getgeneratorstate(self._iterator) == GEN_CLOSED

    def state(self, stream: Stream) -> dict[str, Any] | Exception:
        """Return the lane's state, for `LaneBatch.saved`, or the error that the dataset's `state_dict()` raised."""
        state = None
        if self._keeper is not None:
            try:
                state = self._keeper.state_dict()
                if not self._exact:
                    state = copy.deepcopy(state)  # the dataset may change its own
            except BaseException as exc:
                return contained(exc)
        draws = {} if state is None or self._exact else stream.pass_state()
        done = {"samples": self.samples, "ended": self.ended, "seen": self._seen}
        return {**done, "state": state, "draws": draws}


def checksum(sample: Any, before: int) -> int:
    """Return a checksum of a sample's data, continued from `before`. It never raises, and no code of a class runs."""
    parts = [sample]
    for part in islice(parts, _PARTS):  # it grows
        kind = type(part)
        data: Any = kind.__qualname__.encode()
        with suppress(Exception):
            if kind is dict:
                parts += [*islice(part.keys(), _PARTS), *islice(part.values(), _PARTS)]
            elif kind in (list, tuple):
                parts += part[:_PARTS]
            elif kind is torch.Tensor:
                flat = part.detach().reshape(-1)[:_ELEMENTS]
                data = flat.contiguous().view(torch.uint8).numpy()
            elif kind is np.ndarray and not part.dtype.hasobject:
                data = part.reshape(-1)[:_ELEMENTS].tobytes()
            elif kind in (str, int, float, bool, bytes) or issubclass(kind, np.generic):
                data = repr(part).encode(errors="replace")
        before = zlib.crc32(data, before)
    return before


def _check_epoch(dataset: Any, state: Any) -> None:
    """Raise StateError if a Hugging Face stream is at another epoch: it would begin at the front, in silence."""
    of_hub = hasattr(dataset, hub_streams.CHAIN) and isinstance(state, dict)
    if of_hub and state.get("epoch", dataset.epoch) != dataset.epoch:
        raise StateError(
            f"lanes: the state is of epoch {state['epoch']} of the {type(dataset).__name__}, which is at epoch "
            f"{dataset.epoch}. Call its set_epoch({state['epoch']}) before the epoch begins"
        )
