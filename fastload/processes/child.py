"""What a worker process runs: it reads one batch after another, as its tickets say, and answers.

It reads with the same code as a loop without workers, in the same random streams. So the batches are the same.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import pickle
import random
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch

from fastload._kit import user_errors
from fastload._kit.torch_private import (
    make_worker_info,
    name_thread,
    numpy_seed,
    set_worker_info,
    show_worker_info_in_threads,
)
from fastload._kit.user_errors import annotate, contained
from fastload.isolation import WorkerCopies
from fastload.isolation.in_modules import generators_of_modules
from fastload.memory.batch import Batch
from fastload.order.lanes import LaneBatch
from fastload.processes import jobs
from fastload.processes.jobs import Answer, Job, Sealed, Ticket
from fastload.processes.observed import Observed
from fastload.processes.open_files import take_positions
from fastload.processes.packing import Packed, pack, pack_error, unpack
from fastload.processes.segments import Segment, TicketMemory
from fastload.processes.wire import Wire, can_be_read, with_core
from fastload.random import global_draws
from fastload.random.keys import StreamKeys
from fastload.random.streams import entered
from fastload.reading.fetch import Fetcher
from fastload.reading.notices import Notices
from fastload.reading.worker_context import WorkerContext, finish, read_run, streams_of
from fastload.settings import Settings

LINGER_SECONDS = 10.0
"""How long a worker that has a core may still read a sample after its loader is closed. Then it ends itself."""

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


def main(
    alive: socket.socket, work: socket.socket, beside: socket.socket, job: Job, sealed: Sealed
) -> None:
    """Run a worker process. It ends if `work` is shut, and at once if the loop's process is gone.

    Args:
        alive: is closed once the loop's process is gone.
        work: brings tickets, takes answers.
        beside: brings commands while a sample is read: drop, end, show the stack.
        job: which worker this is.
        sealed: the loader's arguments.
    """
    global_draws.in_worker_process = True
    user_errors.passing = ()
    os.register_at_fork(after_in_child=_in_fork_of_worker)
    gc.freeze()  # a collection would write to every object, and so copy the pages of all that a fork shares
    _outlive_signals()
    _end_with(alive)
    wire = Wire(work)
    heard = _Beside(beside)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        wire.send(pickle.dumps((jobs.STARTED, None)))
        try:
            worker = _Worker(job, sealed, wire, heard)
        except BaseException as exc:
            # Send the error, so that the loop raises it instead of a WorkerDiedError.
            if isinstance(exc, AttributeError) and "__main__" in str(exc):
                annotate(exc, _NO_MAIN)
            error = pack_error(contained(exc), f"worker {job.worker} (process {os.getpid()})")
            wire.send(pickle.dumps((jobs.BROKEN, error)))
            return
        worker.serve()


def _end_with(alive: socket.socket) -> None:
    """Let the kernel kill this process once the other end is closed: a sample in C may hold the GIL for minutes."""
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    if can_be_read(alive.fileno(), 0):  # it was closed before
        os._exit(1)


_NO_MAIN = (
    "a worker that does not fork cannot import what was typed at a prompt, in a notebook or after `python -c`. Put the "
    'class into a module, or pass multiprocessing_context="fork"'
)


def _in_fork_of_worker() -> None:
    """Let any error or signal end a process that a sample forks. It must not answer in the worker's place."""
    user_errors.passing = (BaseException,)
    for number in SIGNALS:
        # `Pool.terminate()` waits for a process to which it sent SIGTERM.
        if signal.getsignal(number) is _nothing:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)


