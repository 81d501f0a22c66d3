"""`max_wait_ms`: batches by size or by deadline, of iterable datasets that wait for their samples.

A `next()` that waits for a message cannot be interrupted. So each worker gets a second thread, the *reader*. The reader
iterates over the dataset and appends each sample to a bounded line. The worker takes samples from the line and makes a
batch when it has enough, or at the deadline:

    reader: next(dataset) -> line of at most batch_size samples -> worker: a batch, collate -> loop
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

from fastload.fetch import Reader
from fastload.iterable import Lane, LaneBatch, LaneFetcher
from fastload.notices import Notices
from fastload.randomness import Stream
from fastload.settings import Settings
from fastload.slots import SlotPool
from fastload.user_errors import contained
from fastload.window import Window


class _Sample(NamedTuple):
    """What the reader hands over: a sample, an error, or the end; and the lane as it is after it."""

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
    """One pass over a worker's dataset, in one epoch, as its worker sees it: the samples come out of a line.

    The reader appends to the line and the worker takes from it. A deque needs no lock for that. Both wait in the
    window.

    Args:
        first: the first batch of the pass, which has the state to begin with.
        bound: the most samples in the line.
        tell: see `Changes.tell`.
    """

    def __init__(
        self, dataset: Any, first: LaneBatch, bound: int, tell: Callable[[], None]
    ) -> None:
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
        self.abandoned = False  # another pass has begun
        self.deadline = 0.0  # of the batch, by `perf_counter`
        self.bound = bound
        self.tell = tell
        self._dead = False
        self._state: Any = first.saved

    def begin(self, batch: LaneBatch, stream: Stream, dropped: Callable[[], bool]) -> None:
        """Do nothing: the reader begins the pass."""

    def take(self) -> Any:
        """Return the next sample in the line, or raise its error. At the end set `ended` and return None."""
        value, error, self.samples, self.ended, self._dead, self._state, _ = self.line.popleft()
        if len(self.line) == self.bound // 2:
            self.tell()  # the reader, if the line was full
        if error is not None:
            raise error
        return value

    def is_dead(self) -> bool:
        """See `Lane`."""
        return self._dead

    def state(self) -> Any:
        """Return the state after the last sample that was taken."""
        return self._state


class LineReader:
    """Runs one worker's dataset in a thread of its own, pass after pass."""

    def __init__(self, window: Window[Any]) -> None:
        self._window = window
        self._asked: LineLane | None = None

    def begin(self, dataset: Any, first: LaneBatch, bound: int) -> LineLane:
        """Begin another pass, drop the one before, and return the worker's side of it. The worker calls this."""
        lane = LineLane(dataset, first, bound, self._window.changes.tell)
        before, self._asked = self._asked, lane
        if before is not None:
            before.abandoned = True  # after `_asked`: `run` looks for another pass then
        self._window.changes.tell()
        return lane

    def run(self, dataset: Any, stream: Stream) -> None:
        """Read the passes that the worker asks for, until the window is closed."""
        self._window.changes.wait(lambda: self._asked is not None)
        while (lane := self._asked) is not None and not self._window.closed:
            self._read(lane, dataset, stream)
            self._window.changes.wait(lambda: lane.abandoned)

    def _read(self, target: LineLane, dataset: Any, stream: Stream) -> None:
        lane = Lane(dataset, target.keys)
        source = target.source

        def dropped() -> bool:
            return target.abandoned or self._window.closed

        try:
            lane.begin(source, stream, dropped)
        except BaseException as exc:
            lane.ended = True
            self._put(target, lane, None, contained(exc))
            return
        # The random stream of sample n is that of position n and index n.
        source.indices = range(1 << 62)
        while not (lane.ended or dropped()):
            stream.move(source, lane.samples)
            value: Any = None
            error: Exception | None = None
            try:
                value = lane.take()
            except BaseException as exc:
                error = contained(exc)
            self._put(target, lane, value, error)
            del value, error  # not kept while waiting
            if len(target.line) >= target.bound:
                self._window.changes.wait(
                    lambda: target.abandoned or len(target.line) <= target.bound // 2
                )
        stream.move(None, None)

    def _put(self, target: LineLane, lane: Lane, value: Any, error: Exception | None) -> None:
        dead = error is not None and lane.is_dead()
        now = perf_counter()
        target.line.append(_Sample(value, error, lane.samples, lane.ended, dead, lane.state(), now))
        self._window.changes.tell()


class DeadlineFetcher(LaneFetcher):
    """Makes batches of what the readers hand over, by size or by deadline."""

    def __init__(self, settings: Settings, pool: SlotPool, notices: Notices) -> None:
        super().__init__(settings, pool, notices)
        assert settings.max_wait_ms is not None
        self._max_wait_s = settings.max_wait_ms / 1e3
        self._readers: dict[int, LineReader] = {}  # by lane

    def reader(self, worker: int, window: Window[Any]) -> Callable[[Any, Stream], None]:
        """See `Fetcher`."""
        return self._readers.setdefault(worker, LineReader(window)).run

    def _new_lane(self, batch: LaneBatch, dataset: Any) -> Lane:
        return self._readers[batch.lane].begin(dataset, batch, self.batch_size)

    def _has_next(self, batch: LaneBatch, lane: Lane, reader: Reader) -> bool:
        """Wait for one more sample until the deadline of the batch. Return False if none came."""
        assert isinstance(lane, LineLane)
        if not super()._has_next(batch, lane, reader):
            return False
        line = lane.line
        if not line:
            left = lane.deadline - perf_counter() if batch.size else None
            if left is None or left > 0:
                reader.wait(lambda: bool(line) or batch.dropped, left)
            if not line or batch.dropped:
                return False
        if not batch.size:
            lane.deadline = line[0].arrived + self._max_wait_s
        first = line[0]
        if first.error is not None and first.ended:  # before the first sample
            lane.ended = True
            self._fail(batch, batch.size, first.error, f"{batch}; stage: iter")
            line.clear()
            return False
        return True
