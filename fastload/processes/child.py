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
from contextlib import AbstractContextManager, suppress
from contextvars import copy_context
from dataclasses import replace
from queue import SimpleQueue
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
from fastload.processes.beside import Beside
from fastload.processes.jobs import Answer, Job, Sealed, Ticket
from fastload.processes.observed import Observed
from fastload.processes.open_files import take_positions
from fastload.processes.packing import Packed, pack, pack_error, unpack
from fastload.processes.pausing import busy
from fastload.processes.segments import Segment, TicketMemory
from fastload.processes.wire import Wire, can_be_read
from fastload.random import global_draws
from fastload.random.global_draws import global_states, restore_global_states
from fastload.random.keys import StreamKeys
from fastload.random.streams import entered
from fastload.random.worker_rng import WorkerRng
from fastload.reading.fetch import Fetcher
from fastload.reading.notices import Notices
from fastload.reading.worker_context import WorkerContext, finish, read_run, streams_of
from fastload.settings import Settings

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


def main(
    alive: socket.socket,
    works: list[socket.socket],
    beside: socket.socket,
    job: Job,
    sealed: Sealed,
) -> None:
    """Run a worker process. It ends if all of `works` are shut, and at once if the loop's process is gone.

    Args:
        alive: is closed once the loop's process is gone.
        works: each brings tickets for one reader, takes answers.
        beside: brings commands while a sample is read: drop, end, show the stack.
        job: which workers these are.
        sealed: the loader's arguments.
    """
    global_draws.in_worker_process = len(works) == 1
    user_errors.passing = ()
    os.register_at_fork(after_in_child=_in_fork_of_worker)
    gc.freeze()  # a collection would write to every object, and so copy the pages of all that a fork shares
    _outlive_signals()
    _end_with(alive)
    wires = [Wire(work) for work in works]
    heard = Beside(beside, {main.__code__, _in_thread.__code__})
    with _until_shut():
        wires[0].send(pickle.dumps((jobs.STARTED, None)))
        try:
            reader = _set_up(job, sealed, wires, heard)
        except BaseException as exc:
            # Send the error, so that the loop raises it instead of a WorkerDiedError.
            if isinstance(exc, AttributeError) and "__main__" in str(exc):
                annotate(exc, _NO_MAIN)
            workers = ", ".join(map(str, job.workers))
            error = pack_error(contained(exc), f"worker {workers} (process {os.getpid()})")
            wires[0].send(pickle.dumps((jobs.BROKEN, error)))
            return
        reader.serve(ready=True)


def _until_shut() -> AbstractContextManager[None]:
    return suppress(EOFError, BrokenPipeError, ConnectionResetError)


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


def _set_up(job: Job, sealed: Sealed, wires: list[Wire], heard: Beside) -> _Reader:
    """Set up the process and its readers. Return the first; the others wait for tickets in threads of their own.

    Several readers own copies of the loader's objects, as threads of the loop's process do. One has the objects
    themselves. Each calls `worker_init_fn` in its thread, one after another.
    """
    notices = Notices(set())
    if shared := take_positions():
        notices.warn(
            "positions",
            f"worker processes share the position in some files: {', '.join(shared[:8])}. "
            "Samples that read them can be wrong. Open files in `__getitem__`, not in `__init__`",
        )
    show_worker_info_in_threads()
    _seed(job, forked=sealed.generators is not None)
    settings = sealed.open()
    _outlive_signals()  # again: modules that the dataset needs were imported, and may have set handlers
    if len(wires) == 1:
        own = WorkerCopies(settings.dataset, settings.collate_fn, settings.worker_init_fn)
        return _Reader(
            job.workers[0], job, settings, own, wires[0], heard, notices, sealed.generators
        )
    isolation = settings.isolation()
    states = global_states() if isolation.initialises else None
    try:
        own = isolation.own()
        first = _Reader(job.workers[0], job, settings, own, wires[0], heard, notices)
        for worker, wire in zip(job.workers[1:], wires[1:], strict=True):
            done: SimpleQueue[BaseException | None] = SimpleQueue()
            new = worker, job, settings, isolation.own(), wire, heard, Notices(set())
            threading.Thread(target=copy_context().run, args=(_in_thread, done, *new)).start()
            if (error := done.get()) is not None:
                raise error
        notices.warnings.extend(isolation.said_of_shared())
        return first
    finally:
        if states is not None:
            restore_global_states(states)


