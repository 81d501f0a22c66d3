"""Paths that are names of local files or URLs of objects, and one store for all URLs of a bucket or host."""

from __future__ import annotations

import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, Self, TypeGuard, TypeVar, cast

from fastload.errors import RemoteError, UsageError

if TYPE_CHECKING:
    from fastload.remote.store import Store

T = TypeVar("T")

SCHEMES = ("s3://", "gs://", "az://", "https://", "http://", "file://")


class StoredPath(str):
    """A path or URL of an object, with the store that reads it. The functions below take it as they take a URL."""

    store: Store

    def __new__(cls, path: str, store: Store) -> Self:
        """Return the path as a string that knows its store."""
        made = super().__new__(cls, path)
        made.store = store
        return made

    def __getnewargs__(self) -> tuple[str, Store]:  # type: ignore[override]
        return str(self), self.store


def in_store(path: str | os.PathLike[str], store: Store | None) -> str:
    """Return a path that is read by a store, or as it is if that is None."""
    return os.fspath(path) if store is None else StoredPath(os.fspath(path), store)


def store_from(given: Any) -> Store | None:
    """Return what an argument `store=` means: None, a `Store`, or what `open_store` takes."""
    from fastload.remote.store import Store, open_store

    return given if given is None or isinstance(given, Store) else open_store(given)


def is_url(path: Any) -> TypeGuard[str]:
    """Return whether a path is one of an object, not the name of a local file."""
    return isinstance(path, StoredPath) or (isinstance(path, str) and path.startswith(SCHEMES))


def open_binary(path: Any, until: int | None = None) -> BinaryIO:
    """Open a local file as `open(path, "rb")` does, or an object. What is read ahead begins before `until`."""
    return store_of(path).open(path, until) if is_url(path) else open(path, "rb")


def mappable(path: Any) -> AbstractContextManager[Any]:
    """Return a context of what pyarrow opens: a local path as it is, which can be mapped, or an open object."""
    return open_binary(path) if is_url(path) else nullcontext(path)


def size_of(path: Any) -> int:
    """Return the size of a local file or of an object in bytes."""
    return store_of(path).size(path) if is_url(path) else os.path.getsize(path)


def read_whole(url: str) -> bytes:
    """Return all bytes of an object."""
    return store_of(url).read(url)


def write_whole(url: str, data: bytes | memoryview) -> None:
    """Write an object, which appears whole."""
    store_of(url).write(url, data)


def is_there(url: str) -> bool:
    """Return whether there is an object at a URL."""
    try:
        store_of(url).size(url)
    except FileNotFoundError:
        return False
    return True


def list_below(url: str) -> list[str]:
    """Return the names of all objects below a URL, as they follow it."""
    store, folder = store_of(url), url and f"{url.rstrip('/')}/"
    # fsspec's names have no scheme, and begin with a slash or not.
    prefix = folder.removeprefix(store.url).rpartition("://")[2].lstrip("/")
    names = [entry.path.lstrip("/") for entry in store.list(folder)]
    if wrong := next((name for name in names if not name.startswith(prefix)), None):
        raise UsageError(f"{folder}: the store lists {wrong} below it. Name the folder as it does")
    return [name.removeprefix(prefix) for name in names]


def store_of(url: str) -> Store:
    """Return the store of a path, or this process's store of the bucket or host of a URL."""
    return url.store if isinstance(url, StoredPath) else _store(root_of(url))


def announce(
    requests: Iterable[Any],
    roots: Iterable[str],
    *,
    ends: bool,
    owner: object,
    store_at: Callable[[str], Store] = store_of,
) -> None:
    """Begin what a dataset reads next, each by the store of its bucket or host. See `Store.will_read`.

    Args:
        requests: URLs, or (URL, start, stop). Those below no root are left out.
        roots: the URLs of the buckets and hosts.
        ends: whether the dataset reads nothing more, so that what it announced is cancelled.
        owner: tells the dataset from others on the same store.
        store_at: returns the store of a root.
    """
    named = [(of if isinstance(of, str) else of[0], of) for of in requests]
    for root in roots:
        begun = [of for url, of in named if url.startswith(root)]
        if begun or ends:  # an empty list cancels
            store_at(root).will_read(begun, owner=owner)


def root_of(url: str) -> str:
    """Return the URL of the bucket or host of a URL."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}/"


@cache  # a store opens its client in each process that reads, so a forked child may have its parent's
def _store(root: str) -> Store:
    from fastload.remote.store import open_store

    return open_store(root)


def apart(function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, which reads or writes at URLs, so that this process can fork workers later.

    obstore's threads do not survive a fork. So a forked child calls the function, unless they run here already.
    """
    if _obstore_runs() or any(isinstance(x, StoredPath) and not x.store.url for x in args):
        return function(*args)
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        # Python warns of any thread. The child runs this function alone.
        warnings.filterwarnings("ignore", r"This process \(pid|Using fork\(\) can|os\.fork\(\) was")
        child = os.fork()
    if not child:
        _answer(theirs, function, args)
    os.close(theirs)
    try:
        with open(ours, "rb") as pipe:
            answer = pipe.read()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if not answer:
        code = os.waitstatus_to_exitcode(status)
        raise RemoteError(
            f"the process that reads or writes {', '.join(map(str, args))} ended with exit code {code}"
        )
    result, error = pickle.loads(answer)
    if error is not None:
        raise error
    return cast(T, result)


def _obstore_runs() -> bool:
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:  # it may end
            if file.read().startswith("tokio"):
                return True
    return False


def _answer(pipe: int, function: Callable[..., Any], args: Any) -> NoReturn:
    try:
        try:
            answer = pickle.dumps((function(*args), None))
        except Exception as error:
            answer = pickle.dumps((None, error))
        with open(pipe, "wb") as file:
            file.write(answer)
    finally:
        os._exit(0)
