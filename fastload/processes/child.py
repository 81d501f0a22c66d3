"""A worker process as the loop's process sees it: how it starts and ends, and what to say of it."""

from __future__ import annotations

import json
import math
import os
import pickle
import select
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

from fastload.errors import LoaderTimeoutError, WorkerDiedError
from fastload.processes import jobs, worker_main
from fastload.processes.jobs import Job, Sealed
from fastload.processes.remote import Remote, what_is_read
from fastload.processes.segments import Segments
from fastload.processes.wire import can_be_read, pair, watched, with_core
from fastload.reading.notices import Notices
from fastload.settings import Settings
from fastload.telemetry.recorder import cpu_seconds

STATUS_SECONDS = 0.5
"""How long the exit status of a dead worker may take."""

STACK_SECONDS = 1.0
"""How long a worker may take to show its stack."""

_START_HINT = (
    'What it printed says why. A script whose workers do not fork needs `if __name__ == "__main__":` around what '
    "it runs, and must be a file"
)
_KILLED_HINT = (
    "The kernel kills a process if memory runs out: see `dmesg`, or memory.events of the job's cgroup. Use fewer "
    "workers, or smaller batches"
)
_SIGNAL_HINT = "Another program sent it, such as a batch system at its time limit"
_DIED_HINT = (
    "A sample, unpickling or worker_init_fn crashed in C, or called os._exit(). Run the loop with num_workers=0 under "
    "`python -X faulthandler`"
)

_children: weakref.WeakSet[Child] = weakref.WeakSet()
"""The worker processes of this process. A fork of it closes their sockets: their ends must mean that it is gone."""


