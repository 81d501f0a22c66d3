"""The room that is left where a set is written."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from fastload.errors import StoreFullError


def free_bytes(path: str) -> int:
    """Return how many bytes are free where `path`, a file or a folder, lies or will lie."""
    return shutil.disk_usage(path if os.path.isdir(path) else os.path.dirname(path)).free


def expect_room(path: str, needed: int) -> None:
    """Raise StoreFullError before a byte is written, so that a full memory is not filled to its end first."""
    free = free_bytes(path)
    if needed > free:
        raise StoreFullError(path, needed=needed, free=free)


@contextmanager
def room_for(path: str, needed: int) -> Iterator[None]:
    """Raise StoreFullError if the block, which writes `needed` bytes to `path`, finds no room."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or isinstance(error, StoreFullError):
            raise
        raise StoreFullError(path, needed=needed, free=free_bytes(path)) from error