def _outlive_signals() -> None:
    # A batch system signals the whole group. The loop's process decides what happens: a checkpoint may need batches.
    # The handlers do nothing, rather than being SIG_IGN: programs that samples start would inherit that.
    for number in SIGNALS:
        signal.signal(number, _nothing)
    # Python's handlers use the stack that faulthandler made, which holds two of Linux's frames of some CPUs. The kernel
    # kills a process that gets three signals at once. So this thread gives that stack back: `stack_t` with SS_DISABLE.
    ctypes.CDLL(None).sigaltstack(struct.pack("PiN", 0, 2, 0), None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _nothing(number: int, frame: FrameType | None) -> None:
    pass


class _Beside:
    """A thread that hears the loop's process while the main thread reads. If that process is gone, it ends this one."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._main = threading.get_ident()
        self._changed = threading.Condition()  # owns the three fields below
        self._dropped = -1
        self._batch: Batch | None = None
        self._ends = False
        threading.Thread(target=self._hear, name="fastload-beside", daemon=True).start()

    def begin(self, batch: Batch, number: int) -> None:
        """Begin a batch. It may be dropped already."""
        with self._changed:
            batch.number = number
            batch.dropped = self._ends or number <= self._dropped
            self._batch = batch

    def over(self) -> None:
        """Forget the batch."""
        with self._changed:
            self._batch = None

    def wait(self, until: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until `until()` is true or `seconds` have passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._ends or until(), seconds)

    def _hear(self) -> None:
        with suppress(OSError):
            hears = partial(can_be_read, self._end.fileno())
            while said := self._end.recv(1):
                if said == jobs.STACK:
                    self._tell_stack()
                drops = said == jobs.DROP
                last = struct.unpack("=q", self._end.recv(8, socket.MSG_WAITALL)) if drops else ()
                with self._changed:
                    self._dropped = max((self._dropped, *last))
                    self._ends = self._ends or said == jobs.END
                    batch = self._batch
                    if batch is not None and (self._ends or batch.number <= self._dropped):
                        batch.dropped = True
                    self._changed.notify_all()
                if self._ends and not with_core(hears, LINGER_SECONDS, [os.getpid()]):
                    break
        os._exit(1)  # the loop's process is gone, or a sample hangs

    def _tell_stack(self) -> None:
        stack = traceback.extract_stack(sys._current_frames().get(self._main))
        # Below `main`. Above it is what started this process, and under a fork all that called `iter()`.
        ours = [k for k, at in enumerate(stack) if (at.filename, at.name) == (__file__, "main")]
        text = "".join(traceback.format_list(stack[ours[-1] + 1 if ours else 0 :])).encode()
        self._end.sendall(struct.pack("=Q", len(text)) + text)


class _Worker:
    """Reads the batches of one worker process."""

    def __init__(self, job: Job, sealed: Sealed, wire: Wire, heard: _Beside) -> None:
        self._job = job
        self._wire = wire
        self._heard = heard
        self._pid = os.getpid()
        self._who = f"worker {job.worker} (process {self._pid})"
        name_thread(f"fastload-{job.worker}")
        self._notices = Notices(set())
        if shared := take_positions():
            self._notices.warn(
                "positions",
                f"worker processes share the position in some files: {', '.join(shared[:8])}. "
                "Samples that read them can be wrong. Open files in `__getitem__`, not in `__init__`",
            )
        show_worker_info_in_threads()
        torch.set_num_threads(1)
        _seed(job, forked=sealed.generators is not None)
        settings, self._generators = sealed.open(), sealed.generators
        _outlive_signals()  # again: modules that the dataset needs were imported, and may have set handlers
        if job.asks:
            settings = replace(settings, on_error=self._ask)
        self._iterable = settings.iterable
        self._memory = TicketMemory(
            job.worker, channels_last=settings.memory_format is torch.channels_last
        )
        self._fetcher = Fetcher(settings, self._memory, self._notices)
        info = make_worker_info(
            job.worker, job.num_workers, job.seed + job.worker, settings.dataset, "multiprocessing"
        )
        with job.modes.entered():
            if settings.worker_init_fn is not None:
                set_worker_info(info)
                try:
                    settings.worker_init_fn(job.worker)
                except BaseException as exc:
                    annotate(exc, f"worker {job.worker}; stage: worker_init_fn")
                    raise
                finally:
                    set_worker_info(None)
        self._segments: dict[tuple[int, int], Segment] = {}
        self._keys = StreamKeys(0, 0)  # the first ticket brings others
        self._observed = Observed()
        self._context = self._context_of(settings, info)

    def _context_of(self, settings: Settings, info: Any) -> WorkerContext:
        """Return what this process reads with: the dataset itself, whose generators are keyed for each sample."""
        streams = streams_of(settings, draws=not self._fetcher.source.copies)
        own = WorkerCopies(settings.dataset, settings.collate_fn, None)
        if streams.keyed:
            found = self._generators if settings.worker_init_fn is None else None
            if found is None:
                # Whatever the loader copies for threads: this finds the generators, and copies nothing.
                own = replace(settings, copy_dataset="state").isolation().originals()
                found = [*own.generators, *generators_of_modules()]
            own = replace(own, generators=found)
        initialised = settings.worker_init_fn is not None
        stream = streams.make(own.generators, initialised=initialised)
        job, wait = self._job, self._heard.wait
        return WorkerContext(job.worker, own, info, stream, self._fetcher, wait, job.modes)

    def serve(self) -> None:
        """Answer one ticket after another, until the loop's process shuts the wire."""
        with self._job.modes.entered(), entered(self._context.stream):
            self._end_if_forked()
            self._wire.send(pickle.dumps((jobs.READY, None)))
            while True:
                received = self._wire.receive()
                assert received is not None
                message, descriptors = received
                ticket: Ticket = pickle.loads(message)
                del message, received
                self._answer(ticket, descriptors)

    def _answer(self, ticket: Ticket, descriptors: list[int]) -> None:
        for key in ticket.forget:
            self._segments.pop(key, None)
        segment = None
        if ticket.segment is not None:
            if descriptors:
                segment = Segment(ticket.segment, descriptors.pop(), ticket.nbytes)
                segment.forget()
                self._segments[ticket.segment] = segment
            segment = self._segments[ticket.segment]
        self._memory.begin(segment)
        batch = self._batch(ticket)
        self._heard.begin(batch, ticket.number)
        read_run(batch, 0, batch.units, self._context)
        finish(batch, self._context)
        self._end_if_forked()
        self._context.stream.move(None, None)
        self._heard.over()
        data = self._packed(batch)
        used, created = [], []
        for segment, nbytes in self._memory.used:
            new = segment.descriptor >= 0
            used.append((segment.key, nbytes, segment.nbytes if new else 0))
            if new:
                created.append(segment)
        answer = self._described(batch, data, used)
        del batch, data
        answer = answer._replace(kept=self._memory.let_go())
        self._wire.send(
            pickle.dumps((jobs.BATCH, answer), 5), [segment.descriptor for segment in created]
        )
        for segment in created:
            segment.forget()
            self._segments[segment.key] = segment

    def _end_if_forked(self) -> None:
        """End a process that user code has forked and that returned from it. Its answer would be taken for another."""
        if os.getpid() != self._pid:
            sys.exit(
                "fastload: a process that your code forked returned from it. End it by os._exit()"
            )

    def _batch(self, ticket: Ticket) -> Batch:
        if ticket.keys is not None:
            self._keys = ticket.keys
        place: dict[str, Any] = {
            "keys": self._keys,
            "recorders": {self._job.worker: self._observed},
            "epoch": ticket.epoch,
            "ordinal": ticket.ordinal,
        }
        if self._iterable:
            size, saved = ticket.given
            return LaneBatch(self._job.worker, size, saved, **place)
        given = unpack(ticket.given) if isinstance(ticket.given, Packed) else ticket.given
        return self._fetcher.source.batch(given, position=ticket.position, **place)

    def _packed(self, batch: Batch) -> Packed | None:
        """Return the batch's data, packed. If that fails, the batch raises the error."""
        data, batch.data = batch.data, None
        if batch.error is not None or batch.left_out or batch.dropped:
            return None
        try:
            return pack(data, self._memory)
        except BaseException as exc:
            batch.error = contained(exc)
            batch.where = f"{batch}; stage: hand over from the worker process"
            return None

    def _described(self, batch: Batch, data: Packed | None, used: list[Any]) -> Answer:
        who, lane, said = self._who, None, self._notices.warnings
        if isinstance(batch, LaneBatch):
            state = batch.state
            if isinstance(state, Exception):
                state = pack_error(state, who)  # type: ignore[assignment]
            lane = batch.position, batch.size, batch.ended, state
        run, observed = self._observed.take()
        return Answer(
            data=data,
            used=used,
            kept=False,
            nbytes=batch.nbytes,
            error=None if batch.error is None else pack_error(batch.error, who),
            where=batch.where,
            hint=batch.hint,
            left_out=batch.left_out,
            handled={k: pack_error(error, who) for k, error in batch.handled.items()},
            skipped=batch.skipped,
            retries=[*batch.retries],
            lane=lane,
            run=run,
            observed=observed,
            waits=self._observed.waits(),
            warnings=[said.popleft() for _ in range(len(said))],
        )

    def _ask(self, index: Any, error: Exception) -> Any:
        """Let the loop's process call `on_error`, and return the sample that it chose."""
        stream = self._context.stream
        question = index, pack_error(error, self._who), stream.drawn()
        self._wire.send(pickle.dumps((jobs.FAILED_SAMPLE, question)))
        received = self._wire.receive()
        assert received is not None
        sample, raised, drawn = pickle.loads(received[0])
        stream.resume(drawn)
        if raised is None:
            return unpack(sample)
        raise RaisedInLoop(raised)


class RaisedInLoop(Exception):
    """Stands for what `on_error` raised, which the loop's process has stored under a number."""


def _seed(job: Job, *, forked: bool) -> None:
    """Seed the global generators as torch's workers do. Each sample is keyed; this is for all else."""
    random.seed(job.seed + job.worker)
    if forked:  # it uses no accelerator, for which torch would keep a stack: 3 ms
        torch.default_generator.manual_seed(job.seed + job.worker)
    else:
        torch.manual_seed(job.seed + job.worker)
    np.random.seed(numpy_seed(job.seed, job.worker))
