"""A root of sets: a folder with one folder per set, in shared memory or on a disk.

    ROOT/NAME/            a sealed set
    ROOT/.unsealed/NAME-5f3a9c01/       a set that a process writes
    ROOT/.unsealed/NAME-5f3a9c01.lock   the lock that this process holds
    ROOT/.unsealed/NAME/                a set that is packed, prepared or copied

A set gets its name by a rename, which fails if the name is taken. So a set is published whole, and only once.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from fastload._kit.disk import lock, locked_path, open_file, own_folder
from fastload.datasets.manifest import INDEX, Index, dump_index, read_index
from fastload.datasets.packed import unfinished
from fastload.datasets.packed.unfinished import expect_free, lock_path, unsealed_folder
from fastload.errors import PackedDataError, UsageError, in_one_line
from fastload.store.room import room_for

SHARED_MEMORY = "/dev/shm"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,127}")


def default_root() -> str:
    """Return $FASTLOAD_STORE, or else this user's folder in shared memory, or in the temporary folder."""
    if root := os.environ.get("FASTLOAD_STORE"):
        return os.path.abspath(root)
    folder = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else tempfile.gettempdir()
    return os.path.join(folder, f"fastload-{os.getuid()}")


def open_root(root: str | os.PathLike[str] | None) -> str:
    """Return the path of a root. Make it if it does not exist, with mode 0700 if it is the default one.

    Raise PermissionError if the default root belongs to another user, because that user could replace its sets.
    """
    path = default_root() if root is None else os.path.abspath(root)
    own = root is None and "FASTLOAD_STORE" not in os.environ
    with suppress(FileExistsError):
        os.makedirs(path, mode=0o700 if own else 0o777)
    if own:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(
                1, "belongs to another user. Name another folder with root=", path
            )
        os.chmod(path, 0o700)
    return path


def existing_root(root: str | os.PathLike[str] | None) -> str:
    """Return the path of a root, as `open_root`. Do not make it: it need not exist."""
    path = default_root() if root is None else os.path.abspath(root)
    return open_root(root) if os.path.isdir(path) else path


def locate(
    name: str | os.PathLike[str], root: str | os.PathLike[str] | None, *, make: bool = True
) -> tuple[str, str]:
    """Return the root and the name of a set, whose `name` may be a path: "sets/mnist" lies in the root "sets".

    With `make`, create the root if it does not exist.
    Raises UsageError if a set cannot have the name, or if both a path and a root are given.
    """
    path = os.fspath(name)
    if isinstance(name, str) and os.sep not in path:
        return open_root(root) if make else existing_root(root), check_name(path)
    if root is not None:
        raise UsageError(
            f"name={path!r} is a path, and root={os.fspath(root)!r} is given as well. Give either a path or root="
        )
    folder, name = os.path.split(os.path.abspath(path))
    return open_root(folder) if make else folder, check_name(name)


def in_memory(path: str) -> bool:
    """Return True if a root lies in shared memory, where nothing outlasts a loss of power."""
    return f"{os.path.realpath(path)}/".startswith(f"{SHARED_MEMORY}/")


def this_node() -> str:
    """Return the name of this node, which parts record: $FASTLOAD_NODE, or else the host name."""
    return os.environ.get("FASTLOAD_NODE") or socket.gethostname()


def check_name(name: str) -> str:
    """Return `name`. Raises UsageError if a set cannot have it."""
    if not _NAME.fullmatch(name) or name.endswith(".lock"):
        raise UsageError(
            f"the name of a set must have 1 to 128 letters, digits and _.+=-, got {name!r}. It must not begin with "
            "one of .+=- or end with .lock"
        )
    return name


@contextmanager
def unsealed(root: str, name: str, *, free: bool = True) -> Iterator[str]:
    """Yield a new folder for a set. Delete it after the block, unless the block has sealed it.

    Raises FileExistsError if the name is taken, unless `free` is False.
    """
    if free:
        expect_free(os.path.join(root, check_name(name)))
    folder = unsealed_path(root, name)
    # Locked before it exists, so that `collect` never deletes it.
    with locked_path(lock_path(folder), needed=False):
        try:
            os.mkdir(folder)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.unlink(lock_path(folder))


def seal(folder: str, root: str, name: str, index: Index) -> str:
    """Write the index and give the set its name; return its path.

    Raises FileExistsError if the name is taken, StoreFullError.
    """
    path = os.path.join(root, name)
    with room_for(os.path.join(folder, INDEX), len(dump_index(index))):
        unfinished.seal(folder, path, index, durable=not in_memory(root))
    return path


