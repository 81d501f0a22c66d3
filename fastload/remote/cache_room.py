"""The folders of caches: room is made in them, and temporary ones go with their processes.

The least recently used blocks are deleted first, but none that is being read.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

ENTRY = np.dtype([("crc", "<u4"), ("used", "<u4")])
"""An entry of a table. `used` is the second of the last use. 0: the block isn't there."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_PRIVATE, _OWNER = "fastload-cache-", "owner"


def lock_block(table: int, block: int, kind: int) -> None:
    """Take or give back the lock of a block, for an open table. Raise BlockingIOError if another one holds it."""
    lock = struct.pack("hhqqi0q", kind, os.SEEK_SET, block, 1, 0)
    fcntl.fcntl(table, fcntl.F_OFD_SETLK, lock)


def make_room(folder: str, most: int, needed: int, block_bytes: int) -> int:
    """Return how many bytes are free of `most`. If fewer than needed are, give up blocks, the longest unused first.

    A sixteenth more is freed then. For one process at a time.
    """
    names = sorted(name[:-6] for name in os.listdir(folder) if name.endswith(".table"))
    paths = [os.path.join(folder, name) for name in names]
    taken = [_taken(path) for path in paths]
    free = most - sum(taken)
    if free >= needed:
        return free
    owners, blocks = _by_age(paths, taken, block_bytes)
    goal, at = needed + most // 16, 0
    while free < goal and at < len(blocks):
        count = -(-(goal - free) // block_bytes)
        some, of = blocks[at : at + count], owners[at : at + count]
        at += count
        for number in np.unique(of).tolist():
            free += _give_up(paths[number], some[of == number].tolist(), block_bytes)
    return free


def _taken(path: str) -> int:
    return os.stat(f"{path}.data").st_blocks * 512


def _by_age(
    paths: Sequence[str], taken: Sequence[int], block_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the blocks of all files, the longest unused first: for each the number of its file, and its own."""
    owners, blocks, ages = [], [], []
    for number, path in enumerate(paths):
        with open(f"{path}.table", "rb") as file:
            used = np.frombuffer(file.read(), ENTRY)["used"]
        # A killed process may have left bytes without an entry.
        more = taken[number] > (np.count_nonzero(used) + 1) * block_bytes
        found = np.arange(len(used)) if more else np.flatnonzero(used)
        owners.append(np.full(len(found), number))
        blocks.append(found)
        ages.append(used[found])
    order = np.argsort(np.concatenate(ages), kind="stable")
    return np.concatenate(owners)[order], np.concatenate(blocks)[order]


def _give_up(path: str, blocks: Sequence[int], block_bytes: int) -> int:
    """Delete those of the blocks that no reader holds, and return the bytes that this has freed."""
    before = _taken(path)
    # Its own open table: a lock of another reader in this process counts too.
    with open(f"{path}.data", "r+b") as data, open(f"{path}.table", "r+b") as table:
        for block in blocks:
            try:
                lock_block(table.fileno(), block, fcntl.F_WRLCK)
            except BlockingIOError:
                continue
            os.pwrite(table.fileno(), bytes(ENTRY.itemsize), block * ENTRY.itemsize)
            _punch(data.fileno(), block * block_bytes, block_bytes)
            lock_block(table.fileno(), block, fcntl.F_UNLCK)
    return before - _taken(path)


def _punch(fd: int, start: int, length: int) -> None:
    """Give the disk space of a range back to the file system. The range then reads as zeros."""
    libc = ctypes.CDLL(None, use_errno=True)
    mode = _PUNCH_HOLE | _KEEP_SIZE
    if libc.fallocate(fd, mode, ctypes.c_int64(start), ctypes.c_int64(length)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def private_folder() -> tuple[str, int]:
    """Return a new temporary folder, and a descriptor that keeps others from deleting it. Delete those of the dead."""
    top = tempfile.gettempdir()
    for name in os.listdir(top):
        if name.startswith(_PRIVATE):
            with suppress(OSError), open(os.path.join(top, name, _OWNER), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(os.path.join(top, name), ignore_errors=True)
    made = tempfile.mkdtemp(prefix="fastload-making-")
    owner = os.open(os.path.join(made, _OWNER), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(owner, fcntl.LOCK_SH)
    # It has its name only when it has its lock.
    folder = made.replace("fastload-making-", _PRIVATE)
    os.rename(made, folder)
    return folder, owner


def remove(folder: str, owner: int, pid: int) -> None:
    """Delete a temporary folder, if this is the process that has made it."""
    if os.getpid() == pid:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
    os.close(owner)
