"""What tests of several files read, or look at; fakes that users have a use for are in `fastload.testing`."""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset[int]):
    """Its own indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class OwnIterator(IterableDataset[int]):
    """Its own iterator, never rewound: what was read is gone, for this copy."""

    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.at - 1


def fastload_threads() -> list[str]:
    """The names of fastload's threads that are alive, sorted."""
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("fastload-"))


@contextmanager
def limited_files(nbytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond so many bytes: writing fails as on a full disk, but with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def hasty() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
