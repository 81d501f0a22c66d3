"""The requests of this process, and its threads that make some of them.

A thread that reads makes its request itself. Threads of this file make the requests of look-ahead, and the others of
`read_many`. So a read never waits for a thread. If it asks for look-ahead that has not begun, it begins that itself.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, TypeVar

from fastload.errors import RemoteError
from fastload.remote.attempts import attempted
from fastload.remote.backends import Failure, Got
from fastload.remote.lines import WAITING, Job, Lines, Request, Session
from fastload.remote.turns import Turns

AHEAD_BYTES = 256 << 20
"""How much look-ahead of all stores may hold that no read has taken."""

CLOSE_SECONDS = 2.0
"""How long the end of the interpreter waits for requests of look-ahead."""

LINGER_SECONDS = 0.5
"""How long a thread stays for the next request."""

T = TypeVar("T")


class Fetching:
    """The requests of a process, those of all its stores together."""

    def __init__(self, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._lock = threading.Lock()
        """Owns all below, and what sessions and jobs count. No request and no user's code runs under it, but what the
        garbage collector finalizes: that calls `forget` only."""
        self._turns, self._lines = Turns(perf_counter()), Lines(ahead_bytes)
        self.limit = self._turns.limit
        self._forgotten: deque[Callable[[Lines], None]] = deque()
        """What `forget` was told. The thread that holds the lock does it."""
        self._work: SimpleQueue[None] = SimpleQueue()
        """Where idle threads wait. `_pump` wakes one for a request that may begin, `close` all to end."""
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._comes = self._closed = False  # a thread is on its way to the first request

    def announce(self, jobs: Iterable[tuple[Job, Sequence[Request]]]) -> None:
        """Begin requests in the background, in this order. Each has the parts that reads will ask for."""
        with self._locked():
            if not self._closed:
                self._lines.announce(jobs)

    def urge(self, jobs: Iterable[Job]) -> None:
        """Let threads begin these, as far as they are free. Their caller takes them, and begins the others itself."""
        with self._locked():
            self._lines.urge(jobs)

    def claim(self, session: Session, request: Request) -> Job | None:
        """Return the look-ahead for a request, or None: it was not announced, or has failed."""
        with self._locked():
            return self._lines.claim(session, request)

    def take(self, job: Job, start: int, stop: int | None) -> bytes:
        """Return a part of what a job reads. Begin it, if no thread has."""
        begins, part = False, b""
        try:
            with self._locked():
                if job.state == WAITING:
                    self._lines.begin(job)
                    begins = True
            if begins:
                self._wait_for_turn()
                self._run(job, ahead=False)
            else:
                job.ended.wait()
            if job.error is not None:
                raise job.error
            part = job.part(start, stop)
            return part
        except BaseException as error:
            if begins and not job.ended.is_set():  # Ctrl-C, before it had a turn
                self._end(job, None, error)
            raise
        finally:
            with self._locked():
                job.session.bytes_wanted += len(part)
                self._lines.leave(job)

    def leave(self, jobs: Iterable[Job]) -> None:
        """Let a user less wait for each of these jobs."""
        with self._locked():
            for job in jobs:
                self._lines.leave(job)

    def forget(self, cancel: Callable[[Lines], None]) -> None:
        """Cancel look-ahead, soon: `cancel` gets the lines, under the lock.

        The garbage collector may call this at any time, also in a thread that has the lock.
        """
        self._forgotten.append(cancel)
        self._settle()

    def ask(self, call: Callable[[], T]) -> T:
        """Return what a request of the caller's brings that has no job."""
        self._wait_for_turn()
        try:
            return call()
        finally:
            with self._locked():
                self._turns.end(ahead=False)

    def count(self, session: Session, sent: float, outcome: Got | Failure, again: bool) -> None:
        """Count an attempt, sent at `sent`. `again`: it is repeated."""
        now = perf_counter()
        with self._locked():
            session.count(outcome, now - sent, again)
            if isinstance(outcome, Got):
                full = self._turns.in_flight >= self.limit.allowed
                self.limit.succeeded(len(outcome.data), full, now)
            elif outcome.throttled:
                self.limit.throttled(sent, now)

    def stats(self, session: Session) -> dict[str, Any]:
        """Return the counts of a session, and the limit."""
        with self._locked():
            return session.stats() | {"in_flight_limit": self.limit.allowed}

    def close(self) -> None:
        """Cancel all look-ahead, and wait a little for its threads."""
        with self._locked():
            self._closed = True
            self._lines.cancel_all()
            for _ in self._threads:
                self._work.put(None)
            threads = [*self._threads]
        until = perf_counter() + CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - perf_counter()))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Own all. Then see that a thread begins what may begin."""
        try:
            with self._lock:
                while self._forgotten:
                    self._forgotten.popleft()(self._lines)
                yield
                self._pump()
        finally:
            self._settle()

    def _settle(self) -> None:
        """Do what `forget` was told, unless a thread has the lock: that calls this when it has released it."""
        while self._forgotten and self._lock.acquire(blocking=False):
            try:
                while self._forgotten:
                    self._forgotten.popleft()(self._lines)
                self._pump()
            finally:
                self._lock.release()

    def _pump(self) -> None:
        """Wake or start a thread, if a request may begin. That thread does the same for the next one."""
        if self._comes or self._closed or self._lines.first(self._turns) is None:
            return
        if self._idle:
            self._idle -= 1
            self._comes = True
            self._work.put(None)
        elif len(self._threads) < 2 * self.limit.allowed:  # a share for each line
            thread = threading.Thread(target=self._serve, name="fastload-remote", daemon=True)
            self._threads.add(thread)
            self._comes = True
            try:
                thread.start()
            except RuntimeError:  # no more threads: callers begin their requests themselves
                self._threads.discard(thread)
                self._comes = False

    def _serve(self) -> None:
        while job := self._next():
            self._run(job, ahead=job.ahead)
            del job  # with its bytes

    def _next(self) -> Job | None:
        lingered = False
        while True:
            with self._locked():
                self._comes = False
                if (job := self._lines.first(self._turns)) is not None:
                    self._lines.begin(job)
                    self._turns.begin(ahead=job.ahead)
                    return job
                if self._closed or lingered:
                    self._threads.discard(threading.current_thread())
                    return None
                self._idle += 1
            lingered = not self._woken()

    def _woken(self) -> bool:
        try:
            self._work.get(timeout=LINGER_SECONDS)
        except Empty:
            with self._lock:
                if self._work.empty():
                    self._idle -= 1
                    return False
                self._work.get_nowait()
        return True

    def _wait_for_turn(self) -> None:
        with self._locked():
            turn = self._turns.join()
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C
            with self._locked():
                self._turns.give_up(turn)
            raise

    def _run(self, job: Job, *, ahead: bool) -> None:
        """Make a request that has a turn."""
        get, data, failed = job.session.backend.get, None, None
        try:
            data = attempted(job, lambda: get(job.path, job.start, job.stop), self.count).data
        except BaseException as error:
            failed = error
        with self._locked():
            self._turns.end(ahead=ahead)
        self._end(job, data, failed)
        if failed is not None and not isinstance(failed, Exception):
            raise failed

    def _end(self, job: Job, data: bytes | None, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Exception):
            name = job.session.name(job.path)
            error = RemoteError(f"{name}: the thread that read this was interrupted")
        with self._locked():
            self._lines.end(job, data, error)


process = Fetching()
"""The requests of this process. A child that is forked has new ones: the threads and the lock are its parent's."""


def _after_fork_in_child() -> None:
    global process
    process = Fetching()


os.register_at_fork(after_in_child=_after_fork_in_child)
# A thread in obstore's code would abort the process, while the interpreter shuts down.
atexit.register(lambda: process.close())
