"""A root of sets: a folder with one folder per set, in shared memory or on a disk.

    ROOT/NAME/            a sealed set
    ROOT/.unsealed/NAME-5f3a9c01/       a set that a process writes
    ROOT/.unsealed/NAME-5f3a9c01.lock   the lock that this process holds

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
from pathlib import Path

from fastload._kit.disk import lock, locked_path, open_file, own_folder, sync_folder, write_file
from fastload.datasets.manifest import INDEX, STAGING, Index, dump_index, read_index
from fastload.errors import PackedDataError, in_one_line
from fastload.store.room import room_for

SHARED_MEMORY = "/dev/shm"
_UNSEALED = ".unsealed"
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
    Raises ValueError if a set cannot have the name, or if both a path and a root are given.
    """
    path = os.fspath(name)
    if isinstance(name, str) and os.sep not in path:
        return open_root(root) if make else existing_root(root), check_name(path)
    if root is not None:
        raise ValueError(
            f"name={path!r} is a path, and root={os.fspath(root)!r} is given as well. Give either a path or root="
        )
    folder, name = os.path.split(os.path.abspath(path))
    return open_root(folder) if make else folder, check_name(name)


def in_memory(path: str) -> bool:
    """Return True if a root lies in shared memory, where nothing outlasts a loss of power."""
    return os.path.realpath(path).startswith(SHARED_MEMORY + "/")


def this_node() -> str:
    """Return the name of this node, which parts record: $FASTLOAD_NODE, or else the host name."""
    return os.environ.get("FASTLOAD_NODE") or socket.gethostname()


def check_name(name: str) -> str:
    """Return `name`. Raises ValueError if a set cannot have it."""
    if not _NAME.fullmatch(name) or name.endswith(".lock"):
        raise ValueError(
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
        expect_free(root, name)
    folder = unsealed_path(root, name)
    # Locked before it exists, so that `collect` never deletes it.
    with locked_path(lock_path(folder), needed=False):
        try:
            os.mkdir(folder)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.unlink(lock_path(folder))


@contextmanager
def preparing(root: str, name: str, *, wait: Callable[[], object]) -> Iterator[str]:
    """Yield the folder in which `prepare` makes a set, to one process at a time. It stays, unless the block deletes it.

    Args:
        wait: called before waiting for another process.
    """
    folder = os.path.join(own_folder(root, _UNSEALED), check_name(name))
    with locked_path(lock_path(folder), wait=wait, needed=False):
        os.makedirs(folder, exist_ok=True)
        yield folder


def expect_free(root: str, name: str) -> None:
    """Raise FileExistsError if there is a set of this name."""
    path = os.path.join(root, check_name(name))
    if os.path.lexists(path):
        raise FileExistsError(
            17,
            "a set of this name exists. Remove it (fastload set rm), or choose another name",
            path,
        )


def seal(folder: str, root: str, name: str, index: Index) -> str:
    """Write the index and give the set its name; return its path.

    Raises FileExistsError if the name is taken, StoreFullError.
    """
    durable, encoded = not in_memory(root), dump_index(index)
    partial = os.path.join(folder, INDEX)
    with room_for(partial, len(encoded)):
        write_file(partial, encoded, durable=durable)
    path = os.path.join(root, name)
    try:
        os.rename(folder, path)  # fails if `path` is a folder with files
    except OSError:
        expect_free(root, name)
        raise
    if durable:
        sync_folder(root)
    return path


def unsealed_path(root: str, name: str, token: str = "") -> str:
    """Return the path of the folder in which a set is written, a new one unless its `token` is given."""
    return os.path.join(own_folder(root, _UNSEALED), f"{name}-{token or secrets.token_hex(4)}")


def lock_path(folder: str) -> str:
    """Return the path of the lock file of such a folder."""
    return f"{folder}.lock"


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
        known = ", ".join(found.name for found in sets(root)) or "none"
        raise FileNotFoundError(
            2, f"the set {name!r} does not exist. The sets here are {known}", root
        )
    return path


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


# ---- owners ----


def owner() -> dict[str, object]:
    """Return what identifies this process: node, boot, PID namespace, PID and start time."""
    pid = os.getpid()
    where = {"node": socket.gethostname(), "boot": _boot(), "space": _space()}
    return {**where, "pid": pid, "began": _began(pid)}


def is_alive(about: dict[str, object]) -> bool:
    """Return True if the owner of a set may still live: False only if it certainly ended, on this node."""
    if about.get("node") != socket.gethostname() or about.get("space") != _space():
        return True  # a container of this node has its own PIDs
    pid = about.get("pid")
    return (
        about.get("boot") == _boot() and isinstance(pid, int) and about.get("began") == _began(pid)
    )


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _space() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _began(pid: int) -> str:
    """Return the start time of a process, in clock ticks since the boot, or "" if it does not exist."""
    try:
        about = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return about.rpartition(")")[2].split()[19]


def collect(root: str, *, delete: bool = True, say: Say = _silent) -> list[tuple[str, int]]:
    """Delete leftovers, and return their names and sizes in bytes. Without `delete`, only return these.

    Leftovers are files of writers that ended, interrupted copies by `fastload set stage`, and sets whose owner ended.
    What cannot be read is passed over, and `say` is called with a sentence about it.
    """
    removed = []
    with passing_over(say):
        unsealed = own_folder(root, _UNSEALED)
        for name in _folders(unsealed, say):
            with passing_over(say):
                path = own_folder(unsealed, name)
                with _left(lock_path(path), delete) as is_left:
                    if is_left and os.path.isdir(path):  # a writer may have just sealed it
                        removed.append((name, size_of(path)))
                        if delete:
                            shutil.rmtree(path, ignore_errors=True)
    for name in _folders(root):
        path = os.path.join(root, name)
        if not _is_incomplete(path):
            continue
        with passing_over(say):
            work = own_folder(path, STAGING)
            with _left(os.path.join(work, "lock"), delete) as is_left:
                if is_left and _is_incomplete(path):  # a writer may have just completed it
                    size = size_of(path) + size_of(work)
                    if delete:
                        _discard(root, name)
                    removed.append((name, size))
    for found in list(sets(root, say=say)):
        about = found.index.made.get("owner")
        if isinstance(about, dict) and not is_alive(about):
            with passing_over(say):  # another `gc` may be first
                if delete:
                    remove(root, found.name)
                removed.append((found.name, found.bytes))
    return removed


def _is_incomplete(path: str) -> bool:
    """Return True if the folder has an incomplete copy by `fastload set stage`."""
    note, index = os.path.join(path, STAGING, INDEX), os.path.join(path, INDEX)
    return os.path.exists(note) and not os.path.exists(index)


def _folders(path: str, say: Say = _silent) -> Iterator[str]:
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
def _left(path: str, delete: bool) -> Iterator[bool]:
    """Yield True if no writer holds this lock. It stays free until the block ends. With `delete`, delete it then."""
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
        if delete:
            with suppress(FileNotFoundError):
                os.unlink(path)