def unsealed_path(root: str, name: str, token: str = "") -> str:
    """Return the path of the folder in which a set is written, a new one unless its `token` is given."""
    return os.path.join(unsealed_folder(root), f"{name}-{token or secrets.token_hex(4)}")


# ---- existing sets ----


@dataclass(frozen=True)
class StoredSet:
    """A sealed set of a root. `bytes` are those of the parts that lie here."""

    name: str
    path: str
    index: Index
    bytes: int


Say = Callable[[str], object]


def _silent(_: str) -> None: ...


@contextmanager
def passing_over(say: Say) -> Iterator[None]:
    """Pass over an entry of a root that the block cannot read, and `say` it. One that vanished is no fault."""
    try:
        yield
    except FileNotFoundError:
        pass
    except (OSError, PackedDataError) as error:
        say(f"passed over: {in_one_line(error)}")


def index_at(path: str) -> Index | None:
    """Return the index of the set at `path`, or None if there is no set."""
    try:
        return read_index(path)
    except FileNotFoundError:
        return None


def sets(root: str, *, say: Say = _silent) -> Iterator[StoredSet]:
    """Yield the sealed sets of a root by name. Pass over what cannot be read."""
    for name in _folders(root, say):
        path = os.path.join(root, name)
        if not name.startswith("."):
            with passing_over(say):
                yield StoredSet(name, path, read_index(path), size_of(path))


def size_of(path: str) -> int:
    """Return the bytes of all files in a folder. Files that cannot be found or read do not count."""
    size = 0
    with suppress(OSError):
        for entry in os.scandir(path):
            with suppress(OSError):
                size += entry.stat().st_size if entry.is_file() else 0
    return size


def find(root: str, name: str) -> str:
    """Return the path of a set. Raises FileNotFoundError with the existing names."""
    path = os.path.join(root, check_name(name))
    if not os.path.exists(os.path.join(path, INDEX)):
        raise FileNotFoundError(2, no_set(root, name), root)
    return path


def no_set(root: str, name: str) -> str:
    """Return the message that a set does not exist, with the existing names."""
    known = ", ".join(found.name for found in sets(root))
    there = f"The sets here are {known}" if known else "There are no sets here"
    return f"the set {name!r} does not exist. {there}"


def remove(root: str, name: str) -> None:
    """Remove a set. Processes that have opened it keep the parts that they have mapped."""
    find(root, name)
    _discard(root, name)


def _discard(root: str, name: str) -> None:
    """Delete a folder of a root."""
    path = os.path.join(root, name)
    if os.path.islink(path):  # the set itself lies in another root
        os.unlink(path)
        return
    hidden = unsealed_path(root, name)
    os.makedirs(os.path.dirname(hidden), exist_ok=True)
    os.rename(path, hidden)  # gone at once; `gc` deletes it if this process is killed now
    while os.path.exists(hidden):
        with suppress(FileNotFoundError):  # `gc` deletes it at the same time
            shutil.rmtree(hidden)


# ---- leftovers ----


def collect(root: str, *, say: Say = _silent) -> list[tuple[str, int]]:
    """Delete leftovers, and return their names and sizes in bytes.

    Leftovers are what writers that ended, and interrupted copies, have left. What cannot be read is passed over, and
    `say` is called with a sentence about it.
    """
    removed = []
    with passing_over(say):
        unsealed = unsealed_folder(root)
        for name in _folders(unsealed, say):
            with passing_over(say):
                path = own_folder(unsealed, name)
                with _left(lock_path(path)) as is_left:
                    if is_left and os.path.isdir(path):  # a writer may have just sealed it
                        removed.append((name, size_of(path)))
                        shutil.rmtree(path, ignore_errors=True)
    return removed


def _folders(path: str, say: Say) -> Iterator[str]:
    """Yield the names of the folders in a folder; none if it is not there."""
    try:
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        return
    for name in names:
        with passing_over(say):
            if stat.S_ISDIR(os.stat(os.path.join(path, name)).st_mode):
                yield name


@contextmanager
def _left(path: str) -> Iterator[bool]:
    """Yield True if no writer holds this lock. It stays free until the block ends, and is deleted then."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open_file(path))
        except FileNotFoundError:
            yield True
            return
        try:
            lock(file, wait=False, needed=False)
        except BlockingIOError:
            yield False
            return
        yield True
        with suppress(FileNotFoundError):
            os.unlink(path)
