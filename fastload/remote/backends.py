"""What a store reads by: obstore for URLs, files for file://, an fsspec file system, or an object with `read(url)`.

Each makes one attempt and retries nothing. `failure` says what an error of it means.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from fastload._kit.disk import write_file
from fastload.errors import RemoteError, UsageError, needs


class Entry(NamedTuple):
    """An object in a listing. `path` is the one to read it by.

    Examples:
        >>> fastload.remote.Entry("cat/1.jpg", 115_000, etag=None).path
        'cat/1.jpg'
    """

    path: str
    size: int
    etag: str | None


class Got(NamedTuple):
    """What an attempt brought: bytes, or for a question after the size none; the object's size; its ETag, if known."""

    data: bytes
    size: int
    etag: str | None
    whole: bool = False


@dataclass(frozen=True)
class Failure:
    """What an error of an attempt means. `reason` is a clause without credentials."""

    reason: str
    repeats: float = inf
    """How often it is worth to try again."""
    throttled: bool = False
    missing: bool = False
    quotable: bool = True
    """The error itself may be shown: it holds no credentials that fastload knows of."""


class Cut(Exception):
    """Another range came than was asked for. The message says both. `short`: the object itself has no more."""

    def __init__(
        self, wanted: tuple[int, int | None], first: int, came: int, size: int | None
    ) -> None:
        start, stop = wanted
        asked = f"{start} to {'the end' if stop is None else stop}"
        of = "" if size is None else f" of {size}"
        super().__init__(f"bytes {asked} were asked for, and {first} to {first + came}{of} came")
        self.short = stop is not None and size is not None and size < stop


class Backend(Protocol):
    """A way to read objects."""

    def get(self, path: str, start: int, stop: int | None) -> Got:
        """Read a range. Raise `Cut` if another one comes."""
        ...

    def head(self, path: str) -> Got:
        """Return an object's size and ETag."""
        ...

    def list(self, prefix: str) -> Iterator[Entry]:
        """Yield all objects below a folder."""
        ...

    def put(self, path: str, data: Any) -> None:
        """Write an object, which appears whole. Unlike the others, it may retry."""
        ...

    def failure(self, error: BaseException) -> Failure:
        """Return what an error of these means."""
        ...


def backend(source: Any, options: dict[str, Any], retries: int, timeout: float) -> Backend:
    """Return the backend of a source, for this process."""
    if isinstance(source, str):
        files = source.startswith("file://")
        return _Files(source) if files else _Obstore(source, options, retries, timeout)
    return _FileSystem(source) if hasattr(source, "cat_file") else _Reader(source)


def check(source: Any, options: dict[str, Any]) -> None:
    """Raise if no backend reads this source."""
    if isinstance(source, str):
        if "://" not in source:
            raise UsageError(
                f"{source!r} is not a URL. Give one such as s3://bucket/folder, or file://{source}"
            )
        if source.startswith("file://"):
            if options:
                raise UsageError(f"{', '.join(options)}: files have no options")
        elif importlib.util.find_spec("obstore") is None:
            raise needs(
                "a URL of an object store", "obstore", "remote", ModuleNotFoundError(name="obstore")
            )
    elif not hasattr(source, "cat_file") and not callable(getattr(source, "read", None)):
        raise UsageError(
            f"{type(source).__name__} is not a URL, no fsspec file system, and has no read(url)"
        )
    elif options:
        raise UsageError(
            f"{', '.join(options)}: options are for URLs. Give them to {type(source).__name__}"
        )


