"""Regular files opened once more, at the same position, so that each worker reads through its own file.

Workers that share an open file share its position: while one seeks, another reads. Duplicating the descriptor does not
help, because the position belongs to the open file description. A thread gets a new file object by `reopened`. A forked
process gets new descriptions for all its files by `take_positions`, whichever library holds them.
"""

from __future__ import annotations

import fcntl
import gc
import io
import os
import stat
import weakref
from contextlib import suppress
from typing import Any


class CannotReopen(Exception):
    """A file cannot be opened once more. The message is the reason, as one clause."""


def reopened(file: Any) -> Any:
    """Return a new file object over the same regular file, of the same kind and at the same position.

    The two share no position and no buffer, and `file` does not change. A closed file is returned as it is.
    The new file closes silently when it is dropped.

    Raises:
        CannotReopen: `file` is not a regular file that is open for reading only, or it cannot tell its position.
    """
    try:
        if file.closed:
            return file
        new = _anew(file)
        position = file.tell()  # of a text file, this includes the state of its decoder
        if position:
            new.seek(position)
    except (OSError, ValueError, AttributeError) as error:
        raise CannotReopen(str(error)) from error
    return new


def take_positions() -> list[str]:
    """Give this forked process its own position in each regular file that it inherited. Return those that it shares.

    Each descriptor keeps its number, position and flags, so Python and libraries in C go on with it. What is only
    written stays shared, and so do standard output and error: the processes' lines follow one another there. A file
    that is read and written and stands at its end may be a log. From now on it is written at its end only.
    """
    shared = list[str]()
    try:
        descriptors = [*map(int, os.listdir(_DESCRIPTORS))]
    except OSError as error:  # /proc is not mounted, or the program has privileges of its own
        return [f"{_DESCRIPTORS} ({error.strerror})"]
    for descriptor in descriptors:
        link = f"{_DESCRIPTORS}/{descriptor}"
        try:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            status = os.fstat(descriptor)
            position = os.lseek(descriptor, 0, os.SEEK_CUR)
        except OSError:  # it has no position, or is the directory that was listed
            continue
        if not stat.S_ISREG(status.st_mode) or flags & (os.O_PATH | os.O_WRONLY):
            continue
        if flags & os.O_RDWR and position >= status.st_size:
            if not status.st_size:
                continue  # there is nothing to read, and a database that is written by offsets must not append
            flags |= os.O_APPEND
        try:
            new = os.open(link, flags & _KEPT)
        except OSError as error:
            shared.append(f"{os.readlink(link)} ({error.strerror})")
            continue
        with suppress(OSError):  # a file of /proc about a thread that this fork does not have
            os.lseek(new, position, os.SEEK_SET)
            os.dup2(new, descriptor, os.get_inheritable(descriptor))
        os.close(new)
    return shared


_DESCRIPTORS = "/proc/self/fd"

_KEPT = os.O_RDWR | os.O_APPEND | os.O_DIRECT | os.O_NOATIME | os.O_NONBLOCK | os.O_SYNC
"""The flags of a descriptor that a new one gets. O_TMPFILE would create a file."""


def is_stream(x: Any) -> bool:
    """Return whether `x` reads a pipe or socket, or waits for an event. Forks take turns there."""
    if not hasattr(type(x), "fileno"):
        return False
    try:
        kind = stat.S_IFMT(os.fstat(x.fileno()).st_mode)  # 0 of an event, as ZeroMQ's sockets have
        read = not issubclass(type(x), io.IOBase) or x.readable()
        return read and kind in (0, stat.S_IFIFO, stat.S_IFSOCK)
    except Exception:  # it is closed, or has no descriptor: libraries raise errors of their own
        return False


def _anew(file: Any) -> Any:
    """Return a new file object like `file`, with new objects below it. Its position is undefined."""
    kind = type(file)
    new: Any
    if kind is io.FileIO:
        return _raw_anew(file)
    if kind is io.BufferedReader:
        new = io.BufferedReader(_anew(file.raw))
    elif kind is io.TextIOWrapper:
        new = io.TextIOWrapper(_anew(file.buffer), file.encoding, file.errors, _newline(file))
    else:
        raise CannotReopen(f"a {kind.__qualname__} is not a plain file that is open for reading")
    new.__dict__.update(file.__dict__)  # `open` sets `mode` there
    return new


def _raw_anew(file: io.FileIO) -> io.FileIO:
    """Return a new FileIO over the same file, at its start."""
    if file.writable():
        raise CannotReopen("it is open for writing")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise CannotReopen("it is not a regular file")
    descriptor = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY)  # the file may have no name
    # A dropped FileIO that owns its descriptor warns. The worker's copy has no code that could close it.
    new = io.FileIO(descriptor, closefd=False)
    weakref.finalize(new, os.close, descriptor)
    if not isinstance(file.name, int):
        new.name = file.name
    return new


def _newline(file: io.TextIOWrapper) -> str | None:
    """Return the `newline` that a text file was opened with.

    It has no getter, but the garbage collector shows what the object holds: its encoding, a decoder, `newline` if it
    is not None, characters that are decoded but not yet read, and `errors`. `tests/isolation/test_files.py` checks it.
    """

    def held() -> list[str]:
        strings = [value for value in gc.get_referents(file) if isinstance(value, str)]
        _encoding, *between, _errors = strings
        return between

    if not any(isinstance(value, io.IncrementalNewlineDecoder) for value in gc.get_referents(file)):
        return held()[0]
    # "" is either `newline`, or the empty buffer of unread characters. A seek removes the buffer.
    if held() == [""]:
        file.seek(file.tell())
    return "" if held()[:1] == [""] else None
