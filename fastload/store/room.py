"""The free space for a set."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from fastload.errors import StoreFullError


def free_bytes(path: str) -> int:
    """Return the number of free bytes on the file system of `path`, a file or a folder that need not exist yet."""
    return shutil.disk_usage(path if os.path.isdir(path) else os.path.dirname(path)).free


def expect_room(path: str, needed: int) -> None:
    """Raise StoreFullError if the bytes do not fit, before one is written, so that memory does not fill up first."""
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
