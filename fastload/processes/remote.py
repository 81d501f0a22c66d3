"""One reader of a worker process, as the loop's process sees it. A thread of the loop's process drives it."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import socket
import weakref
from typing import Any, Protocol

import numpy as np

from fastload._kit.user_errors import shown_indices
from fastload.errors import WorkerDiedError
from fastload.memory.batch import Batch
from fastload.memory.layout import ALIGN
from fastload.order.lanes import LaneBatch
from fastload.processes import jobs
from fastload.processes.answers import fill, report
from fastload.processes.jobs import Answer, Ticket
from fastload.processes.packing import PackedError, pack, packed_indices, unpack_error
from fastload.processes.pausing import busy
from fastload.processes.segments import Segment, Segments
from fastload.processes.wire import Wire, cpu_seconds
from fastload.random.keys import StreamKeys
from fastload.random.streams import Stream, entered
from fastload.reading.notices import Notices
from fastload.settings import Settings

IDLE_SECONDS = 30.0
"""How long a worker may use no CPU time before it says that it runs, or while a batch is due."""

_log = logging.getLogger("fastload")


class Process(Protocol):
    """What a reader needs of its process; see `Child`."""

    dead: bool
    pid: int

    def on_drop(self, number: int, *, closing: bool = False) -> None:
        """See `Child`."""

    def died(self, doing: str, hint: str = "", of: Remote | None = None) -> WorkerDiedError:
        """See `Child`."""

    def waits(self, did: str) -> str:
        """See `Child`."""


class Remote:
    """A reader of a worker process: sends it one batch after another.

    Args:
        child: its process.
        worker: the worker's id.
        settings: the loader's arguments.
        segments: lends the memory of batches.
        notices: collects warnings for the loop.
    """

    def __init__(
        self, child: Process, worker: int, settings: Settings, segments: Segments, notices: Notices
    ) -> None:
        self.worker = worker
        self.cpu_s = 0.0
        self.reading: Batch | None = None
        self._child: Process = weakref.proxy(child)  # no cycle, which would keep segments
        self._settings = settings
        self._segments = segments
        self._notices = notices
        self._keys: StreamKeys | None = None  # those of the ticket before
        self._lane_state: Any = None
        self._known: dict[tuple[int, int], None] = {}  # the segments that it maps
        self._retired = 0  # `Segments.retired` at the last ticket
        self._raised: list[BaseException] = []

    def connect(self, end: socket.socket, watched: int | None) -> None:
        """Use a socket. `watched` can be read once the process is dead."""
        self.wire = Wire(end, end.fileno() if watched is None else watched)

    def head(self) -> str:
        """Return which reader this is, and what it reads."""
        said, batch = f"worker {self.worker} (process {self._child.pid})", self.reading
        if batch is not None:
            said += f", reading sample indices {shown_indices(batch.indices)} of {batch}"
        return said

    def read(self, batch: Batch, *, lost: bool) -> float:
        """Let the process read a batch. Return the seconds that reading took. `lost` says that it was dead already."""
        self.reading, batch.lost, batch.on_drop = batch, lost, self._child.on_drop
        segment = None
        try:
            segment = self._segments.lend()
            message, descriptors = self._ticket(batch, segment)
        except Exception as exc:
            batch.where = f"{batch}; stage: hand over to a worker process"
            return self._failed(batch, segment, exc)
        try:
            if batch.dropped:
                self._child.on_drop(batch.number)
            answer, descriptors = self._answer(message, descriptors)
        except (EOFError, OSError) as exc:
            if isinstance(exc, OSError) and exc.errno == errno.EMFILE:
                batch.where = f"{batch}; stage: hand over from worker process {self._child.pid}"
                return self._failed(batch, segment, exc)
            what = f"sample indices {shown_indices(batch.indices)} of " if batch.indices else ""
            batch.where = ""
            doing = f"{'no other was left to read' if batch.lost else 'it read'} {what}{batch}"
            return self._failed(batch, segment, self._child.died(doing, of=self))
        finally:
            batch.on_drop = None
            self.reading = None
        with busy:
            try:
                memories = self._memories(answer, descriptors, segment)
            except OSError as exc:  # no more descriptors, or no more memory
                return self._failed(batch, segment, exc)
            finally:
                for descriptor in descriptors:  # of segments after one that cannot be mapped
                    os.close(descriptor)
            fill(batch, answer, memories, self._raised, self._child.pid)
            recorder = batch.recorders[self.worker]
            report(answer, batch, recorder, self._notices, self._settings.dataset)
        self.cpu_s += answer.waits[2]
        if isinstance(batch, LaneBatch):
            self._lane_state = batch.state
        return answer.run[1]

    def _failed(self, batch: Batch, segment: Segment | None, error: Exception) -> float:
        """Let a batch raise an error, and its lane stay where it was. Its segment is never lent again."""
        batch.error, batch.on_drop, self.reading = error, None, None
        if segment is not None:
            self._segments.retire(segment)
        if isinstance(batch, LaneBatch) and self._lane_state is not None:
            batch.state = self._lane_state
        return 0.0

    def _ticket(self, batch: Batch, segment: Segment | None) -> tuple[bytes, list[int]]:
        new = self._keys is not batch.keys  # an iterable dataset begins again with other keys
        if new:
            self._lane_state = None
        given = packed_indices(batch.given)
        if isinstance(batch, LaneBatch):
            given = batch.size, batch.saved if new else None
        forget: list[tuple[int, int]] = []
        retired = self._segments.retired
        if retired != self._retired:
            forget = [key for key in self._known if not self._segments.has(key)]
        fresh = segment is not None and segment.key not in self._known
        ticket = Ticket(
            number=batch.number,
            keys=batch.keys if new else None,
            epoch=batch.epoch,
            ordinal=batch.ordinal,
            position=batch.position,
            given=given,
            segment=None if segment is None else segment.key,
            nbytes=segment.nbytes if fresh and segment is not None else 0,
            forget=forget,
        )
        message = pickle.dumps(ticket, 5)
        # Only now: if the indices cannot be pickled, the process has learnt nothing.
        self._keys = batch.keys
        self._retired = retired
        for key in forget:
            del self._known[key]
        if segment is not None:
            self._known[segment.key] = None
        return message, [segment.descriptor] if fresh and segment is not None else []

    def _answer(self, message: bytes, descriptors: list[int]) -> tuple[Answer, list[int]]:
        """Send a ticket, and answer the questions that come before the batch."""
        self._raised.clear()
        self.wire.send(message, descriptors)
        cpu_s = -1.0
        while True:
            while (received := self.wire.receive(IDLE_SECONDS)) is None:
                before, cpu_s = cpu_s, cpu_seconds(self._child.pid)
                if cpu_s == before and "idle" not in self._notices.warned:
                    self._notices.warned.add("idle")
                    # Not a warning: the loop may be waiting for this very batch.
                    _log.warning("fastload: %s", self._child.waits("read a batch"))
            what, found = pickle.loads(received[0])
            if what != jobs.FAILED_SAMPLE:
                return found, received[1]
            del received
            self.wire.send(pickle.dumps(self._handled(*found), 5))

    def _handled(self, index: Any, packed: PackedError, drawn: Any) -> tuple[Any, int | None, Any]:
        """Call `on_error` in the sample's random stream.

        Return the sample that it chose, or the number of what it raised, which may be the error itself. Return what it
        drew, too.
        """
        error, sample, number = unpack_error(packed), None, None
        on_error: Any = self._settings.on_error
        stream = Stream(modules=self._settings.modules())
        with busy, entered(stream):
            stream.resume(drawn)
            try:
                sample = pack(on_error(index, error))
            except BaseException as exc:
                if exc is not error:
                    exc.__context__ = exc.__context__ or error
                number = len(self._raised)
                self._raised.append(exc)
            return sample, number, stream.drawn()

    def _memories(
        self, answer: Answer, descriptors: list[int], segment: Segment | None
    ) -> list[np.ndarray]:
        """Return the loans of the segments that a batch takes."""
        memories, total = [], 0
        lent = segment
        for key, used, size in answer.used:
            if size:
                found = Segment(key, descriptors.pop(0), size)
                self._segments.adopt(found)
                self._known[key] = None
            else:
                assert segment is not None
                assert segment.key == key
                found, lent = segment, None
            memories.append(self._segments.loan(found, again=not answer.kept))
            total += used + ALIGN
        if lent is not None:
            self._segments.give_back(lent)
        self._segments.needs(total)
        return memories
