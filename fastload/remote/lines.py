"""Requests that wait for a thread: parts of `read_many`, and look-ahead until a read takes it."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from fastload.remote.backends import Backend, Failure, Got, without_credentials
from fastload.remote.turns import Limit, Turns

WAITING, RUNNING, ENDED = range(3)

Request = tuple[str, int, int | None]


class Session:
    """A store in this process: its client, the ETags it saw, its look-ahead and counts.

    The lock of `Fetching` owns all that changes, but the ETags.
    """

    def __init__(self, owner: object, backend: Backend, url: str, retries: int) -> None:
        self.owner = weakref.ref(owner)
        self.pid = os.getpid()
        self.backend, self.retries = backend, retries
        self.claims: dict[Request, deque[Job]] = {}
        self.etags: dict[str, str] = {}
        self.object_bytes = 0.0  # of a whole object, about, once one was read
        self.bytes_wanted = 0
        self.requests = self.retried = self.throttled = self.bytes_fetched = 0
        self.seconds: deque[float] = deque(maxlen=1000)
        self._url = url

    def name(self, path: str) -> str:
        """Return what messages call an object: its URL, without credentials."""
        if "://" in path or not self._url:
            return without_credentials(path) if "://" in path else path
        return f"{self._url}/{path}"

    def count(self, outcome: Got | Failure, seconds: float, again: bool) -> None:
        """Count an attempt. `again`: it is repeated."""
        self.requests += 1
        self.retried += again
        if isinstance(outcome, Failure):
            self.throttled += outcome.throttled
            return
        self.bytes_fetched += len(outcome.data)
        self.seconds.append(seconds)
        if outcome.data and outcome.whole:
            known = self.object_bytes or len(outcome.data)
            self.object_bytes = known + (len(outcome.data) - known) / 16

    def stats(self) -> dict[str, Any]:
        """Return the counts."""
        seconds = sorted(self.seconds)
        return {
            "requests": self.requests,
            "bytes_wanted": self.bytes_wanted,
            "bytes_fetched": self.bytes_fetched,
            "p50_s": seconds[len(seconds) // 2] if seconds else 0.0,
            "p99_s": seconds[len(seconds) * 99 // 100] if seconds else 0.0,
            "retries": self.retried,
            "throttled": self.throttled,
        }


class Job:
    """A request for a range of an object. `users` counts the parts of it that no read has taken yet.

    `ahead`: it is look-ahead, which `owner` announced.
    """

    def __init__(
        self,
        session: Session,
        request: Request,
        users: int = 1,
        *,
        ahead: bool = False,
        owner: object = None,
    ) -> None:
        self.session, self.users, self.ahead, self.owner = session, users, ahead, owner
        self.path, self.start, self.stop = request
        self.state, self.reserved = WAITING, 0
        self.data: bytes | None = None
        self.error: BaseException | None = None
        self.ended = threading.Event()
        # Not an event: a finalizer drops jobs, perhaps in the thread that is about to pause.
        self._dropped: SimpleQueue[None] = SimpleQueue()

    @property
    def span(self) -> str:
        """Return what messages call the range."""
        if (self.start, self.stop) == (0, None):
            return ""
        return f", bytes {self.start} to {'the end' if self.stop is None else self.stop}"

    def part(self, start: int, stop: int | None) -> bytes:
        """Return a range of what was read, without a copy if it is all."""
        assert self.data is not None
        if (start, stop) == (self.start, self.stop):
            return self.data
        return self.data[start - self.start : None if stop is None else stop - self.start]

    def pause(self, seconds: float) -> bool:
        """Wait before a retry. Return False if the last reader leaves meanwhile."""
        try:
            self._dropped.get(timeout=seconds)
        except Empty:
            return True
        return False

    def drop(self) -> None:
        """Wake a pause: the last reader has left."""
        self._dropped.put(None)


class Lines:
    """The jobs of a process that wait for a thread, and its look-ahead. Its owner's lock is held in each call.

    Look-ahead begins in order, while its bytes fit into `ahead_bytes`.
    """

    def __init__(self, ahead_bytes: int) -> None:
        self.held = 0  # bytes of look-ahead that was begun and not taken
        self._ahead_bytes = ahead_bytes
        self._sessions: set[Session] = set()  # those with look-ahead
        self._urgent: deque[Job] = deque()  # parts of `read_many`
        self._ahead: deque[Job] = deque()

    def announce(self, jobs: Iterable[tuple[Job, Sequence[Request]]]) -> None:
        """Add look-ahead. Each job has the parts that reads will ask for."""
        for session in [s for s in self._sessions if s.owner() is None]:
            self.cancel(session, lambda _: True)
            self._sessions.discard(session)
        for job, parts in jobs:
            self._sessions.add(job.session)
            self._ahead.append(job)
            for part in parts:
                job.session.claims.setdefault(part, deque()).append(job)

    def urge(self, jobs: Iterable[Job]) -> None:
        """Add parts of a read."""
        self._urgent.extend(jobs)

    def claim(self, session: Session, request: Request) -> Job | None:
        """Return the look-ahead for a request, or None: it was not announced, or has failed."""
        jobs = session.claims.get(request)
        if not jobs:
            return None
        job = jobs.popleft()
        if not jobs:
            del session.claims[request]
        if job.error is not None:
            self.leave(job)  # who asks now asks again, and raises what it finds
            return None
        return job

    def unclaim(self, session: Session, requests: Iterable[Request]) -> None:
        """Cancel these, as far as they were announced."""
        for request in requests:
            if job := self.claim(session, request):
                self.leave(job)

    def cancel(self, session: Session, chosen: Callable[[Job], bool]) -> None:
        """Cancel look-ahead of a session that no read has asked for yet."""
        for request, jobs in [*session.claims.items()]:
            for job in filter(chosen, [*jobs]):
                jobs.remove(job)
                self.leave(job)
            if not jobs:
                del session.claims[request]

    def cancel_all(self) -> None:
        """Cancel all look-ahead that no read has asked for yet."""
        for session in self._sessions:
            self.cancel(session, lambda _: True)
        self._sessions.clear()

    def first(self, turns: Turns) -> Job | None:
        """Return the job that a thread may begin now."""
        for line in (self._urgent, self._ahead):
            while line and line[0].state != WAITING:
                line.popleft()
        if self._urgent and turns.free(ahead=False):
            return self._urgent[0]
        if self._ahead and turns.free(ahead=True):
            job = self._ahead[0]
            # One may be larger than all that is allowed.
            if not self.held or self.held + self._estimate(job) <= self._ahead_bytes:
                return job
        return None

    def begin(self, job: Job) -> None:
        """Let a job begin."""
        job.state = RUNNING
        if job.ahead:
            job.reserved = self._estimate(job)
            self.held += job.reserved

    def end(self, job: Job, data: bytes | None, error: BaseException | None) -> None:
        """Give a job what it brought."""
        job.state, job.data, job.error = ENDED, data, error
        if job.ahead:
            now = len(data or b"")
            self.held += now - job.reserved
            job.reserved = now
        if job.users == 0:
            self._drop(job)
        job.ended.set()

    def leave(self, job: Job) -> None:
        """Let a user less wait for a job."""
        job.users -= 1
        if job.users == 0:
            job.drop()
            if job.state != RUNNING:
                self._drop(job)

    def _drop(self, job: Job) -> None:
        job.state, job.data = ENDED, None
        if job.ahead:
            self.held -= job.reserved

    def _estimate(self, job: Job) -> int:
        if job.stop is not None:
            return job.stop - job.start
        return int(job.session.object_bytes) or self._ahead_bytes // Limit.FIRST
