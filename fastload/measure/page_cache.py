"""The page cache: set it before a measurement, and measure how much of a file is in it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import numpy as np

from fastload.measure.options import CacheState

_READ_BYTES = 1 << 20


def prepare_cache(files: Sequence[str], state: CacheState) -> None:
    """Read the files into the page cache ("warm"), or ask the kernel to drop them from it ("cold").

    Raise OSError if a file cannot be read.
    """
    for path in files:
        with open(path, "rb", buffering=0) as file:
            if state == "warm":
                while file.read(_READ_BYTES):
                    pass
            else:
                os.fsync(file)  # Only pages that are on the disk can be dropped.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(files: Sequence[str]) -> float | None:
    """Return the share (0 to 1) of the files' pages in the page cache, by mincore(2), or None if unknown."""
    libc = ctypes.CDLL(None)
    pages = resident = 0
    for path in files:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                continue
            mapping = np.frombuffer(
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8
            )
        present = np.zeros(-(-mapping.size // mmap.PAGESIZE), dtype=np.uint8)
        address, size = ctypes.c_void_p(mapping.ctypes.data), ctypes.c_size_t(mapping.size)
        if libc.mincore(address, size, ctypes.c_void_p(present.ctypes.data)) != 0:
            return None
        pages += present.size
        resident += int(np.count_nonzero(present & 1))
    return resident / pages if pages else None
