"""The batches that a worker process was sent. Its readers receive them, share their runs, and answer.

No thread only receives: if no reader does so, one that finds no work receives for all.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import torch

from fastload._kit.user_errors import contained
from fastload.memory.batch import Batch
from fastload.order.lanes import LaneBatch
from fastload.processes import jobs
from fastload.processes.beside import Beside
from fastload.processes.jobs import Job, TicketMessage
from fastload.processes.observed import Looks, Observed
from fastload.processes.outcome import Outcome, fields_of
from fastload.processes.packed_errors import dumps
from fastload.processes.packing import Packed, pack, unpack
from fastload.processes.segments import ProcessMemory, Segment, TicketMemory
from fastload.processes.wire import Wire
from fastload.random.keys import StreamKeys
from fastload.reading.ahead import LookAhead
from fastload.reading.fetch import Fetcher
from fastload.reading.notices import Notices
from fastload.reading.runs import Claim, Runs
from fastload.settings import Settings
from fastload.telemetry.remote_reads import read_so_far

T = TypeVar("T")

FULL, FREE = 0.8, 0.4
"""Shares of the time that the GIL is in use. Above the first, half as many readers are as fast, or faster, because they
wait for one another. Below the second, there is room for one more, and below half of it for twice as many."""


class Work:
    """What the readers of a process share.

    Args:
        job: which workers they are.
        settings: the loader's arguments.
        wire: brings tickets, takes answers.
        heard: hears what the loop's process says beside the wire.
        marks: int64[readers], which the loop's process sees: the number of the batch that each reads, or read last.
        notices: collects warnings for the loop.
    """

    def __init__(
        self,
        job: Job,
        settings: Settings,
        wire: Wire,
        heard: Beside,
        marks: np.ndarray,
        notices: Notices,
    ) -> None:
        self.notices = notices
        self.heard = heard
        self._job = job
        self._wire = wire
        self._marks = marks
        self._iterable = settings.iterable
        channels_last = settings.memory_format is torch.channels_last
        self._memory = ProcessMemory(job.workers[0], channels_last=channels_last)
        self.fetcher = Fetcher(settings, notices, self._memory)
        # Only called under the lock below.
        self._ahead = LookAhead(settings.dataset, self.fetcher.source, nullcontext())
        shares = len(job.workers) > 1
        self._changed = threading.Condition()  # owns the fields below
        self._runs: Runs[Batch] = Runs(
            len(job.workers) if settings.iterable else 1,
            self.fetcher.source.run_seconds if shares else None,
        )
        self._receiving = self._ended = False
        self._most = len(job.workers)  # how many may read at once
        self._active: set[int] = set()  # the workers that read
        self._keys: dict[int, StreamKeys] = {}  # of each lane; its first ticket brings them
        self._segments: dict[tuple[int, int], Segment] = {}
        self._memories: dict[int, TicketMemory] = {}  # of the batches
        self._handled: dict[int, Any] = {}  # by worker: what `on_error` chose
        if shares and not settings.iterable:  # a lane must not wait for another one
            heard.gil.on_share = self.adapt

    def claim(self, worker: int) -> Claim[Batch]:
        """Wait for samples to read, and claim some. Raise EOFError once the loop's process sends no more."""
        k = self._job.workers.index(worker)
        lane = k if self._iterable else 0

        def may_read() -> bool:
            return len(self._active) < self._most

        def found() -> Claim[Batch] | None:
            claim = self._runs.claim(lane) if may_read() else None
            if claim is not None:
                self._active.add(worker)
            return claim

        with self._changed:
            self._active.discard(worker)  # wakes none: if there is work, this worker takes it
            while self._ahead.listens and not self._receiving and self._wire.has_more():
                self._receive()  # the dataset hears of all that came before the first of it is read
        claim = self._wait(found, may_read)
        self._marks[k] = claim.ticket.number
        self._memory.use(self._memories[claim.ticket.number])
        return claim

    def adapt(self, share: float) -> None:
        """Let fewer readers read at once if the GIL was in use for most of the time, or more if it was free.

        A thread that waits for the GIL sleeps, and is woken late. Eight threads of pure Python take twice the time of
        one.
        """
        with self._changed:
            if share > FULL:
                self._most = max(1, self._most // 2)
            elif share < FREE:
                more = self._most + (self._most if share < FREE / 2 else 1)
                self._most = min(len(self._job.workers), more)
                self._changed.notify_all()

    def deliver(self, batch: Batch, units: int, seconds: float) -> bool:
        """Note what was read. Return True if it was the last of the batch, which this worker finishes and answers."""
        with self._changed:
            return self._runs.deliver(batch, units, seconds)

    def ask(self, worker: int, question: tuple[Any, ...]) -> tuple[Any, int | None, Any]:
        """Let the loop's process call `on_error` for a sample of the batch that a worker reads."""
        number = int(self._marks[self._job.workers.index(worker)])
        question = jobs.FAILED_SAMPLE, (number, worker, *question)
        self._wire.send(dumps(question, who_is([worker])))
        handled: tuple[Any, int | None, Any] = self._wait(
            lambda: self._handled.pop(worker, None), lambda: True
        )
        return handled

    def _wait(self, found: Callable[[], T | None], receives: Callable[[], bool]) -> T:
        """Return what `found` finds. Until then receive, or wait while another reader receives for all.

        One that may not read must not receive either: while it does, nothing tells it that it may.
        """
        with self._changed:
            while (result := found()) is None:
                if self._ended:
                    raise EOFError
                if self._receiving or not receives():
                    self._changed.wait()
                else:
                    self._receive()
            return result

    def _receive(self) -> None:
        self._receiving = True
        self._changed.release()
        received = None
        try:
            received = self._wire.receive()
        finally:
            self._changed.acquire()
            self._receiving = False
            self._ended = received is None
            if self._ended:
                self._ahead.forget()
            self._changed.notify_all()
        assert received is not None
        what, found = pickle.loads(received[0])
        if what == jobs.TICKET:
            self._begin(TicketMessage(*found), received[1])
        else:
            worker, *handled = found
            self._handled[worker] = handled

    def _begin(self, ticket: TicketMessage, descriptors: Sequence[int]) -> None:
        for key in ticket.forget:
            self._segments.pop(key, None)
        segment = None
        if ticket.segment is not None:
            if descriptors:
                segment = Segment(ticket.segment, descriptors[0], ticket.nbytes)
                segment.forget()
                self._segments[ticket.segment] = segment
            segment = self._segments[ticket.segment]
        if ticket.keys is not None:
            self._keys[ticket.lane] = ticket.keys
            self._ahead.forget()  # an epoch begins, and the one before is read or dropped
        place: dict[str, Any] = {
            "keys": self._keys[ticket.lane],
            "recorders": defaultdict(Observed),  # by worker: each touches its own
            "epoch": ticket.epoch,
            "ordinal": ticket.ordinal,
        }
        batch: Batch
        if self._iterable:
            size, saved = ticket.given
            batch = LaneBatch(ticket.lane, size, saved, **place)
        else:
            given = unpack(ticket.given) if isinstance(ticket.given, Packed) else ticket.given
            batch = self.fetcher.source.batch(given, position=ticket.position, **place)
        batch.number = ticket.number
        self._memories[ticket.number] = self._memory.begin(segment)
        self.heard.begin(batch)
        self._ahead.announce(batch)
        lane = self._job.workers.index(ticket.lane) if self._iterable else 0
        self._runs.add(batch, lane)

    # ---- answers ----

    def answer(self, batch: Batch, worker: int, looks: Looks) -> None:
        """Send a batch that is finished."""
        self.heard.over(batch)
        with self._changed:
            memory = self._memories.pop(batch.number)
        data = self._packed(batch, memory)
        created = memory.created
        used = [(x.key, nbytes, x.nbytes if x in created else 0) for x, nbytes in memory.used]
        # Before the answer: the next ticket may lend one again, and another reader may receive that.
        self._segments.update({segment.key: segment for segment in created})
        said, recorders = self.notices.warnings, dict[int, Any](batch.recorders)  # type: ignore[arg-type]
        last = recorders.pop(worker)
        outcome = Outcome(
            number=batch.number,
            fields=fields_of(batch),
            data=data,
            used=used,
            reads=[observed.read(k) for k, observed in (*recorders.items(), (worker, last))],
            waits=looks.look(),
            warnings=[said.popleft() for _ in range(len(said))],
            fetched=read_so_far() or None,
        )
        del data
        outcome = outcome._replace(kept=memory.let_go())
        message = dumps((jobs.BATCH, tuple(outcome)), who_is(self._job.workers))
        self._wire.send(message, [segment.descriptor for segment in created])
        for segment in created:
            segment.forget()

    def _packed(self, batch: Batch, memory: TicketMemory) -> Packed | None:
        """Return the batch's data, packed. If that fails, the batch raises the error."""
        data, batch.data = batch.data, None
        if batch.error is not None or batch.left_out or batch.dropped:
            return None
        try:
            return pack(data, memory)
        except BaseException as exc:
            batch.error = contained(exc)
            batch.where = f"{batch}; stage: hand over from the worker process"
            return None


def who_is(workers: Sequence[int]) -> str:
    """Return what names these workers of this process in an error."""
    return f"{jobs.named(workers)} (process {os.getpid()})"
