"""What a worker process runs: it sets up its readers, whose batches are read in threads, and outlives signals.

A reader reads with the same code as a loop without workers, in the same random streams. So the batches are the same.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import pickle
import random
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
from contextlib import suppress
from contextvars import copy_context
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
    show_worker_info_in_threads,
)
from fastload._kit.user_errors import annotate, contained
from fastload.errors import SharedStateWarning
from fastload.processes import jobs
from fastload.processes.beside import Beside
from fastload.processes.jobs import Job, RaisedInLoop, Sealed
from fastload.processes.observed import Looks
from fastload.processes.open_files import take_positions
from fastload.processes.packed_errors import dumps
from fastload.processes.packing import unpack
from fastload.processes.pausing import busy
from fastload.processes.segments import Segment
from fastload.processes.wire import Wire, can_be_read
from fastload.processes.work import Work, who_is
from fastload.random.global_states import random_states_kept
from fastload.random.streams import entered
from fastload.reading.fetch import WorkerContext, finish, read_run
from fastload.reading.notices import Notices
from fastload.safety import WorkerCopies

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


def main(
    alive: socket.socket,
    work: socket.socket,
    beside: socket.socket,
    job: Job,
    sealed: Sealed,
) -> None:
    """Run a worker process. It ends if `work` is shut, and at once if the loop's process is gone.

    Args:
        alive: is closed once the loop's process is gone.
        work: brings the memory of marks and then tickets, takes answers.
        beside: brings commands while a sample is read: drop, end, show the stack.
        job: which workers these are.
        sealed: the loader's arguments.
    """
    user_errors.passing = ()
    os.register_at_fork(after_in_child=_in_fork_of_worker)
    gc.freeze()  # a collection would write to every object, and so copy the pages of all that a fork shares
    _outlive_signals()
    _end_with(alive)
    wire = Wire(work)
    heard = Beside(beside, {main.__code__, _in_thread.__code__})
    with suppress(*_SHUT):
        wire.send(pickle.dumps((jobs.STARTED, None)))
        try:
            reader = _set_up(job, sealed, wire, heard)
        except BaseException as exc:
            # Send the error, so that the loop raises it instead of a WorkerDiedError.
            if isinstance(exc, AttributeError) and "__main__" in str(exc):
                annotate(exc, _NO_MAIN)
            wire.send(dumps((jobs.BROKEN, contained(exc)), who_is(job.workers)))
            return
        wire.send(pickle.dumps((jobs.READY, None)))
        if len(job.workers) == 1:
            reader.serve()
        else:
            _serve(reader)


_SHUT = EOFError, BrokenPipeError, ConnectionResetError


def _serve(reader: ProcessReader) -> None:
    """Let one of several readers serve until the wire is shut. A fault ends the process: else the others wait on."""
    try:
        with suppress(*_SHUT):
            reader.serve()
    except SystemExit as exc:  # in a process that a sample forked
        sys.stdout.flush()
        os._exit(exc.code if isinstance(exc.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


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


def _set_up(job: Job, sealed: Sealed, wire: Wire, heard: Beside) -> ProcessReader:
    """Set up the process and its readers. Return the first; the others wait for work in threads of their own.

    Several readers own copies of the loader's objects, as threads of the loop's process do. One has the objects
    themselves. Each calls `worker_init_fn` in its thread, one after another.
    """
    # Before anything computes: in a fork, OpenMP waits for threads that the fork has lost.
    torch.get_num_threads()
    torch.set_num_threads(1)
    notices = Notices(set())
    if shared := take_positions():
        notices.warn(
            "positions",
            f"worker processes share the position in some files: {', '.join(shared[:8])}. "
            "Samples that read them can be wrong. Open files in `__getitem__`, not in `__init__`",
        )
    show_worker_info_in_threads()
    forked = sealed.generators is not None
    _seed(job.workers[0], job.seed, forked=forked)
    settings = sealed.open()
    _outlive_signals()  # again: modules that the dataset needs were imported, and may have set handlers
    work = Work(job, settings, wire, heard, _marks(wire, len(job.workers)), notices)
    if len(job.workers) == 1:
        roots = settings.dataset, settings.collate_fn, settings.worker_init_fn
        return ProcessReader(job.workers[0], job, WorkerCopies(*roots, sealed.generators), work)
    survey = sealed.survey or settings.survey
    initialises = settings.worker_init_fn is not None
    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)  # -1 if there is none
    threading.stack_size(max(limit, 8 << 20))  # as the main thread has
    with random_states_kept(initialises):
        own = survey.own()
        first = ProcessReader(job.workers[0], job, own, work)
        for worker in job.workers[1:]:
            if initialises:
                _seed(worker, job.seed, forked=forked)
            done: SimpleQueue[BaseException | None] = SimpleQueue()
            new = worker, job, survey.own(), work
            threading.Thread(target=copy_context().run, args=(_in_thread, done, *new)).start()
            if (error := done.get()) is not None:
                raise error
        if said := survey.said_of_shared():
            notices.warn("shared", said, SharedStateWarning)
        return first


def _marks(wire: Wire, readers: int) -> np.ndarray:
    """Return the memory in which readers mark what they read: int64[readers], shared with the loop's process."""
    received = wire.receive()
    assert received is not None
    segment = Segment((-1, -1), received[1].pop(), 8 * readers)
    segment.forget()
    return segment.view().view(np.int64)


