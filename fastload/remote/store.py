"""What users see of object stores: `open_store`, and the `Store` that it returns."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterable
from typing import Any

from fastload.remote import counts, fetching
from fastload.remote.backends import Entry, backend, check, without_credentials
from fastload.remote.fetching import Job, Request, Session
from fastload.remote.remote_file import BUFFER, RemoteFile

GAP = 1 << 20
"""Bytes that nobody asked for are read, if two ranges of an object then need one request instead of two."""

MERGED = 8 << 20
"""The most that a request of merged ranges reads."""

_opening = threading.Lock()
"""Owns each store's session while it is made. A forked child has its own."""


def open_store(source: Any, *, retries: int = 5, timeout: float = 30.0, **options: Any) -> Store:
    """Return a store of objects: below a URL, of an fsspec file system, or of an object with `read(url)`.

    Args:
        source: a URL: s3://, gs://, az://, https://, http:// or file://. Needs the extra `remote`. Or an fsspec file
            system, or any object with `read(url) -> bytes` that threads may call at once. These retry by themselves
            or not; this store retries too, but sees no change of an object.
        retries: how often a request is repeated after a failure that may pass. The pauses between are random, and
            longer each time.
        timeout: seconds without a byte from the server after which a request has failed.
        options: of obstore's client for URLs: `endpoint`, `region`, keys and others. Whatever is not given comes from
            the environment, as obstore reads it. A pickled store carries what is given here, keys too.

    Examples:
        >>> import pathlib
        >>> store = fastload.remote.open_store(pathlib.Path("images").absolute().as_uri())
        >>> len(store.list()) > 0
        True
    """
    check(source, options)
    return Store(source, retries, timeout, options)


