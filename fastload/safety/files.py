"""Regular files opened once more, at the same position, so that each worker reads through its own file.

Workers that share an open file share its position: while one seeks, another reads. Duplicating the descriptor does not
help, because the position belongs to the open file description.
"""

from __future__ import annotations

import gc
import io
import os
import stat
import weakref
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
    is not None, characters that are decoded but not yet read, and `errors`. `tests/safety/test_files.py` checks it.
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