def without_credentials(url: str) -> str:
    """Return a URL without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"


PART, PARTS = 8 << 20, 9_000
"""Bytes of each part that a large object is written in, and the most parts: stores allow 10,000."""

_used_in: int | None = None
"""The process that has opened a client, or a parent that had, before this one was forked from it."""

_STATUS = re.compile(r"non-2xx status code: (\d{3}[\w '-]*)")
_KIND = re.compile(r"kind: (Timeout|Connect|Interrupted|Decode)\b")
_WHY = re.compile(
    r"InvalidCertificate\(\s*\w+|Connection(?:Refused|Reset)\b|failed to lookup address information|BadScheme"
)
_NO_RANGES = re.compile(r"non-partial response|Range request not supported")
_PERMANENT = (
    "InvalidPathError",
    "NotSupportedError",
    "PermissionDeniedError",
    "UnauthenticatedError",
    "UnknownConfigurationKeyError",
)


class _Obstore:
    """A URL, read by obstore, whose calls release the GIL. fastload retries, so that it can count and back off."""

    def __init__(self, url: str, options: dict[str, Any], retries: int, timeout: float) -> None:
        self._arguments = url, options, timeout
        self._retries = retries
        self._client = self._open(0, timeout)
        self._gives_ranges = False

    def _open(self, retries: int, timeout: float) -> Any:
        global _used_in
        url, options, _ = self._arguments
        if _used_in not in (None, os.getpid()):
            raise RemoteError(
                f"{without_credentials(url)}: this process was forked from one that had read by obstore, "
                f"whose threads do not survive a fork. Start it by spawn or forkserver, or read in it only"
            )
        # By name: its overloads know the options of each store, and here are those of any.
        from_url: Any = importlib.import_module("obstore.store").from_url
        endpoints = [url, str(options.get("endpoint", "")), *map(os.environ.get, _ENDPOINTS)]
        client: dict[str, Any] = {
            "allow_http": any(e and e.startswith("http://") for e in endpoints),
            "connect_timeout": timedelta(seconds=min(timeout, 10.0)),
            "read_timeout": timedelta(seconds=timeout),
            "timeout": timedelta(seconds=60 * timeout),
        }
        client |= options.get("client_options") or {}
        rest = {name: value for name, value in options.items() if name != "client_options"}
        # obstore would ask for https://host/folder//name.
        url = url.rstrip("/")
        try:
            opened = from_url(
                url, client_options=client, retry_config={"max_retries": retries}, **rest
            )
        except Exception as error:
            raise UsageError(f"{without_credentials(url)}: {self.failure(error).reason}") from None
        _used_in = os.getpid()
        return opened

    def get(self, path: str, start: int, stop: int | None) -> Got:
        options: dict[str, Any] = {}
        if stop is not None:
            options["range"] = (start, stop)
        elif start:
            options["range"] = {"offset": start}
        result = self._client.get(path, options=options)
        first, last = result.range
        # One chunk, which needs no second copy. `bytes(result.bytes())` has one more.
        data = b"".join(result.stream(min_chunk_size=max(1, last - first)))
        size = result.meta["size"]
        if (first, first + len(data)) != (start, size if stop is None else stop):
            raise Cut((start, stop), first, len(data), size)
        self._gives_ranges |= bool(options)
        return Got(data, size, result.meta["e_tag"], len(data) == size)

    def head(self, path: str) -> Got:
        meta = self._client.head(path)
        return Got(b"", meta["size"], meta["e_tag"])

    def list(self, prefix: str) -> Iterator[Entry]:
        # obstore retries each page by itself: a whole listing is too long for one attempt.
        client = self._open(self._retries, self._arguments[2])
        for page in client.list(prefix or None, chunk_size=1000):
            for meta in page:
                yield Entry(meta["path"], meta["size"], meta["e_tag"])

    def put(self, path: str, data: Any) -> None:
        # While a part is sent, the server says nothing. obstore retries each part by itself.
        client = self._open(self._retries, 10 * self._arguments[2])
        client.put(path, data, chunk_size=max(PART, len(data) // PARTS + 1))

    def failure(self, error: BaseException) -> Failure:
        if isinstance(error, FileNotFoundError):
            return Failure("no such object", repeats=0, missing=True, quotable=False)
        if isinstance(error, Cut):
            return Failure(str(error), 0 if error.short else inf)
        # An answer's body may hold keys and signatures, and so may a URL. Neither is shown.
        text = str(error)
        if status := _STATUS.search(text):
            code = int(status[1][:3])
            repeats = inf if code >= 500 or code in (408, 425, 429) else 0
            reason = f"status {status[1].strip()}"
            if code in (405, 501) and self._arguments[0].startswith("http"):
                reason += ": a web server lists and writes only if it has WebDAV"
                repeats = 0
            return Failure(reason, repeats, code in (429, 503), quotable=False)
        if _NO_RANGES.search(text):
            # Not the whole object instead: each range of a large one would transfer all of it.
            reason = "the server answers a range with the whole object"
            return Failure(reason, inf if self._gives_ranges else 1, quotable=False)
        kind = _KIND.search(text)
        line = text.partition("\n")[0].rpartition(" - ")[2]
        line = re.sub(r"\w+://\S+", lambda url: without_credentials(url[0]), line)
        causes = [kind[1]] if kind else []
        if why := _WHY.search(text):
            causes.append(re.sub(r"\W+", " ", why[0]))
        reason = f"{line} ({', '.join(causes)})" if causes else line
        permanent = isinstance(error, ValueError | TypeError) or type(error).__name__ in _PERMANENT
        slow = bool(kind and kind[1] == "Timeout")
        return Failure(reason, 0 if permanent else inf, slow, quotable=False)


_ENDPOINTS = (
    *("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    *("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
)


class _Files:
    """Local files. Not by obstore: then no process could fork that has read one."""

    def __init__(self, url: str) -> None:
        self._folder = unquote(urlsplit(url).path)

    def get(self, path: str, start: int, stop: int | None) -> Got:
        with open(self._path(path), "rb") as file:
            found = os.fstat(file.fileno())
            file.seek(start)
            data = file.read(-1 if stop is None else stop - start)
        if start + len(data) != (found.st_size if stop is None else stop):
            raise Cut((start, stop), start, len(data), found.st_size)
        return Got(data, found.st_size, _etag(found), len(data) == found.st_size)

    def head(self, path: str) -> Got:
        found = os.stat(self._path(path))
        return Got(b"", found.st_size, _etag(found))

    def list(self, prefix: str) -> Iterator[Entry]:
        for folder, folders, names in os.walk(self._path(prefix)):
            folders.sort()
            for name in sorted(names):
                path = os.path.join(folder, name)
                found = os.stat(path)
                yield Entry(os.path.relpath(path, self._folder), found.st_size, _etag(found))

    def put(self, path: str, data: Any) -> None:
        path = self._path(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_file(path, data)

    def failure(self, error: BaseException) -> Failure:
        return _plainly(error)

    def _path(self, path: str) -> str:
        return os.path.join(self._folder, path.lstrip("/"))


def _etag(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


class _FileSystem:
    """An fsspec file system. It names no ETag with what it reads, so a change is not seen."""

    def __init__(self, fs: Any) -> None:
        # Its loop and its connections may be those of the process that this one was forked from.
        self._fs = pickle.loads(pickle.dumps(fs))

    def get(self, path: str, start: int, stop: int | None) -> Got:
        whole = start == 0 and stop is None
        data: bytes = self._fs.cat_file(path) if whole else self._fs.cat_file(path, start, stop)
        if stop is not None and len(data) != stop - start:
            raise Cut((start, stop), start, len(data), None)
        return Got(data, len(data), None, whole)

    def head(self, path: str) -> Got:
        return Got(b"", self._fs.info(path)["size"], None)

    def list(self, prefix: str) -> Iterator[Entry]:
        for path, info in self._fs.find(prefix, detail=True).items():
            yield Entry(path, info["size"], info.get("ETag") or info.get("etag"))

    def put(self, path: str, data: Any) -> None:
        self._fs.pipe_file(path, data)

    def failure(self, error: BaseException) -> Failure:
        return _plainly(error)


class _Reader:
    """An object with `read(url) -> bytes`. A range of an object reads the whole object."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def get(self, path: str, start: int, stop: int | None) -> Got:
        data: bytes = self._source.read(path)
        if stop is not None and len(data) < stop:
            raise Cut((start, stop), start, len(data) - start, len(data))
        whole = start == 0 and stop is None
        return Got(data if whole else data[start:stop], len(data), None, whole)

    def head(self, path: str) -> Got:
        return Got(b"", len(self._source.read(path)), None)

    def list(self, prefix: str) -> Iterator[Entry]:
        raise UsageError(f"{type(self._source).__name__} has no way to list objects")

    def put(self, path: str, data: Any) -> None:
        raise UsageError(f"{type(self._source).__name__} has no way to write objects")

    def failure(self, error: BaseException) -> Failure:
        return _plainly(error)


def _plainly(error: BaseException) -> Failure:
    """Tell what an error of a library or of users' code means: those of the system may pass."""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, FileNotFoundError):
        return Failure(reason, repeats=0, missing=True)
    if isinstance(error, Cut):
        return Failure(str(error), 0 if error.short else inf)
    never = PermissionError, IsADirectoryError, NotADirectoryError
    again = isinstance(error, OSError | EOFError) and not isinstance(error, never)
    return Failure(reason, inf if again else 0, isinstance(error, TimeoutError))
