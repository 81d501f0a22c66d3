"""Files that exist completely or not at all, even after a power loss, and file locks between processes.

Others may write in the folder of a set, too. So no link there is followed to write, and only regular files are read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, BinaryIO

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""The errors of flock(2) on a file system without locks, such as Lustre mounted without them."""


@contextmanager
def replace_file(
    path: str | os.PathLike[str],
    *,
    partial: str | os.PathLike[str] | None = None,
    durable: bool = True,
) -> Iterator[BinaryIO]:
    """Yield a temporary file. After the block it atomically replaces the file at `path`.

    If the block or the writing fails, the temporary file is deleted, and the old file stays.

    Args:
        partial: path of the temporary file, on the file system of `path`. What is there is deleted. By default it is
            a new hidden file beside `path`. An OSError that names the hidden file, or none, then names `path`.
        durable: sync the file before it is renamed, and its folder afterwards, so that both survive a power loss.
    """
    path = os.fspath(path)
    folder, name = os.path.split(path)
    temporary = partial or os.path.join(folder, f".{name}.{secrets.token_hex(4)}")
    try:
        with open(create(temporary), "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            sync_folder(folder or ".")
    except BaseException as error:
        with suppress(OSError):  # the first error is the one to raise
            os.unlink(temporary)
        if not partial and isinstance(error, OSError) and error.filename in (None, temporary):
            error.filename = path
        raise


def write_file(path: str | os.PathLike[str], content: Any, **options: Any) -> None:
    """Replace a file by one with `content`, a buffer of bytes. If that fails, the old file stands.

    Options are those of `replace_file`.
    """
    with replace_file(path, **options) as file:
        write_all(file.fileno(), os.fspath(options.get("partial") or path), content)


def create(path: str | os.PathLike[str]) -> int:
    """Create a file to write, and return its descriptor. What a killed writer left at `path`, or a link, is deleted."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def own_folder(path: str, name: str) -> str:
    """Return the path of a folder in `path`, in which files are made or deleted. Raise OSError if it is a link."""
    folder = os.path.join(path, name)
    if os.path.islink(folder):
        raise OSError(errno.ELOOP, "is a link, and what it leads to is not touched", folder)
    return folder


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to read it. Raise OSError for anything else, such as a pipe, which waits for a writer."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is not a regular file", path)
    return file


def identity(file: int | str | os.PathLike[str]) -> tuple[int, ...]:
    """Return what changes if a file, or an open one, is replaced or written."""
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Descriptor:
    """An open file, by its descriptor, which is closed with the last reference to this.

    So no thread uses the number when another file has that.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "fd"):  # a subclass may fail before it has one
            close(self.fd)  # not `os.close`: `os` may be empty at interpreter exit


def preadv(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset` of a file, with several calls if needed. Return the number of bytes read."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Sync a folder, so that the names in it survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, name: str, content: Any) -> int:
    """Write all of `content`, a buffer of bytes, and return its length. An OSError, as on a full disk, names `name`."""
    done = 0
    with memoryview(content) as whole:
        while done < len(whole):
            try:
                done += os.write(descriptor, whole[done:])
            except OSError as error:
                error.filename = name
                raise
    return done


def lock(
    file: int | IO[Any], *, wait: bool | Callable[[], object] = True, needed: bool = True
) -> bool:
    """Take the lock of an open file; return True. The kernel frees it if the file is closed or the process ends.

    Args:
        wait: what to do while another process has the lock. True: wait. A function: call it, then wait.
            False: raise BlockingIOError.
        needed: what to do on a file system without locks. True: raise OSError. False: return False.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise
        if callable(wait):
            wait()
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if needed or error.errno not in _NO_LOCKS:
            raise
        return False
    return True


@contextmanager
def locked(
    file: int | IO[Any], *, wait: bool | Callable[[], object] = True, needed: bool = True
) -> Iterator[None]:
    """Hold the lock of an open file in the block, with the arguments of `lock`."""
    held = lock(file, wait=wait, needed=needed)
    try:
        yield
    finally:
        if held:
            fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def locked_path(
    path: str | os.PathLike[str], *, wait: bool | Callable[[], object] = True, needed: bool = True
) -> Iterator[None]:
    """Hold the lock of the file at `path` in the block, with the arguments of `lock`. Create the file if needed.

    The process that holds the lock may delete the file. Processes that wait then lock the next file at `path`.
    """
    while True:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "ab", opener=_no_link) as file, locked(file, wait=wait, needed=needed):
            if _is_at(file, path):
                with _not_inherited(file.fileno()):
                    yield
                return


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


_own: set[int] = set()  # descriptors of files whose locks only this process may hold


@contextmanager
def _not_inherited(descriptor: int) -> Iterator[None]:
    """Keep forked children from holding a file's lock in the block: they may outlive this process."""
    _own.add(descriptor)
    try:
        yield
    finally:
        _own.discard(descriptor)


def _forget_locks() -> None:
    """Release the parent's locks in a forked child. The descriptors stay open: their file objects close them."""
    while _own:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), _own.pop(), inheritable=False)


os.register_at_fork(after_in_child=_forget_locks)


def _is_at(file: IO[Any], path: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
