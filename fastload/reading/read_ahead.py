"""`max_wait_ms`: batches by size or by deadline, of iterable datasets that wait for their samples.

A `next()` that waits for a message cannot be interrupted. So a second thread, the *reader*, iterates over the dataset
and appends each sample to a bounded line. The worker takes samples from the line, and makes a batch when it has enough,
or at the deadline:

    reader: next(dataset) -> line -> worker: a batch, collate -> loop

Each worker has its own reader, unless the dataset has a method `fastload_decode(sample)`. Then one reader serves all
workers. Each takes the next sample of the batch as it arrives, and decodes it while the reader waits for more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from fastload._kit.user_errors import contained
from fastload.memory.batch import Batch
from fastload.memory.collate import ListBuilder
from fastload.memory.slots import SlotPool
from fastload.order.lanes import LaneBatch
from fastload.random.streams import Stream
from fastload.reading.fetch import Reader
from fastload.reading.iterable import Lane, LaneFetcher
from fastload.reading.notices import Notices
from fastload.settings import Settings


class _Sample(NamedTuple):
    """What the reader hands over: a sample, an error, or the end, and the lane's state after it."""

    value: Any
    error: Exception | None
    samples: int
    ended: bool
    dead: bool
    """Whether the error has ended a generator."""
    state: Any
    arrived: float
    """By `perf_counter`."""


class LineLane(Lane):
    """One pass over a worker's dataset, in one epoch. To its workers, the samples come out of a line.

    The reader appends to the line, and one worker at a time takes from it. A deque needs no lock for that. Both wait in
    the window.

    Args:
        first: the first batch of the pass, which has the state to begin from.
        bound: the most samples in the line.
        window: the loader's window.
    """

    def __init__(self, dataset: Any, first: LaneBatch, bound: int, window: Any) -> None:
        super().__init__(dataset, first.keys)
        self.line: deque[_Sample] = deque()
        # The reader's own batch, which gives it the saved state and the keys of the random streams.
        self.source = LaneBatch(
            first.lane,
            1,
            first.saved,
            keys=first.keys,
            recorders=first.recorders,
            epoch=first.epoch,
            ordinal=first.ordinal,
        )
        self.deadline = 0.0  # of the batch that takes samples, by `perf_counter`
        self.bound = bound
        self.window = window
        self.samples = first.saved["samples"]
        self._state: Any = first.saved

    def begin(self, batch: LaneBatch, stream: Stream, dropped: Callable[[], bool]) -> None:
        """Do nothing: the reader begins the pass."""

    def pop(self) -> _Sample:
        """Take the first sample out of the line."""
        sample = self.line.popleft()
        self.samples, self.ended, self._state = sample.samples, sample.ended, sample.state
        if len(self.line) == self.bound // 2:
            self.window.changes.tell()  # the reader, if the line was full
        return sample

    def state(self) -> Any:
        """Return the state after the last sample that was taken."""
        return self._state


class LineReader:
    """Runs one worker's dataset in a thread of its own, pass after pass. Its samples may be decoded afterwards."""

    def __init__(self, window: Any, *, decoded: bool) -> None:
        self._window = window
        self._decoded = decoded
        self._asked: LineLane | None = None

    def begin(self, dataset: Any, first: LaneBatch, bound: int) -> LineLane:
        """Begin another pass, drop the previous one, and return the worker's side of it. The worker calls this."""
        lane = self._asked = LineLane(dataset, first, bound, self._window)
        self._window.changes.tell()
        return lane

    def run(self, dataset: Any, stream: Stream) -> None:
        """Read the passes that the worker asks for, until the window is closed."""
        self._window.changes.wait(partial(self._is_over, None))
        while (lane := self._asked) is not None and not self._window.closed:
            self._read(lane, dataset, stream)
            self._window.changes.wait(partial(self._is_over, lane))

    def _is_over(self, lane: LineLane | None) -> bool:
        """Return whether the worker has begun another pass."""
        return self._asked is not lane

    def _read(self, target: LineLane, dataset: Any, stream: Stream) -> None:
        lane = Lane(dataset, target.keys)
        source = target.source

        def dropped() -> bool:
            return self._is_over(target) or self._window.closed

        if self._decoded:  # decoding a sample draws other numbers than reading it
            source.position = 1 << 61
        error: Exception | None = None
        try:
            lane.begin(source, stream, dropped)
        except BaseException as exc:
            lane.ended, error = True, contained(exc)
        # `__iter__` raised, or fewer samples are there than when the state was saved.
        if lane.ended:
            self._put(target, lane, None, error)
        source.indices = range(1 << 62)  # the random stream of sample n is that of index n
        while not (lane.ended or dropped()):
            stream.move(source, lane.samples)
            value: Any = None
            error = None
            try:
                value = lane.take()
            except BaseException as exc:
                error = contained(exc)
            self._put(target, lane, value, error)
            value = error = None  # not kept while waiting
            if len(target.line) >= target.bound:
                self._window.changes.wait(
                    lambda: self._is_over(target) or len(target.line) <= target.bound // 2
                )
        stream.move(None, None)

    def _put(self, target: LineLane, lane: Lane, value: Any, error: Exception | None) -> None:
        dead = error is not None and lane.is_dead()
        now = perf_counter()
        target.line.append(_Sample(value, error, lane.samples, lane.ended, dead, lane.state(), now))
        self._window.changes.tell()