class Child:
    """One worker process of a loader.

    Args:
        job: which workers it has.
        settings: the loader's arguments.
        segments: lends the memory of batches.
        notices: collects warnings for the loop.
    """

    IDLE_SECONDS = 30.0
    """How long a worker may use no CPU time before it says that it runs, or while a batch is due."""

    def __init__(self, job: Job, settings: Settings, segments: Segments, notices: Notices) -> None:
        self.job = job
        self.iterable = settings.iterable
        self.remote = Remote(job.workers, settings, segments, notices)
        self._owner = os.getpid()
        self._settings = settings
        self._notices = notices
        self._process: Any = None
        self.watched: int | None = None
        """A descriptor that can be read once the process is dead, or None if the system has none."""
        self._asking = threading.Lock()  # owns the socket beside the wire, for questions

    # ---- beginning and end ----

    def start(self, context: BaseContext, sealed: Sealed) -> None:
        """Start the process. Raise what starting or pickling raised. Then call `end`."""
        self.dead = self.ending = False
        # Whether a dead process has ended, and its exit code.
        self._fate: tuple[bool, int | None] | None = None
        self._late = monotonic() + (self._settings.timeout or math.inf)
        self.work, theirs = pair()
        self._beside, theirs_beside = socket.socketpair()
        self._alive, theirs_alive = socket.socketpair()
        _children.add(self)
        of: Any = context  # Any: the stubs of BaseContext have no Process
        try:
            self._process = of.Process(
                target=worker_main.main,
                args=(theirs_alive, theirs, theirs_beside, self.job, sealed),
                name=f"fastload-worker-{self.job.workers[0]}",
                daemon=False,
            )
            # A fork inherits the mask: no signal ends it before it has handlers. A fork server must not inherit it.
            forks = context.get_start_method() == "fork"
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, worker_main.SIGNALS if forks else ())
            try:
                self._process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self.pid: int = self._process.pid
            self.watched = watched(self.pid)
            self.remote.connect(self.work, self.pid)
        finally:
            for end in (theirs, theirs_beside, theirs_alive):
                end.close()

    def wait_until_ready(self) -> None:
        """Wait until the process is set up. Raise the error of its start, or `LoaderTimeoutError` after `timeout`."""
        expected, cpu_s = jobs.STARTED, cpu_seconds(self.pid)
        while True:
            left = self._late - monotonic()
            try:
                received = self._receive(max(0.0, min(self.IDLE_SECONDS, left)))
            except (EOFError, OSError):
                raise self.died(
                    "it started", _START_HINT if expected == jobs.STARTED else ""
                ) from None
            if received is not None:
                what, found = pickle.loads(received[0])
                if what == jobs.BROKEN:
                    raise found
                assert what == expected
                if what == jobs.READY:
                    return
                expected = jobs.READY
            elif left <= self.IDLE_SECONDS:
                raise LoaderTimeoutError(
                    f"{self.name} was not set up within timeout={self._settings.timeout:g} s. Let "
                    f"worker_init_fn and unpickling take less time, or raise timeout. It was here:\n{self.stack()}"
                )
            elif cpu_seconds(self.pid) <= cpu_s:  # imports take CPU time
                if expected == jobs.STARTED:
                    raise WorkerDiedError(self._idle("started"))
                if "start" not in self._notices.warned:
                    self._notices.warn("start", self.waits("unpickled, or ran worker_init_fn"))
                    self._notices.tell(stacklevel=8)
            cpu_s = cpu_seconds(self.pid)

    def _receive(self, seconds: float) -> Any:
        """Return what the process sends next, or None after `seconds`. Raise EOFError or OSError if it is dead."""
        poll = select.poll()
        for descriptor in filter(None, (self.work.fileno(), self.watched)):
            poll.register(descriptor, select.POLLIN)
        if not poll.poll(1000 * seconds):
            return None
        if (received := self.remote.wire.receive(waits=False)) is None:
            raise EOFError("the process is dead")
        return received

    def begin_end(self) -> None:
        """Let the process end after its current calls. Any thread may call this, also in a finalizer."""
        # A fork of the loop's process closes its copy of the window, and must not shut the socket.
        if not self.ending and os.getpid() == self._owner:
            self.ending = True
            self.say(jobs.END)
            with suppress(OSError):
                self.work.shutdown(socket.SHUT_WR)

    def end(self, seconds: float) -> None:
        """Let the process end, kill it after `seconds`, and reap it. A second call does nothing."""
        if self._process is None:
            return
        self.begin_end()
        if self._process.pid is not None and not self._has_ended(seconds):
            self.kill()
            self._has_ended(1.0)
        self._close()

    def _has_ended(self, seconds: float) -> bool:
        """Wait for the end of the process, and reap it. Return whether it has ended.

        Time in which it waited for a core does not count.
        """
        if self.watched is None:
            self._process.join(seconds)
            return not self._process.is_alive()
        # A process that the worker has started may hold the pipe that `join` waits for.
        if not with_core(partial(can_be_read, self.watched), seconds, [self.pid]):
            return False
        if self._process.exitcode is None:
            self._process.join(STATUS_SECONDS)  # the fork server sends it
        return True

    def kill(self) -> None:
        """Kill the process."""
        with suppress(OSError, AttributeError):
            self._process.kill()

    def drop(self, number: int) -> None:
        """Let the process drop the batches up to a number. Any thread may call this, also in a finalizer."""
        self.say(jobs.DROP + struct.pack("=q", number))

    def say(self, what: bytes) -> None:
        """Send a command beside the tickets. Any thread may call this, also in a finalizer."""
        if os.getpid() != self._owner:
            return  # a fork of the loop's process closes its copy of the window
        with suppress(OSError):
            self._beside.send(what, socket.MSG_DONTWAIT)

    def _close(self) -> None:
        _children.discard(self)
        self.dead = True
        self.remote.close()
        for end in (self.work, self._beside, self._alive):
            end.close()
        if self.watched is not None:
            if self._process.exitcode is None and can_be_read(self.watched, 0):
                # Another wait took the status. Multiprocessing would take it for alive, and keep its pipes.
                self._process._popen.returncode = 255
            os.close(self.watched)
            self.watched = None
        with suppress(ValueError):  # it still runs
            self._process.close()
        self._process = None

    def _idle(self, did: str) -> str:
        return (
            f"{self.name} used no CPU time for {self.IDLE_SECONDS:g} s as it {did}. If a thread held a lock at "
            'the fork, pass multiprocessing_context="forkserver".'
        )

    def waits(self, did: str) -> str:
        """Return a warning that names what the process did, and where it is."""
        return f"{self._idle(did)} To limit the wait, pass timeout=. The worker is here:\n{self.stack()}"

    @property
    def name(self) -> str:
        """Which workers the process has."""
        return jobs.named(self.job.workers)

    def stack(self) -> str:
        """Return where each reader of the process is, innermost call last."""
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
                shown = json.loads(text)
            except (OSError, ValueError, struct.error):
                shown = []
        why = (
            "it has not begun"
            if shown
            else "it is stopped, has no core, or a call in C holds its GIL"
        )
        workers, reading = self.job.workers, self.remote.reading()
        shown += [f"  (it does not answer: {why})\n"] * (len(workers) - len(shown))
        said = ""
        for worker, text in zip(workers, shown, strict=True):
            what = f", reading {what_is_read(reading[worker].batch)}" if worker in reading else ""
            said += f"worker {worker} (process {self.pid}){what}:\n{text}"
        return said

    def died(self, doing: str, hint: str = "", worker: int | None = None) -> WorkerDiedError:
        """Return the error of the process's death while it, or one of its workers, did something."""
        process = self._process
        if self._fate is None and process is not None:
            self._fate = self._has_ended(1.0), process.exitcode
        self.dead = True
        who = self.name if worker is None else f"worker {worker}"
        return _death(f"{who} (process {self.pid})", doing, *(self._fate or (True, None)), hint)


def _death(who: str, doing: str, ended: bool, code: int | None, hint: str) -> WorkerDiedError:
    """Return the error for a process that died, from its exit code if that is known, and what to do about it."""
    if not ended:
        how = "closed its connection"
    elif code is None:
        how = "ended with an unknown status, which another wait() of this program took,"
    elif code < 0:
        hint = _KILLED_HINT if -code == signal.SIGKILL else hint
        hint = _SIGNAL_HINT if -code in worker_main.SIGNALS else hint
        named = str(code)
        with suppress(ValueError):
            named = signal.Signals(-code).name
        how = f"was killed by {named}"
    else:
        how = f"exited with code {code}"
    return WorkerDiedError(f"{who} {how} while {doing}. {hint or _DIED_HINT}")


def _close_in_child() -> None:
    for one in list(_children):
        one.dead = True
        for end in (one.work, one._beside, one._alive):
            with suppress(OSError):
                end.close()
        if one.watched is not None:
            os.close(one.watched)
    _children.clear()


os.register_at_fork(after_in_child=_close_in_child)
