"""What a loader's process sends to one of its worker processes, and what comes back."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fastload._kit.torch_private import modes_are_on
from fastload._kit.user_errors import shown_indices
from fastload.memory.batch import Batch
from fastload.memory.layout import ALIGN
from fastload.order.lanes import LaneBatch
from fastload.processes import jobs
from fastload.processes.jobs import TicketMessage
from fastload.processes.outcome import Outcome
from fastload.processes.packing import pack, packed_indices
from fastload.processes.pausing import busy
from fastload.processes.segments import Segment, Segments
from fastload.processes.wire import TOO_MANY, Packet, Wire
from fastload.random.keys import StreamKeys
from fastload.random.streams import Stream, entered
from fastload.reading.notices import Notices
from fastload.settings import Settings
from fastload.telemetry import WaitClock
from fastload.telemetry.remote_reads import Counts


class Sent(NamedTuple):
    """A batch that the process was sent and has not answered."""

    batch: Batch
    segment: Segment | None
    """What it was lent for the batch."""
    raised: list[BaseException]
    """What `on_error` raised for its samples, in the loop's process."""


class Lost(NamedTuple):
    """What a process that died was sent and did not answer."""

    begun: dict[int, Sent]
    """By the worker that read it."""
    others: list[Sent]


class Remote:
    """The batches of one worker process. Any thread may send, one receives.

    Args:
        workers: the process's, in the order of their marks.
        settings: the loader's arguments.
        segments: lends the memory of batches.
        notices: collects warnings for the loop.
    """

    def __init__(
        self, workers: Sequence[int], settings: Settings, segments: Segments, notices: Notices
    ) -> None:
        self.cpu_s = 0.0
        """The CPU seconds of the process until its latest look."""
        self.probes = 0, 0
        """How often the process probed its GIL while there was work, and how often that was in use."""
        self.fetched: Counts = Counter()
        """What the process had read from object stores at its latest answer."""
        self.workers = workers
        self._settings = settings
        self._segments = segments
        self._notices = notices
        # Owns the fields below and the order of tickets: one names what those before it brought. Re-entrant: a signal
        # handler may ask for `stats()`.
        self._lock = threading.RLock()
        self._sent: dict[int, Sent] = {}
        self._unsent: deque[Packet] = deque()
        self._open = False
        self._keys: dict[int, StreamKeys] = {}  # of the latest ticket, by lane
        self._known: dict[tuple[int, int], None] = {}  # the segments that the process maps
        self._retired = 0  # `Segments.retired` at the last ticket
        self._marks = np.full(len(workers), -1)  # the batch that each reads, or read last
        self._idle = WaitClock()  # workers, while there is no batch for them
        self._lane_states: dict[int, Any] = {}  # after the latest batch; only who receives uses it

    def connect(self, end: socket.socket, pid: int) -> None:
        """Use a socket to a process, and share with it the marks of what its workers read."""
        self.wire, self._end, self._pid, self._open = Wire(end), end, pid, True
        marks = Segment.new((-1, -1), self._marks.nbytes)
        view = marks.view()[: self._marks.nbytes].view(np.int64)
        view[:] = self._marks
        self._marks = view
        self.wire.send(b"", [marks.descriptor])
        marks.forget()

    def begin(self) -> None:
        """Count from now on how long workers have no batch to read."""
        with self._lock:
            self._idle.start()

    def idle_s(self) -> float:
        """Return the seconds that workers had no batch to read, added up."""
        with self._lock:
            return self._idle.seconds() * len(self.workers)

    def reading(self) -> dict[int, Sent]:
        """Return what each worker reads now, by worker."""
        with self._lock:
            pairs = zip(self.workers, self._marks.tolist(), strict=True)
            return {k: self._sent[mark] for k, mark in pairs if mark in self._sent}

    def state(self) -> tuple[int, ...]:
        """Return the numbers of the batches without an answer, and of those that workers have marked."""
        with self._lock:
            return (*self._sent, *self._marks.tolist()) if self._sent else ()

    # ---- sending ----

    def send(self, batch: Batch) -> bool:
        """Send a batch. Return False if the process is dead.

        If the socket has no room, its tickets have answers, and each answer sends what is left. Raise what pickling of
        the indices raises, and OSError if memory or descriptors run out. Then nothing is sent.
        """
        with self._lock:
            if not self._open:
                return False
            # In a mode, such as that of fake tensors, this thread can map nothing: the process creates a segment.
            segment = None if modes_are_on() else self._segments.lend()
            try:
                self._unsent.append(self._ticket(batch, segment))
            except BaseException:
                if segment is not None:
                    self._segments.retire(segment)
                raise
            if not self._sent:
                self._idle.stop()
            self._sent[batch.number] = Sent(batch, segment, [])
            self._flush()
        return True

    def _flush(self) -> None:
        try:
            while self._unsent and self.wire.send_packet(self._unsent[0], waits=False):
                self._unsent.popleft()
        except OSError:
            # The process has died, or must: it does not know what this ticket would have told it.
            self._unsent.clear()
            with suppress(OSError):
                self._end.shutdown(socket.SHUT_RDWR)

    def _ticket(self, batch: Batch, segment: Segment | None) -> Packet:
        lane = batch.lane if isinstance(batch, LaneBatch) else 0
        new = self._keys.get(lane) is not batch.keys
        given = packed_indices(batch.given)
        if isinstance(batch, LaneBatch):
            given = batch.size, batch.saved if new else None
        forget: list[tuple[int, int]] = []
        retired = self._segments.retired
        if retired != self._retired:
            forget = [key for key in self._known if not self._segments.has(key)]
        fresh = None if segment is None or segment.key in self._known else segment
        ticket = TicketMessage(
            number=batch.number,
            lane=lane,
            keys=batch.keys if new else None,
            epoch=batch.epoch,
            ordinal=batch.ordinal,
            position=batch.position,
            given=given,
            segment=None if segment is None else segment.key,
            nbytes=0 if fresh is None else fresh.nbytes,
            forget=forget,
        )
        descriptors = [] if fresh is None else [fresh.descriptor]
        packet = Packet(pickle.dumps((jobs.TICKET, tuple(ticket)), 5), descriptors)
        # Only now: if the indices cannot be pickled, the process has learnt nothing.
        self._keys[lane] = batch.keys
        self._retired = retired
        for key in forget:
            del self._known[key]
        if segment is not None:
            self._known[segment.key] = None
        return packet

    # ---- receiving ----

    def receive(self) -> Batch | Callable[[], None]:
        """Return what came: a batch, filled, or a call that answers a question by `on_error`.

        Call this if the wire can be read. Raise EOFError or OSError if the process is dead and all that it sent was
        received.
        """
        received = self.wire.receive(waits=False)
        assert received is not None
        message, descriptors = received
        with busy:  # errors are objects of the user's classes
            what, found = pickle.loads(message)
        if what == jobs.FAILED_SAMPLE:
            number, *question = found
            return partial(self._handle, self._sent[number].raised, *question)
        return self._take(Outcome(*found), descriptors)

    def discard(self) -> None:
        """Receive something and throw it away. Raise EOFError or OSError as `receive` does."""
        received = self.wire.receive(waits=False)
        for descriptor in received[1] if received else ():
            os.close(descriptor)

    def _take(self, outcome: Outcome, descriptors: list[int]) -> Batch:
        with self._lock:
            batch, segment, raised = self._sent.pop(outcome.number)
            if not self._sent:
                self._idle.start()
            self._flush()
        outcome.report(batch, self._notices, self._settings.dataset)
        if outcome.waits is not None:  # a later look may have come before it
            _, _, cpu_s, probes = outcome.waits
            self.cpu_s, self.probes = max(self.cpu_s, cpu_s), max(self.probes, probes)
        if outcome.fetched and outcome.fetched["requests"] >= self.fetched["requests"]:
            self.fetched = outcome.fetched
        try:
            memories = self._memories(outcome, descriptors, segment)
        except OSError as exc:  # no more descriptors, or no more memory
            batch.where = f"{batch}; stage: hand over from worker process {self._pid}"
            self.fail(batch, segment, exc)
            return batch
        finally:
            for descriptor in descriptors:  # of segments after one that cannot be mapped
                os.close(descriptor)
        with busy:
            outcome.fill(batch, memories, raised, self._pid)
        if isinstance(batch, LaneBatch):
            self._lane_states[batch.lane] = batch.state
        return batch

    def fail(self, batch: Batch, segment: Segment | None, error: Exception) -> None:
        """Let a batch raise an error, and its lane stay where it was. Its segment is never lent again."""
        batch.error = error
        if segment is not None:
            self._segments.retire(segment)
        if isinstance(batch, LaneBatch) and batch.lane in self._lane_states:
            batch.state = self._lane_states[batch.lane]

    def _handle(
        self,
        all_raised: list[BaseException],
        worker: int,
        index: Any,
        error: Exception,
        drawn: Any,
    ) -> None:
        """Call `on_error` in the sample's random stream, and send what it chose.

        That is a sample, or the number of what it raised, which may be the error itself. Send what it drew, too.
        """
        sample, raised = None, None
        on_error: Any = self._settings.on_error
        stream = Stream(modules=self._settings.modules())
        try:
            with busy, entered(stream):
                stream.resume(drawn)
                try:
                    sample = pack(on_error(index, error))
                except BaseException as exc:
                    if exc is not error:
                        exc.__context__ = exc.__context__ or error
                    raised = len(all_raised)
                    all_raised.append(exc)
                handled = worker, sample, raised, stream.drawn()
            with suppress(OSError):  # the process has died, which its receiver will notice
                self.wire.send(pickle.dumps((jobs.HANDLED, handled), 5))
        finally:
            # The traceback of an error that a user keeps holds this frame.
            del error, all_raised, self

    def _memories(
        self, outcome: Outcome, descriptors: list[int], segment: Segment | None
    ) -> list[np.ndarray]:
        """Return the loans of the segments that a batch takes."""
        memories, total = [], 0
        lent = segment
        for key, used, size in outcome.used:
            if size:
                if not descriptors:
                    raise OSError(errno.EMFILE, TOO_MANY)
                found = Segment(key, descriptors.pop(0), size)
                self._segments.adopt(found)
                with self._lock:
                    self._known[key] = None
            else:
                assert segment is not None
                assert segment.key == key
                found, lent = segment, None
            memories.append(self._segments.loan(found, again=not outcome.kept))
            total += used + ALIGN
        if lent is not None:
            self._segments.give_back(lent)
        self._segments.needs(total)
        return memories

    # ---- the end ----

    def close(self) -> Lost:
        """Send no more. Return what the process, which is dead, was sent and did not answer."""
        begun = self.reading()
        with self._lock:
            self._open = False
            self._marks = self._marks.copy()  # lets go of the memory
            left, self._sent = self._sent, {}
            self._unsent.clear()
        numbers = {sent.batch.number for sent in begun.values()}
        return Lost(begun, [sent for sent in left.values() if sent.batch.number not in numbers])


def what_is_read(batch: Batch) -> str:
    """Return what names a batch and its samples."""
    what = f"sample indices {shown_indices(batch.indices)} of " if batch.indices else ""
    return f"{what}{batch}"
