"""Regular files opened once more, at the same position, so that each worker reads through its own file.

Workers that share an open file share its position: while one seeks, another reads. Duplicating the descriptor does not
help, because the position belongs to the open file description. A thread gets a new file object by `reopened`. A forked
process gets new descriptions for all its files by `take_positions`, whichever library holds them.
"""

from __future__ import annotations

import bz2
import fcntl
import gc
import gzip
import io
import lzma
import os
import socket
import stat
import weakref
from typing import Any


class CannotReopen(Exception):
    """A file cannot be opened once more. The message is the reason, as one clause."""


def reopened(file: Any) -> Any:
    """Return a new file object over the same regular file, of the same kind and at the same position.

    The two share no position and no buffer, and `file` does not change. A closed file is returned as it is.
    A compressed file is decompressed up to its position, and must begin at the start of its regular file.
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
    written stays shared, and so do the standard streams: the processes' lines follow one another there.
    """
    shared = []
    try:
        descriptors = [*map(int, os.listdir(_DESCRIPTORS))]
    except OSError as error:  # /proc is not mounted, or the program has privileges of its own
        return [f"{_DESCRIPTORS} ({error.strerror})"]
    for descriptor in descriptors:
        link = f"{_DESCRIPTORS}/{descriptor}"
        try:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            position = os.lseek(descriptor, 0, os.SEEK_CUR)
        except OSError:  # it has no position, or is the directory that was listed
            continue
        if not regular or flags & (os.O_PATH | os.O_WRONLY) or descriptor in (1, 2):
            continue
        try:
            new = os.open(link, flags & _KEPT)
        except OSError as error:
            shared.append(f"{os.readlink(link)} ({error.strerror})")
            continue
        os.lseek(new, position, os.SEEK_SET)
        os.dup2(new, descriptor, os.get_inheritable(descriptor))
        os.close(new)
    return shared


_DESCRIPTORS = "/proc/self/fd"

_KEPT = os.O_RDWR | os.O_APPEND | os.O_DIRECT | os.O_NOATIME | os.O_NONBLOCK | os.O_SYNC
"""The flags of a descriptor that a new one gets. O_TMPFILE would create a file."""


def is_stream(x: Any) -> bool:
    """Return whether `x` is a pipe or socket that is open for reading. Forks take turns in reading it."""
    if not issubclass(type(x), io.IOBase | socket.socket):
        return False
    try:
        mode = os.fstat(x.fileno()).st_mode
        read = isinstance(x, socket.socket) or x.readable()
        return read and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))
    except (OSError, ValueError):  # it is closed, or has no descriptor
        return False


def _anew(file: Any) -> Any:
    """Return a new file object like `file`, with new objects below it. Its position is undefined."""
    kind = type(file)
    new: Any
    if kind is io.FileIO:
        return _raw_anew(file)
    if kind in (gzip.GzipFile, bz2.BZ2File, lzma.LZMAFile) and file.readable():
        return _decompressor_anew(file)
    if kind is io.BufferedReader:
        new = io.BufferedReader(_anew(file.raw), _buffer_size(file))
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


def _decompressor_anew(file: Any) -> Any:
    """Return a new decompressor over the same file, at its start."""
    if isinstance(file, gzip.GzipFile):
        return gzip.GzipFile(file.name, "rb", fileobj=_anew(file.fileobj))
    options = file._buffer.raw._decomp_args  # the format and the filters of a LZMAFile
    return file.__class__(_anew(file._fp), **options)


def _buffer_size(file: io.BufferedReader) -> int:
    """Return the size of a buffer. It has no getter, but is part of the size of the object."""
    size = file.__sizeof__() - io.BufferedReader.__basicsize__
    return size if size > 0 else io.DEFAULT_BUFFER_SIZE


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