class Store:
    """Objects of a store. Threads may share it. It can be pickled, and opens its client at the first read in a process.

    A path is what follows the source's URL, or a whole URL below it. An object that changes after this store first read
    it in this process is a `RemoteError`: its ETag tells. An object that is missing is a `FileNotFoundError`.

    Args:
        source, retries, timeout, options: those of `open_store`, which makes it.

    Examples:
        >>> import pathlib
        >>> store = fastload.remote.open_store(pathlib.Path("images").absolute().as_uri())
        >>> first = store.list()[0]
        >>> len(store.read(first.path)) == store.size(first.path) == first.size
        True
    """

    fastload_per_worker = ()  # workers share it, with its look-ahead

    def __init__(self, source: Any, retries: int, timeout: float, options: dict[str, Any]) -> None:
        self._arguments = source, retries, timeout, options
        url = source if isinstance(source, str) else ""
        self._below = url and (url if url.endswith("/") else f"{url}/")
        self._session: Session | None = None

    @property
    def url(self) -> str:
        """The URL that was given, with a slash at its end, or "" if it was not a URL."""
        return self._below

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._arguments

    def __repr__(self) -> str:
        source = self._arguments[0]
        if isinstance(source, str):
            return f"Store({without_credentials(source)!r})"
        return f"Store({type(source).__name__})"

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return an object's bytes from `start` to before `stop`, or to its end.

        Raises:
            RemoteError: it cannot be read, or ends before `stop`. The message has URL, range, attempts and cause.
            FileNotFoundError: there is no such object.
        """
        return self.read_many([(path, start, stop)])[0]

    def read_many(self, requests: Iterable[str | Request]) -> list[bytes]:
        """Return the bytes of many paths, or of (path, start, stop), in order. They are read at once.

        One request reads ranges of an object that are at most 1 MiB apart, up to 8 MiB.
        """
        session, process = self._opened(), fetching.process
        wanted = {i: self._request(request) for i, request in enumerate(requests)}
        jobs: dict[int, Job] = {}
        found = []
        try:
            for i, request in wanted.items():
                if job := process.claim(session, request):
                    jobs[i] = job
            new = []
            for request, of in planned({i: wanted[i] for i in wanted.keys() - jobs.keys()}):
                new.append(Job(session, request, len(of), ahead=False))
                jobs |= dict.fromkeys(of, new[-1])
            process.urge(new[1:])
            for i, (_, start, stop) in wanted.items():
                found.append(process.take(jobs.pop(i), start, stop) if i in jobs else b"")
        finally:
            process.leave(jobs.values())
        process.count(session, sum(map(len, found)))
        return found

    def will_read(self, requests: Iterable[str | Request]) -> None:
        """Begin to read in the background what `read` or `read_many` will be asked for next, in this order.

        They are matched by path, start and stop. All stores of the process share one limit of bytes and requests, and
        what a thread waits for goes before. An empty list cancels all that no read has asked for yet.
        """
        wanted = dict(enumerate(map(self._request, requests)))
        process = fetching.process
        if not wanted:
            if self._session is not None and self._session.pid == os.getpid():
                process.forget(self._session)
            return
        session = self._opened()
        process.announce(
            (Job(session, request, len(of), ahead=True), [wanted[i] for i in of])
            for request, of in planned(wanted)
        )

    def forget(self, requests: Iterable[str | Request]) -> None:
        """Cancel these announced reads, as far as no read has asked for them."""
        session, process = self._opened(), fetching.process
        jobs = [process.claim(session, self._request(request)) for request in requests]
        process.leave(job for job in jobs if job)

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        return fetching.process.size(self._opened(), self._path(path))

    def open(self, path: str, until: int | None = None) -> io.BufferedReader:
        """Return an object as a file that seeks. Read in order, it reads ahead, but begins nothing at `until`."""
        return io.BufferedReader(RemoteFile(self, self._path(path), until), BUFFER)

    def list(self, prefix: str = "") -> list[Entry]:
        """Return all objects below a folder, with sizes and ETags, in the store's order."""
        return fetching.process.list(self._opened(), self._path(prefix))

    def stats(self) -> dict[str, Any]:
        """Return what this store did in this process.

        `requests`, with `retries` among them and how many were `throttled` (503, 429 or a timeout); `bytes_wanted` by
        reads, and `bytes_fetched`; `p50_s` and `p99_s`, how long the last 1,000 requests that succeeded took;
        `in_flight_limit`, of the process; `cache_hits`.
        """
        return fetching.process.stats(self._opened())

    def _opened(self) -> Session:
        session = self._session
        if session is None or session.pid != os.getpid():
            with _opening:
                session = self._session
                if session is None or session.pid != os.getpid():
                    source, retries, timeout, options = self._arguments
                    client = backend(source, options, retries, timeout)
                    url = self._below and without_credentials(self._below)
                    session = Session(self, client, url, retries)
                    counts.include(session)
                    self._session = session
        return session

    def _path(self, path: str) -> str:
        if self._below and "://" in path:
            if not path.startswith(self._below):
                raise ValueError(
                    f"{without_credentials(path)} is not below {without_credentials(self._below)}"
                )
            return path.removeprefix(self._below)
        return path

    def _request(self, request: str | Request) -> Request:
        path, start, stop = (request, 0, None) if isinstance(request, str) else request
        if start < 0 or (stop is not None and stop < start):
            raise ValueError(f"{path}: bytes {start} to {stop} are no range")
        return self._path(path), start, stop


def planned(wanted: dict[int, Request]) -> list[tuple[Request, list[int]]]:
    """Return the requests to make for these, in the order of their first parts, with the keys of what each reads."""
    plan: list[tuple[Request, list[int]]] = []
    ranges: dict[str, list[tuple[int, int, int]]] = {}
    for i, (path, start, stop) in wanted.items():
        if stop is None:
            plan.append(((path, start, None), [i]))
        elif start < stop:
            ranges.setdefault(path, []).append((start, stop, i))
    for path, parts in ranges.items():
        parts.sort()
        first, last, of = *parts[0][:2], [parts[0][2]]
        for start, stop, i in parts[1:]:
            if start - last <= GAP and max(last, stop) - first <= MERGED:
                last = max(last, stop)
                of.append(i)
            else:
                plan.append(((path, first, last), of))
                first, last, of = start, stop, [i]
        plan.append(((path, first, last), of))
    return sorted(plan, key=lambda made: min(made[1]))


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
