"""A worker process as the loop's process sees it. One thread of the loop's process drives it."""

from __future__ import annotations

import errno
import logging
import math
import os
import pickle
import signal
import socket
import struct
import threading
import weakref
from contextlib import suppress
from functools import partial
from multiprocessing.context import BaseContext
from time import monotonic
from typing import Any

import numpy as np

from fastload._kit.user_errors import shown_indices
from fastload.errors import LoaderTimeoutError, WorkerDiedError
from fastload.memory.batch import Batch
from fastload.memory.layout import ALIGN
from fastload.order.lanes import LaneBatch
from fastload.processes import child, jobs
from fastload.processes.answers import fill, report
from fastload.processes.deaths import START_HINT, death
from fastload.processes.jobs import Answer, Job, Sealed, Ticket
from fastload.processes.packing import PackedError, pack, packed_indices, unpack_error
from fastload.processes.pausing import busy
from fastload.processes.segments import Segment, Segments
from fastload.processes.wire import Wire, can_be_read, cpu_seconds, watched, with_core
from fastload.random.keys import StreamKeys
from fastload.random.streams import Stream, entered
from fastload.reading.notices import Notices
from fastload.settings import Settings

IDLE_SECONDS = 30.0
"""How long a worker may use no CPU time before it says that it runs, or while a batch is due."""

STATUS_SECONDS = 0.5
"""How long the exit status of a dead worker may take."""

STACK_SECONDS = 1.0
"""How long a worker may take to show its stack."""

_log = logging.getLogger("fastload")

_children: weakref.WeakSet[Child] = weakref.WeakSet()
"""The worker processes of this process. A fork of it closes their sockets: their ends must mean that it is gone."""