def _in_thread(done: SimpleQueue[BaseException | None], *new: Any) -> None:
    """Set up a reader, tell `done` of it or of its error, and serve."""
    work: Work = new[3]
    work.heard.join()
    if decimal := sys.modules.get("decimal"):
        decimal.setcontext(decimal.getcontext().copy())  # `copy_context` shares it
    try:
        reader = ProcessReader(*new)
    except BaseException as exc:
        done.put(exc)
        return
    done.put(None)
    _serve(reader)


def _seed(worker: int, seed: int, *, forked: bool) -> None:
    """Seed the global generators as torch's workers do. Each sample is keyed; this is for all else."""
    random.seed(seed + worker)
    if forked:  # it uses no accelerator, for which torch would keep a stack: 3 ms
        torch.default_generator.manual_seed(seed + worker)
    else:
        torch.manual_seed(seed + worker)
    np.random.seed(numpy_seed(seed, worker))


# ---- a reader ----

_reading = threading.local()
"""The reader of the calling thread."""


class ProcessReader:
    """One worker of the process, in the thread that makes it.

    Args:
        worker: its id.
        job: what the process is to do.
        own: the dataset and functions that it reads with.
        work: what it shares with the other readers.
    """

    def __init__(
        self,
        worker: int,
        job: Job,
        own: WorkerCopies,
        work: Work,
    ) -> None:
        _reading.by = self
        self._worker = worker
        self._work = work
        self._pid = os.getpid()
        name_thread(f"fastload-{worker}")
        torch.get_num_threads()  # or the first parallel operation would replace the 1 by the global number
        torch.set_num_threads(1)
        alone = len(job.workers) == 1
        method = "multiprocessing" if alone else "thread"
        number = work.fetcher.settings.num_workers
        info = make_worker_info(worker, number, job.seed + worker, own.dataset, method)
        try:
            self._context = WorkerContext(
                own, info, work.fetcher, work.heard.wait, job.modes, alone=alone
            )
        except BaseException as exc:
            annotate(exc, f"worker {worker}; stage: worker_init_fn")
            raise
        self._looks = Looks(work.heard)

    def serve(self) -> None:
        """Read one run after another. Raise EOFError once the loop's process sends no more."""
        context = self._context
        with context.modes.entered(), entered(context.stream):
            self._end_if_forked()
            while True:
                batch, start, stop = self._work.claim(self._worker)
                with busy:
                    seconds = read_run(batch, start, stop, context)
                    self._end_if_forked()  # before `collate_fn` gets what it has of the batch
                    last = self._work.deliver(batch, stop - start, seconds)
                    if last:
                        finish(batch, context)
                self._end_if_forked()
                context.stream.move(None, None)  # so that it keeps no batch
                if last:
                    self._work.answer(batch, self._worker, self._looks)
                del batch

    def _end_if_forked(self) -> None:
        """End a process that user code has forked and that returned from it. Its answer would be taken for another."""
        if os.getpid() != self._pid:
            said = "a process that your code forked returned from it. End it by os._exit()"
            print(f"fastload: {said}", file=sys.stderr, flush=True)
            os._exit(1)

    def ask(self, index: Any, error: Exception) -> Any:
        """Let the loop's process call `on_error`, and return the sample that it chose."""
        stream = self._context.stream
        question = index, error, stream.drawn()
        sample, raised, drawn = self._work.ask(self._worker, question)
        stream.resume(drawn)
        if raised is None:
            return unpack(sample)
        raise RaisedInLoop(raised)


def ask(index: Any, error: Exception) -> Any:
    """Do the same for the reader of the calling thread: `on_error` of the settings in a worker process."""
    reader: ProcessReader = _reading.by
    return reader.ask(index, error)