class DeadlineFetcher(LaneFetcher):
    """Makes batches of what the readers hand over, by size or by deadline. Each lane has one worker."""

    bound_in_batches = 1
    """The length of a reader's line."""

    def __init__(self, settings: Settings, pool: SlotPool, notices: Notices) -> None:
        super().__init__(settings, pool, notices)
        assert settings.max_wait_ms is not None
        self._max_wait_s = settings.max_wait_ms / 1e3
        self._readers: dict[int, LineReader] = {}  # by lane

    def reader(self, worker: int, window: Any) -> Callable[[Any, Stream], None] | None:
        """See `Fetcher`."""
        self._readers[worker] = LineReader(window, decoded=self.decodes)
        return self._readers[worker].run

    def read(self, batch: Batch, start: int, stop: int, reader: Reader) -> int:
        """Take the samples of `batch` from its lane, each in its random stream."""
        assert isinstance(batch, LaneBatch)
        while not batch.closed and (sample := self._take(batch, reader)) is not None:
            self._add(batch, batch.size - 1, sample, reader)
            if batch.failed:
                self._close(batch)
        return batch.size

    def finish(self, batch: Batch, collate_fn: Callable[[Any], Any], stream: Stream) -> None:
        """See `Fetcher`."""
        if isinstance(batch.builder, ListBuilder):
            batch.builder.shorten(batch.size)
        super().finish(batch, collate_fn, stream)

    def _new_lane(self, batch: LaneBatch, dataset: Any) -> Lane:
        bound = self.bound_in_batches * self.batch_size
        return self._readers[batch.lane].begin(dataset, batch, bound)

    def _add(self, batch: LaneBatch, k: int, sample: _Sample, reader: Reader) -> None:
        """Put a sample at position `k` of a batch, or record its error."""
        reader.stream.move(batch, k)
        if sample.error is not None:
            self._lane_failed(batch, k, reader.dataset, sample.error, dead=sample.dead)
            return
        try:
            value = self._value(sample.value, reader.dataset)
        except BaseException as exc:
            self._sample_failed(batch, k, reader.dataset, exc)
        else:
            batch.builder.put(k, value)  # type: ignore[union-attr]

    def _value(self, sample: Any, dataset: Any) -> Any:
        return sample

    def _take(self, batch: LaneBatch, reader: Reader) -> _Sample | None:
        """Wait for the next sample of a batch, and take it. Close a batch that gets no more.

        Return None if the deadline has passed, the stream has ended, or the batch is dropped.
        """
        lane = self._lane(batch, reader)
        assert isinstance(lane, LineLane)
        if batch.builder is None:
            self._open(batch, lane)
        sample = self._next(batch, lane, reader)
        if batch.dropped:
            return None
        if sample is None or batch.size == self.batch_size:
            self._close(batch)
        return sample

    def _close(self, batch: LaneBatch) -> None:
        lane = self._lanes[batch.lane]
        assert lane is not None
        batch.closed = True
        batch.state = lane.state()
        if lane.ended and not batch.size and not batch.failed:
            batch.ended = batch.left_out = True
            batch.builder = None

    def _next(self, batch: LaneBatch, lane: LineLane, reader: Reader) -> _Sample | None:
        """Take the next sample out of the line. Wait for it until the deadline. Return None if no sample came."""
        line = lane.line
        if lane.ended:
            return None
        left = lane.deadline - perf_counter() if batch.size else None
        if not line and (left is None or left > 0):
            reader.wait(lambda: bool(line) or batch.dropped, left)
        if not line or batch.dropped:
            return None
        if not batch.size:  # samples in the line belong to the batch, however old
            lane.deadline = max(line[0].arrived + self._max_wait_s, perf_counter())
        if line[0].arrived > lane.deadline:
            return None
        sample = lane.pop()
        if sample.ended:
            if sample.error is not None:  # before the first sample
                self._fail(batch, batch.size, sample.error, f"{batch}; stage: iter")
            return None
        batch.size += 1
        return sample


class DecodingFetcher(DeadlineFetcher):
    """Lets all workers decode the samples of one reader with the dataset's `fastload_decode`.

    A sample is a unit of a batch. A worker claims a unit and waits for its sample in one step, and keeps the others out
    meanwhile. So samples go into batches in order. A sample that arrives wakes that worker, which lets the next one in.
    """

    decodes = True
    run_seconds = 0.0  # always one unit, because `claim` takes one sample
    # The reader refills a line that is half empty, and a batch must not wait for that.
    bound_in_batches = 2

    def claim(self, window: Any, lane: int, reader: Reader) -> Any:
        """See `Fetcher`. Take the sample of the claimed unit too, if one comes."""
        with window.idle:
            window.next_sample.acquire()
        try:
            if (claim := window.claim(lane)) is None:
                return None
            batch = claim.ticket
            with window.idle:
                batch.taken[claim.start] = sample = self._take(batch, reader)
            # An error of the stream ends its batch. A decoding error does not: other workers may have later samples.
            if sample is not None and sample.error is not None and self._on_error == "raise":
                self._close(batch)
            if batch.closed:
                window.cut(batch)
            return claim
        finally:
            window.next_sample.release()

    def read(self, batch: Batch, start: int, stop: int, reader: Reader) -> int:
        """Decode the sample of a claimed unit in its random stream, if it has one."""
        assert isinstance(batch, LaneBatch)
        sample = batch.taken.pop(start)
        if sample is None:
            return 0
        self._add(batch, start, sample, reader)
        return 1

    def _value(self, sample: Any, dataset: Any) -> Any:
        return dataset.fastload_decode(sample)