class Child:
    """One worker process of a loader.

    Args:
        job: which worker it is.
        settings: the loader's arguments.
        segments: lends the memory of batches.
        notices: collects warnings for the loop.
    """

    def __init__(self, job: Job, settings: Settings, segments: Segments, notices: Notices) -> None:
        self.job = job
        self.iterable = settings.iterable
        self.cpu_s = 0.0
        self._owner = os.getpid()
        self._settings = settings
        self._segments = segments
        self._notices = notices
        self._process: Any = None
        self._watched: int | None = None
        self._keys: StreamKeys | None = None  # those of the ticket before
        self._lane_state: Any = None
        self._known: dict[tuple[int, int], None] = {}  # the segments that it maps
        self._retired = 0  # `Segments.retired` at the last ticket
        self._raised: list[BaseException] = []
        self._asking = threading.Lock()  # owns the socket beside the wire, for questions
        self._reading: Any = None  # the batch that it reads

    # ---- beginning and end ----

    def start(self, context: BaseContext, sealed: Sealed) -> None:
        """Start the process. Raise what starting or pickling raised. Then call `end`."""
        self.dead = self.ending = False
        self._late = monotonic() + (self._settings.timeout or math.inf)
        ours, theirs = socket.socketpair()
        ours_beside, theirs_beside = socket.socketpair()
        self._alive, theirs_alive = socket.socketpair()
        self._work, self._beside = ours, ours_beside
        _children.add(self)
        of: Any = context  # Any: the stubs of BaseContext have no Process
        try:
            self._process = of.Process(
                target=child.main,
                args=(theirs_alive, theirs, theirs_beside, self.job, sealed),
                name=f"fastload-worker-{self.job.worker}",
                daemon=False,
            )
            # A fork inherits the mask: no signal ends it before it has handlers. A fork server must not inherit it.
            forks = context.get_start_method() == "fork"
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, child.SIGNALS if forks else ())
            try:
                self._process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self.pid: int = self._process.pid
            self._watched = watched(self.pid)
            self._wire = Wire(ours, ours.fileno() if self._watched is None else self._watched)
        finally:
            for end in (theirs, theirs_beside, theirs_alive):
                end.close()

    def wait_until_ready(self) -> None:
        """Wait until the process is set up. Raise the error of its start, or `LoaderTimeoutError` after `timeout`."""
        expected, cpu_s = jobs.STARTED, cpu_seconds(self.pid)
        while True:
            left = self._late - monotonic()
            try:
                received = self._wire.receive(max(0.0, min(IDLE_SECONDS, left)))
            except (EOFError, OSError):
                raise self._died(
                    "it started", START_HINT if expected == jobs.STARTED else ""
                ) from None
            if received is not None:
                what, found = pickle.loads(received[0])
                if what == jobs.BROKEN:
                    raise unpack_error(found)
                assert what == expected
                if what == jobs.READY:
                    return
                expected = jobs.READY
            elif left <= IDLE_SECONDS:
                raise LoaderTimeoutError(
                    f"worker {self.job.worker} was not set up within timeout={self._settings.timeout:g} s. Let "
                    f"worker_init_fn and unpickling take less time, or raise timeout. It was here:\n{self.stack()}"
                )
            elif cpu_seconds(self.pid) <= cpu_s:  # imports take CPU time
                if expected == jobs.STARTED:
                    raise WorkerDiedError(self._idle("started"))
                if "start" not in self._notices.warned:
                    self._notices.warn("start", self._waits("unpickled, or ran worker_init_fn"))
                    self._notices.tell(stacklevel=8)
            cpu_s = cpu_seconds(self.pid)

    def end(self, seconds: float) -> None:
        """Let the process end, kill it after `seconds`, and reap it. A second call does nothing."""
        if self._process is None:
            return
        self.ending = True
        self._say(jobs.END)
        with suppress(OSError):
            self._work.shutdown(socket.SHUT_WR)
        if self._process.pid is not None and not self._has_ended(seconds):
            self.kill()
            self._has_ended(1.0)
        self._close()

    def _has_ended(self, seconds: float) -> bool:
        """Wait for the end of the process, and reap it. Return whether it has ended.

        Time in which it waited for a core does not count.
        """
        if self._watched is None:
            self._process.join(seconds)
            return not self._process.is_alive()
        # A process that the worker has started may hold the pipe that `join` waits for.
        if not with_core(partial(can_be_read, self._watched), seconds, [self.pid]):
            return False
        if self._process.exitcode is None:
            self._process.join(STATUS_SECONDS)  # the fork server sends it
        return True

    def kill(self) -> None:
        """Kill the process."""
        with suppress(OSError, AttributeError):
            self._process.kill()

    def _on_drop(self, number: int, *, closing: bool = False) -> None:
        self._say(jobs.END if closing else jobs.DROP + struct.pack("=q", number))

    def _say(self, what: bytes) -> None:
        """Send a command beside the tickets. Any thread may call this, also in a finalizer."""
        if os.getpid() != self._owner:
            return  # a fork of the loop's process closes its copy of the window
        with suppress(OSError):
            self._beside.send(what, socket.MSG_DONTWAIT)

    def _close(self) -> None:
        _children.discard(self)
        self.dead = True
        for end in (self._work, self._beside, self._alive):
            end.close()
        if self._watched is not None:
            if self._process.exitcode is None and can_be_read(self._watched, 0):
                # Another wait took the status. Multiprocessing would take it for alive, and keep its pipes.
                self._process._popen.returncode = 255
            os.close(self._watched)
            self._watched = None
        with suppress(ValueError):  # it still runs
            self._process.close()
        self._process = None

    def _idle(self, did: str) -> str:
        return (
            f"worker {self.job.worker} used no CPU time for {IDLE_SECONDS:g} s as it {did}. If a thread held a lock at "
            'the fork, pass multiprocessing_context="forkserver".'
        )

    def _waits(self, did: str) -> str:
        return f"{self._idle(did)} To limit the wait, pass timeout=. The worker is here:\n{self.stack()}"

    def stack(self) -> str:
        """Return where the process is, innermost call last."""
        head = f"worker {self.job.worker} (process {self.pid})"
        reading = self._reading
        if reading is not None:
            head += f", reading sample indices {shown_indices(reading.indices)} of {reading}"
        with self._asking:
            try:
                self._beside.settimeout(0)
                with suppress(BlockingIOError):
                    while self._beside.recv(65536):  # a late answer to an earlier question
                        pass
                self._beside.settimeout(STACK_SECONDS)
                self._beside.send(jobs.STACK)
                with self._beside.makefile("rb") as file:
                    text = file.read(struct.unpack("=Q", file.read(8))[0])
                shown = text.decode(errors="replace")
            except (OSError, struct.error):
                shown = "  (it does not answer: it is stopped, has no core, or a call in C holds its GIL)\n"
        return f"{head}:\n{shown}"

    # ---- batches ----

    def read(self, batch: Batch) -> float:
        """Let the process read a batch. Return the seconds that reading took."""
        self._reading, batch.lost, batch.on_drop = batch, self.dead, self._on_drop
        segment = None
        try:
            segment = self._segments.lend()
            message, descriptors = self._ticket(batch, segment)
        except Exception as exc:
            batch.where = f"{batch}; stage: hand over to a worker process"
            return self._failed(batch, segment, exc)
        try:
            if batch.dropped:
                self._on_drop(batch.number)
            answer, descriptors = self._answer(message, descriptors)
        except (EOFError, OSError) as exc:
            if isinstance(exc, OSError) and exc.errno == errno.EMFILE:
                batch.where = f"{batch}; stage: hand over from worker process {self.pid}"
                return self._failed(batch, segment, exc)
            what = f"sample indices {shown_indices(batch.indices)} of " if batch.indices else ""
            batch.where = ""
            doing = f"{'no other was left to read' if batch.lost else 'it read'} {what}{batch}"
            return self._failed(batch, segment, self._died(doing))
        finally:
            batch.on_drop = None
            self._reading = None
        with busy:
            try:
                memories = self._memories(answer, descriptors, segment)
            except OSError as exc:  # no more descriptors, or no more memory
                return self._failed(batch, segment, exc)
            finally:
                for descriptor in descriptors:  # of segments after one that cannot be mapped
                    os.close(descriptor)
            fill(batch, answer, memories, self._raised, self.pid)
            recorder = batch.recorders[self.job.worker]
            report(answer, batch, recorder, self._notices, self._settings.dataset)
        self.cpu_s += answer.waits[2]
        if isinstance(batch, LaneBatch):
            self._lane_state = batch.state
        return answer.run[1]

    def _failed(self, batch: Batch, segment: Segment | None, error: Exception) -> float:
        """Let a batch raise an error, and its lane stay where it was. Its segment is never lent again."""
        batch.error, batch.on_drop, self._reading = error, None, None
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
        self._wire.send(message, descriptors)
        cpu_s = -1.0
        while True:
            while (received := self._wire.receive(IDLE_SECONDS)) is None:
                before, cpu_s = cpu_s, cpu_seconds(self.pid)
                if cpu_s == before and "idle" not in self._notices.warned:
                    self._notices.warned.add("idle")
                    # Not a warning: the loop may be waiting for this very batch.
                    _log.warning("fastload: %s", self._waits("read a batch"))
            what, found = pickle.loads(received[0])
            if what != jobs.FAILED_SAMPLE:
                return found, received[1]
            del received
            self._wire.send(pickle.dumps(self._handled(*found), 5))

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

    def _died(self, doing: str, hint: str = "") -> WorkerDiedError:
        self.dead = True
        ended = self._has_ended(1.0)
        who = f"worker {self.job.worker} (process {self.pid})"
        return death(who, doing, ended, self._process.exitcode, hint)


def _close_in_child() -> None:
    for one in list(_children):
        one.dead = True
        for end in (one._work, one._beside, one._alive):
            with suppress(OSError):
                end.close()
        if one._watched is not None:
            os.close(one._watched)
    _children.clear()


os.register_at_fork(after_in_child=_close_in_child)
