"""The requests of this process: how many are in flight, in which order they begin, retries, look-ahead and counts.

A thread that reads makes its request itself. Threads of this file make the requests of look-ahead, and the others of
`read_many`. So a read never waits for a thread, and look-ahead that nobody has begun is begun by who asks for it.
"""

from __future__ import annotations

import atexit
import errno
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from random import SystemRandom
from time import perf_counter
from typing import Any

from fastload.errors import FastloadError, RemoteError
from fastload.remote.backends import Backend, Entry, Failure, Got, without_credentials

AHEAD_BYTES = 256 << 20
"""How much look-ahead of all stores may hold that no read has taken."""

CLOSE_SECONDS = 5.0
"""How long the end of the interpreter waits for requests of look-ahead."""

LINGER_SECONDS = 0.5
"""How long a thread without look-ahead stays for the next `read_many`."""

_WAITING, _RUNNING, _ENDED = range(3)
_jitter = SystemRandom()  # a generator without a state: no seed of the user's is drawn from

Request = tuple[str, int, int | None]


class Limit:
    """How many requests may be in flight: more while that gets more done in a second, half after throttling.

    By Little's law, what is in flight is the rate times the latency, so a limit that is reached bounds the rate. It is
    changed after rounds of twice as many requests that reached it. A growth by half that brought less than a tenth is
    taken back. It is tried again after `REST` rounds, in which a limit that was halved grows by one each.
    """

    LEAST, FIRST, MOST, REST = 4, 16, 256, 32
    REQUEST_BYTES = 64 << 10
    """What a request counts beside its bytes: small objects are bounded by requests, large ones by bytes."""

    def __init__(self, now: float) -> None:
        self.allowed = self.FIRST
        self._smaller, self._rate = self.FIRST, 0.0
        self._rest = self._step = 0
        self._halved = now
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._began, self._done, self._work, self._full = now, 0, 0, False

    def succeeded(self, nbytes: int, full: bool, now: float) -> None:
        """Count a request that has ended. `full`: as many as allowed were in flight."""
        self._done += 1
        self._work += nbytes + self.REQUEST_BYTES
        self._full |= full
        if self._done < 2 * self.allowed:
            return
        rate, full = self._work / max(now - self._began, 1e-9), self._full
        self._begin(now)
        if not full:
            return
        if self._rest:
            self._rest -= 1
            self.allowed = min(self.MOST, self.allowed + self._step)
            if not self._rest:
                self._rate = 0.0  # nothing to compare with: the next round tries
        elif rate < 1.1 * self._rate:
            self.allowed, self._rest, self._step = self._smaller, self.REST, 0
        else:
            self._smaller, self._rate = self.allowed, rate
            self.allowed = min(self.MOST, self.allowed * 3 // 2)

    def throttled(self, sent: float, now: float) -> None:
        """Halve the limit, once for all requests that were in flight together. `sent` is when this one was."""
        if sent < self._halved:
            return
        self.allowed = max(self.LEAST, self.allowed // 2)
        self._halved, self._rest, self._step = now, self.REST, 1
        self._begin(now)


class Session:
    """A store in this process: its client, the ETags it saw, its look-ahead and counts.

    The lock of `Fetching` owns all that changes.
    """

    def __init__(self, owner: object, backend: Backend, url: str, retries: int) -> None:
        self.owner = weakref.ref(owner)
        self.pid = os.getpid()
        self.backend, self.retries = backend, retries
        self.claims: dict[Request, deque[Job]] = {}
        self.etags: dict[str, str] = {}
        self.object_bytes = 0.0  # of a whole object, about, once one was read
        self.requests = self.retried = self.throttled = self.bytes_wanted = self.bytes_fetched = 0
        self.seconds: deque[float] = deque(maxlen=1000)
        self._url = url

    def name(self, path: str) -> str:
        """Return what messages call an object: its URL, without credentials."""
        if "://" in path or not self._url:
            return without_credentials(path) if "://" in path else path
        return f"{self._url}/{path}"

    def error(self, path: str, span: str, failure: Failure, attempts: int) -> OSError:
        """Return the error for an object that cannot be read."""
        if failure.missing:
            return FileNotFoundError(errno.ENOENT, "No such object", self.name(path))
        tries = f"{attempts} attempt{'s' * (attempts != 1)}"
        return RemoteError(f"{self.name(path)}{span}: {failure.reason} ({tries})")


class Job:
    """A request for a range of an object. `users` counts the parts of it that no read has taken yet."""

    def __init__(self, session: Session, request: Request, users: int, ahead: bool) -> None:
        self.session, self.users, self.ahead = session, users, ahead
        self.path, self.start, self.stop = request
        self.state, self.reserved = _WAITING, 0
        self.data: bytes | None = None
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.dropped = threading.Event()  # wakes it from the pause before a retry

    def part(self, start: int, stop: int | None) -> bytes:
        """Return a range of what was read, without a copy if it is all."""
        assert self.data is not None
        if (start, stop) == (self.start, self.stop):
            return self.data
        return self.data[start - self.start : None if stop is None else stop - self.start]


class Fetching:
    """The requests of a process, those of all its stores together.

    What a thread waits for may have `limit.allowed` requests in flight, and begins whatever look-ahead does.
    Look-ahead begins in order, while all requests together are fewer, and while its bytes fit into `ahead_bytes`.
    """

    def __init__(self, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._lock = threading.Lock()
        """Owns all below, and what sessions and jobs count. No request and no user's code runs under it."""
        self._work = threading.Condition(self._lock)
        """Where threads without a request wait. `_pump` wakes one for a request that may begin, `_drop` all to end."""
        self.limit = Limit(perf_counter())
        self._ahead_bytes = ahead_bytes
        self._sessions: set[Session] = set()  # those with look-ahead
        self._urgent: deque[Job] = deque()  # parts of `read_many`
        self._ahead: deque[Job] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = self._asked = self._looking = (
            0  # threads; requests in flight of callers, and of look-ahead
        )
        self._busy = 0  # threads with a request
        self._line: deque[threading.Lock] = (
            deque()
        )  # callers without a turn: `_grant` releases their locks
        self._held = self._unclaimed = (
            0  # look-ahead that was begun, in bytes; all that was announced, in jobs
        )
        self._closed = False

    # What stores call.

    def announce(self, jobs: Iterable[tuple[Job, Sequence[Request]]]) -> None:
        """Begin requests in the background, in this order. Each has the parts that reads will ask for."""
        with self._lock:
            for session in [s for s in self._sessions if s.owner() is None]:
                self._forget(session)
            for job, parts in () if self._closed else jobs:
                self._sessions.add(job.session)
                self._ahead.append(job)
                self._unclaimed += 1
                for part in parts:
                    job.session.claims.setdefault(part, deque()).append(job)
            self._pump()

    def forget(self, session: Session) -> None:
        """Cancel all look-ahead of a session that no read has asked for yet."""
        with self._lock:
            self._forget(session)
            self._pump()

    def claim(self, session: Session, request: Request) -> Job | None:
        """Return the look-ahead for a request, or None: it was not announced, or has failed."""
        with self._lock:
            jobs = session.claims.get(request)
            if not jobs:
                return None
            job = jobs.popleft()
            if not jobs:
                del session.claims[request]
            if job.error is not None:
                self._leave(job)  # who asks now asks again, and raises what it finds
                self._pump()
                return None
            return job

    def urge(self, jobs: Iterable[Job]) -> None:
        """Let threads begin these, as far as they are free. Their caller takes them, and begins the others itself."""
        with self._lock:
            self._urgent.extend(jobs)
            self._pump()

    def take(self, job: Job, start: int, stop: int | None) -> bytes:
        """Return a part of what a job reads. Begin it, if no thread has."""
        begins = False
        try:
            with self._lock:
                if job.state == _WAITING:
                    self._begin(job)
                    begins = True
            if begins:
                self._run(job, self._asking())
            else:
                job.ended.wait()
            if job.error is not None:
                raise job.error
            return job.part(start, stop)
        except BaseException as error:
            if begins and not job.ended.is_set():  # Ctrl-C, before it ran
                self._end(job, None, error)
            raise
        finally:
            self.leave([job])

    def leave(self, jobs: Iterable[Job]) -> None:
        """Let a user less wait for each of these jobs."""
        with self._lock:
            for job in jobs:
                self._leave(job)
            self._pump()

    def size(self, session: Session, path: str) -> int:
        """Return the size of an object. It counts as a request of the caller's."""
        with self._asking():
            return self._attempts(
                session, path, "", threading.Event(), lambda: session.backend.head(path)
            ).size

    def list(self, session: Session, prefix: str) -> list[Entry]:
        """Return all objects below a folder. The client retries each page of the listing."""
        with self._at_once(session, prefix, ", a listing"):
            return [*session.backend.list(prefix)]

    def put(self, session: Session, path: str, data: Any) -> None:
        """Write an object. The client retries. What the next read finds is another object than those before."""
        with self._at_once(session, path, ", written"):
            session.backend.put(path, data)
        with self._lock:
            session.etags.pop(path, None)

    @contextmanager
    def _at_once(self, session: Session, path: str, span: str) -> Iterator[None]:
        with self._asking():
            try:
                yield
            except FastloadError:
                raise
            except Exception as error:
                failure = session.backend.failure(error)
                cause = error if failure.quotable else None
                raise session.error(path, span, failure, session.retries + 1) from cause

    def count(self, session: Session, nbytes: int) -> None:
        """Count bytes that a read returned."""
        with self._lock:
            session.bytes_wanted += nbytes

    def held(self) -> tuple[int, int, int]:
        """Return the bytes and requests of look-ahead that no read has taken, and all requests in flight."""
        with self._lock:
            return self._held, self._unclaimed, self._asked + self._looking

    def stats(self, session: Session) -> dict[str, Any]:
        """Return the counts of a session."""
        with self._lock:
            seconds = sorted(session.seconds)
            return {
                "requests": session.requests,
                "bytes_wanted": session.bytes_wanted,
                "bytes_fetched": session.bytes_fetched,
                "p50_s": seconds[len(seconds) // 2] if seconds else 0.0,
                "p99_s": seconds[len(seconds) * 99 // 100] if seconds else 0.0,
                "retries": session.retried,
                "throttled": session.throttled,
                "in_flight_limit": self.limit.allowed,
                "cache_hits": 0,
            }

    def close(self) -> None:
        """Cancel all look-ahead, and wait a little for its threads."""
        with self._lock:
            self._closed = True
            for session in [*self._sessions]:
                self._forget(session)
            self._work.notify_all()
            threads = [*self._threads]
        until = perf_counter() + CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - perf_counter()))

    # Under the lock.

    def _begin(self, job: Job) -> None:
        job.state = _RUNNING
        if job.ahead:
            job.reserved = self._estimate(job)
            self._held += job.reserved

    def _estimate(self, job: Job) -> int:
        if job.stop is not None:
            return job.stop - job.start
        return int(job.session.object_bytes) or self._ahead_bytes // Limit.FIRST

    def _forget(self, session: Session) -> None:
        claims, session.claims = session.claims, {}
        self._sessions.discard(session)
        for jobs in claims.values():
            for job in jobs:
                self._leave(job)

    def _leave(self, job: Job) -> None:
        job.users -= 1
        if job.users == 0:
            job.dropped.set()
            if job.state != _RUNNING:
                self._drop(job)

    def _drop(self, job: Job) -> None:
        job.state, job.data = _ENDED, None
        if job.ahead:
            self._held -= job.reserved
            self._unclaimed -= 1
            if not self._unclaimed:
                self._work.notify_all()

    def _may_begin(self) -> deque[Job] | None:
        """Return the line whose first request a thread may begin now."""
        for line in (self._urgent, self._ahead):
            while line and line[0].state != _WAITING:
                line.popleft()
        if self._urgent and not self._line and self._asked < self.limit.allowed:
            return self._urgent
        if self._ahead and self._asked + self._looking < self.limit.allowed:
            after = self._held + self._estimate(self._ahead[0])
            if (
                not self._held or after <= self._ahead_bytes
            ):  # one may be larger than all that is allowed
                return self._ahead
        return None

    def _grant(self) -> None:
        """Give their turns to callers, in the order in which they came."""
        while self._line and self._asked < self.limit.allowed:
            self._asked += 1
            self._line.popleft().release()

    def _pump(self) -> None:
        """Wake or start a thread, if a request may begin. That thread does the same for the next one."""
        if self._may_begin() is None:
            return
        if self._idle:
            self._work.notify()
        elif (
            len(self._threads) < 2 * self.limit.allowed and not self._closed
        ):  # a share for each line
            thread = threading.Thread(target=self._serve, name="fastload-remote", daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:  # no more threads: callers begin their requests themselves
                self._threads.discard(thread)

    # In threads.

    def _serve(self) -> None:
        while job := self._next():
            self._run(job, self._counted("_looking" if job.ahead else "_asked", 1))
            del job  # with its bytes

    def _next(self) -> Job | None:
        lingered = False
        with self._lock:
            while True:
                if (line := self._may_begin()) is not None:
                    job = line.popleft()
                    self._begin(job)
                    self._busy += 1
                    if job.ahead:
                        self._looking += 1
                    else:
                        self._asked += 1
                    self._pump()
                    return job
                if self._closed or (lingered and not self._unclaimed):
                    self._threads.discard(threading.current_thread())
                    return None
                self._idle += 1
                try:
                    lingered = not self._work.wait(None if self._unclaimed else LINGER_SECONDS)
                finally:
                    self._idle -= 1

    @contextmanager
    def _asking(self) -> Iterator[None]:
        turn = threading.Lock()
        turn.acquire()
        with self._lock:
            self._line.append(turn)
            self._grant()
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C
            with self._lock:
                if turn in self._line:
                    self._line.remove(turn)
                else:
                    self._asked -= 1
                    self._grant()
            raise
        with self._counted("_asked"):
            yield

    @contextmanager
    def _counted(self, count: str, threads: int = 0) -> Iterator[None]:
        try:
            yield
        finally:
            with self._lock:
                setattr(self, count, getattr(self, count) - 1)
                self._busy -= threads
                self._grant()
                self._pump()

    def _run(self, job: Job, turn: AbstractContextManager[None]) -> None:
        session, path, start, stop = job.session, job.path, job.start, job.stop
        span = (
            ""
            if (start, stop) == (0, None)
            else f", bytes {start} to {'the end' if stop is None else stop}"
        )
        try:
            with turn:
                got = self._attempts(
                    session, path, span, job.dropped, lambda: session.backend.get(path, start, stop)
                )
        except BaseException as error:
            self._end(job, None, error)
            if not isinstance(error, Exception):
                raise
        else:
            self._end(job, got.data, None)

    def _end(self, job: Job, data: bytes | None, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Exception):
            error = RemoteError(
                f"{job.session.name(job.path)}: the thread that read this was interrupted"
            )
        with self._lock:
            job.state, job.data, job.error = _ENDED, data, error
            if job.ahead:
                now = len(data or b"")
                self._held += now - job.reserved
                job.reserved = now
            if job.users == 0:
                self._drop(job)
            job.ended.set()
            self._pump()

    def _attempts(
        self,
        session: Session,
        path: str,
        span: str,
        dropped: threading.Event,
        call: Callable[[], Got],
    ) -> Got:
        attempt = 0
        while True:
            attempt += 1
            sent = perf_counter()
            try:
                answer = call()
            except FastloadError:
                raise
            except Exception as error:
                failure, cause = session.backend.failure(error), error
            else:
                self._note(session, path, sent, answer)
                return answer
            last = not failure.again or attempt > session.retries or dropped.is_set()
            with self._lock:
                session.requests += 1
                session.retried += not last
                if failure.throttled:
                    session.throttled += 1
                    self.limit.throttled(sent, perf_counter())
            # Full jitter: threads that failed together come back apart.
            if last or dropped.wait(_jitter.uniform(0, min(20.0, 0.1 * 3 ** (attempt - 1)))):
                raise session.error(path, span, failure, attempt) from (
                    cause if failure.quotable else None
                )

    def _note(self, session: Session, path: str, sent: float, got: Got) -> None:
        """Count an answer. Raise if the object is not the one that this store saw first."""
        now = perf_counter()
        with self._lock:
            session.requests += 1
            session.bytes_fetched += len(got.data)
            session.seconds.append(now - sent)
            self.limit.succeeded(
                len(got.data), self._asked + self._looking >= self.limit.allowed, now
            )
            if got.data and got.whole:
                known = session.object_bytes or len(got.data)
                session.object_bytes = known + (len(got.data) - known) / 16
            first = session.etags.setdefault(path, got.etag) if got.etag else None
        if first != got.etag:
            raise RemoteError(
                f"{session.name(path)}: the object has changed since this store first read it: its ETag was {first}, "
                f"and is {got.etag}. Begin again with what is there now, or put the old object back"
            )


process = Fetching()
"""The requests of this process. A child that is forked has new ones: the threads and the lock are its parent's."""


def _after_fork_in_child() -> None:
    global process
    process = Fetching()


os.register_at_fork(after_in_child=_after_fork_in_child)
# A thread in obstore's code would abort the process, while the interpreter shuts down.
atexit.register(lambda: process.close())
