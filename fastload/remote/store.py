"""What users see of object stores: `open_store`, and the `Store` that it returns."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

from fastload.remote import counts, fetching
from fastload.remote.attempts import attempted, once
from fastload.remote.backends import Entry, backend, check, without_credentials
from fastload.remote.lines import Job, Lines, Request, Session
from fastload.remote.remote_file import BUFFER, RemoteFile

GAP = 1 << 20
"""Two ranges of an object share a request if at most this many bytes lie between them, which are read and dropped."""

MERGED = 8 << 20
"""The most that a request of merged ranges reads."""

_opening = threading.RLock()
"""Owns each store's session while it is made."""


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
        self._hits = 0

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
                new.append(Job(session, request, len(of)))
                jobs |= dict.fromkeys(of, new[-1])
            process.urge(new[1:])
            for i, (_, start, stop) in wanted.items():
                found.append(process.take(jobs.pop(i), start, stop) if i in jobs else b"")
        finally:
            process.leave(jobs.values())
        return found

    def will_read(self, requests: Iterable[str | Request], *, owner: object = None) -> None:
        """Begin to read in the background what `read` or `read_many` will be asked for next, in this order.

        They are matched by path, start and stop. All stores of the process share one limit of bytes and requests, and
        what a thread waits for goes before. An empty list cancels all that no read has asked for yet.

        Args:
            requests: paths, or (path, start, stop).
            owner: names the caller, if several share this store: an empty list cancels only what an equal owner
                announced. A number or a string, for instance.
        """
        wanted = dict(enumerate(map(self._request, requests)))
        if not wanted:
            if session := self._open_session():
                mine = partial(Lines.cancel, session=session, chosen=lambda job: job.owner == owner)
                fetching.process.forget(mine)
            return
        session = self._opened()
        fetching.process.announce(
            (Job(session, request, len(of), ahead=True, owner=owner), [wanted[i] for i in of])
            for request, of in planned(wanted)
        )

    def forget(self, requests: Iterable[str | Request]) -> None:
        """Cancel these announced reads, as far as no read has asked for them."""
        if session := self._open_session():
            these = [*map(self._request, requests)]
            fetching.process.forget(partial(Lines.unclaim, session=session, requests=these))

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        session, process, path = self._opened(), fetching.process, self._path(path)
        job = Job(session, (path, 0, None))
        head = session.backend.head
        return process.ask(lambda: attempted(job, lambda: head(path), process.count)).size

    def etags(self, paths: Iterable[str]) -> list[str | None]:
        """Return the ETag of each object, None if it has none, by a request for one byte of each that is new here.

        An object that has no byte is an error.
        """
        session, names = self._opened(), [*map(self._path, paths)]
        self.read_many([(name, 0, 1) for name in names if name not in session.etags])
        return [session.etags.get(name) for name in names]

    def open(self, path: str, until: int | None = None) -> io.BufferedReader:
        """Return an object as a file that seeks. Read in order, it reads ahead, but begins nothing at `until`."""
        return io.BufferedReader(RemoteFile(self, self._path(path), until), BUFFER)

    def list(self, prefix: str = "") -> list[Entry]:
        """Return all objects below a folder, with sizes and ETags, in the store's order."""
        session, path = self._opened(), self._path(prefix)

        def call() -> list[Entry]:
            return [*session.backend.list(path)]

        return fetching.process.ask(lambda: once(session, path, ", a listing", call))

    def etag(self, path: str) -> str | None:
        """Return the ETag of an object when this store first read it, or its size, in this process, or None."""
        return self._opened().etags.get(self._path(path))

    def write(self, path: str, data: bytes | memoryview) -> None:
        """Write an object, or another one in its place. It appears whole, or not at all.

        Announce no read of it before. A large object is sent in parts. If the process is killed, a store may keep those
        that were sent, and ask money for them: let a rule of the bucket delete incomplete uploads.
        """
        session, path = self._opened(), self._path(path)
        put = partial(session.backend.put, path, data)
        fetching.process.ask(lambda: once(session, path, ", written", put))
        session.etags.pop(path, None)  # the next read finds this object

    def stats(self) -> dict[str, Any]:
        """Return what this store did in this process.

        `requests`, with `retries` among them and how many were `throttled` (503, 429 or a timeout); `bytes_wanted` by
        reads, and `bytes_fetched`; `p50_s` and `p99_s`, how long the last 1,000 requests that succeeded took;
        `in_flight_limit`, of the process; `cache_hits`, the blocks of 1 MiB that were in a local cache, at each use.
        """
        return {**fetching.process.stats(self._opened()), "cache_hits": self._hits}

    def count_hits(self, blocks: int) -> None:
        """Count blocks that a cache had."""
        with _opening:
            self._hits += blocks

    def _open_session(self) -> Session | None:
        """Return the session, if one is open in this process. Finalizers call this, so it has no lock."""
        session = self._session
        return session if session is not None and session.pid == os.getpid() else None

    def _opened(self) -> Session:
        session = self._open_session()
        if session is None:
            with _opening:
                session = self._open_session()
                if session is None:
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


# A fork waits until a client is open: a child would wait for ever for an import that no thread of it goes on with.
os.register_at_fork(
    before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_opening.release
)
