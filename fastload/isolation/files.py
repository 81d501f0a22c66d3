"""Regular files opened once more, at the same position, so that each worker reads through its own file.

Threads that share a file object share its position: while one seeks, another reads. Duplicating the descriptor does
not help, because the position belongs to the open file description. `reopened` opens a new one.
"""

from __future__ import annotations

import bz2
import gc
import gzip
import io
import lzma
import os
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
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise CannotReopen("it is not a regular file")
    # Linux opens a descriptor's link even if the file was deleted or renamed. Elsewhere there is only the name.
    for path in (f"/proc/self/fd/{file.fileno()}", file.name):
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except (OSError, TypeError):  # a name can be a number
            continue
        # A dropped FileIO that owns its descriptor warns. The worker's copy has no code that could close it.
        new = io.FileIO(descriptor, closefd=False)
        weakref.finalize(new, os.close, descriptor)
        if os.path.samestat(os.fstat(descriptor), found):
            if not isinstance(file.name, int):
                new.name = file.name
            return new
    raise CannotReopen("its file cannot be found or opened any more")


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