def _in_thread(done: SimpleQueue[BaseException | None], *new: Any) -> None:
    """Set up a reader, tell `done` of it or of its error, and serve."""
    heard: Beside = new[5]
    heard.join()
    with _until_shut():
        try:
            reader = _Reader(*new)
        except BaseException as exc:
            done.put(exc)
            return
        done.put(None)
        reader.serve()


class _Reader:
    """Reads the batches of one worker of the process, in the thread that makes it."""

    def __init__(
        self,
        worker: int,
        job: Job,
        settings: Settings,
        own: WorkerCopies,
        wire: Wire,
        heard: Beside,
        notices: Notices,
        generators: list[tuple[str, Any]] | None = None,
    ) -> None:
        self._worker = worker
        self._modes = job.modes
        self._wire = wire
        self._heard = heard
        self._pid = os.getpid()
        self._who = f"worker {worker} (process {self._pid})"
        self._notices = notices
        name_thread(f"fastload-{worker}")
        torch.get_num_threads()  # or the first parallel operation would replace the 1 by the global number
        torch.set_num_threads(1)
        if job.asks:
            settings = replace(settings, on_error=self._ask)
        self._iterable = settings.iterable
        self._memory = TicketMemory(
            worker, channels_last=settings.memory_format is torch.channels_last
        )
        self._fetcher = Fetcher(settings, self._memory, self._notices)
        alone = len(job.workers) == 1
        method, rng = ("multiprocessing", None) if alone else ("thread", WorkerRng())
        info = make_worker_info(
            worker, job.num_workers, job.seed + worker, own.dataset, method, rng
        )
        with self._modes.entered():
            if own.init_fn is not None:
                set_worker_info(info)
                try:
                    own.init_fn(worker)
                except BaseException as exc:
                    annotate(exc, f"worker {worker}; stage: worker_init_fn")
                    raise
                finally:
                    set_worker_info(None)
        self._segments: dict[tuple[int, int], Segment] = {}
        self._keys = StreamKeys(0, 0)  # the first ticket brings others
        self._observed = Observed(of_process=worker == job.workers[0])
        streams = streams_of(settings, draws=not self._fetcher.source.copies)
        if streams.keyed and alone:
            found = generators if own.init_fn is None else None
            if found is None:
                found = [*own.current_generators(), *generators_of_modules()]
            own = replace(own, generators=found)
        elif own.init_fn is not None:
            own = replace(own, generators=own.current_generators())
        stream = streams.make(own.generators, initialised=own.init_fn is not None)
        wait = heard.wait
        self._context = WorkerContext(worker, own, info, stream, self._fetcher, wait, self._modes)

    def serve(self, *, ready: bool = False) -> None:
        """Answer one ticket after another, until the loop's process shuts the wire. Say first that all are `ready`."""
        with self._modes.entered(), entered(self._context.stream):
            self._end_if_forked()
            if ready:
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
        with busy:
            read_run(batch, 0, batch.units, self._context)
            self._end_if_forked()  # before `collate_fn` gets what it has of the batch
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
            said = "a process that your code forked returned from it. End it by os._exit()"
            print(f"fastload: {said}", file=sys.stderr, flush=True)
            os._exit(1)

    def _batch(self, ticket: Ticket) -> Batch:
        if ticket.keys is not None:
            self._keys = ticket.keys
        place: dict[str, Any] = {
            "keys": self._keys,
            "recorders": {self._worker: self._observed},
            "epoch": ticket.epoch,
            "ordinal": ticket.ordinal,
        }
        if self._iterable:
            size, saved = ticket.given
            return LaneBatch(self._worker, size, saved, **place)
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
    worker = job.workers[0]
    random.seed(job.seed + worker)
    if forked:  # it uses no accelerator, for which torch would keep a stack: 3 ms
        torch.default_generator.manual_seed(job.seed + worker)
    else:
        torch.manual_seed(job.seed + worker)
    np.random.seed(numpy_seed(job.seed, worker))
