"""The shards of a packed set at a URL: blocks of them are fetched into a local cache before they are read."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import cast

import numpy as np
from numpy.typing import NDArray

from fastload.datasets.manifest import Index, Shard
from fastload.datasets.packed.format import Table
from fastload.datasets.packed.shards import AnyFile, Shards
from fastload.errors import PackedDataError
from fastload.remote.backends import without_credentials
from fastload.remote.cache import Cache, CachedObject, Known, Range
from fastload.remote.files import store_of
from fastload.remote.store import Store
from fastload.telemetry import stage


class RemoteShards(Shards):
    """The shards of a set at a URL. See `Shards`."""

    in_parts = False  # what was announced is a whole payload

    def __init__(self, path: str, index: Index, cache: Cache, *, extras: Sequence[str]) -> None:
        super().__init__(path, index, extras=extras)
        self._store, self._cache = store_of(path), cache
        self._name = without_credentials(path)
        if self.most_open < len(index.shards):
            self.most_open //= 2  # each has two files
        self._begin()

    def _begin(self) -> None:
        self._files, self._pid = [None] * self.most_open, os.getpid()
        self._known: dict[int, Known] = {}

    def file(self, number: int) -> AnyFile:
        """Return an open shard. Keep it while it is in use."""
        if self._pid != os.getpid():
            self._begin()  # the locks of a parent's open files are the parent's
        return super().file(number)

    def _open(self, number: int) -> AnyFile:
        size, url = self._index.shards[number].bytes, self.where(number)
        known = self._known.setdefault(number, Known(size))
        return _RemoteFile(self._store, self._cache, url, size, known, number)

    def _read_table(self, shard: Shard, file: AnyFile) -> Table:
        pieces = _columns(shard)
        remote = cast("_RemoteFile", file)
        remote.announce(pieces)
        with remote.held(pieces):
            return super()._read_table(shard, file)

    @contextmanager
    def held(
        self, files: dict[int, AnyFile], records: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> Iterator[bool]:
        """Fetch the payloads of records, and keep them in the files. Yield False if they must be read one by one."""
        with ExitStack() as stack:
            try:
                with stage("read"):
                    # All together: else each shard would wait for the one before.
                    found = self._announce(files, records, numbers)
                    held = [stack.enter_context(file.held(ranges)) for file, ranges in found]
            except OSError:
                held = [False]  # read one by one, those that fail raise
            yield all(held)

    def _announce(
        self, files: dict[int, AnyFile], records: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> list[tuple[_RemoteFile, list[Range]]]:
        """Begin to fetch the payloads of records. Return the range of each, by shard."""
        begins = self.columns.begins[records]
        stops = begins + self.columns.lengths[records]
        found = defaultdict[int, list[Range]](list)
        for number, *span in zip(numbers.tolist(), begins.tolist(), stops.tolist(), strict=True):
            found[number].append(cast("Range", tuple(span)))
        ranges = [(cast("_RemoteFile", files[number]), spans) for number, spans in found.items()]
        for file, spans in ranges:
            file.announce(spans)
        return ranges

    @property
    def will_read(self) -> Callable[[Sequence[int]], None]:
        """Begins to fetch samples; see `PackedDataset.will_read`."""
        return self._will_read

    def _will_read(self, indices: Sequence[int]) -> None:
        if not len(indices):
            for number, known in [*self._known.items()] if self._pid == os.getpid() else ():
                known.forget(self._store, self.where(number))
            return
        found = np.asarray(indices)
        records = found[(found >= 0) & (found < self.begins[-1])]  # reading another one raises
        numbers = np.searchsorted(self.begins[1:], records, side="right")
        files = self._load(np.unique(numbers).tolist())
        loaded = np.isin(numbers, [*files])
        self._announce(files, records[loaded], numbers[loaded])

    def _load(self, numbers: Sequence[int]) -> dict[int, AnyFile]:
        """Load the columns of shards, all at once. Leave out those that fail: a read of theirs raises it."""
        new = [number for number in numbers if self._tables[number] is None]
        with suppress(OSError):
            self._store.etags(self.where(number) for number in new)
        files = {}
        for number in numbers[: self.most_open]:
            with suppress(OSError, PackedDataError):
                files[number] = self.file(number)
        for number in {*new} & files.keys():
            cast("_RemoteFile", files[number]).announce(_columns(self._index.shards[number]))
        for number in [*files]:
            try:
                self.table(number)
            except (OSError, PackedDataError):
                del files[number]
        return files

    def may_locate(self, number: int) -> bool:
        """Return whether this process has read from a shard: one that has not may still fork workers."""
        return self._tables[number] is not None

    def named(self, error: OSError, number: int) -> OSError:
        """Return an error as it is: the store's name the URL."""
        return error

    def bad(self, number: int, row: int | None, reason: str) -> PackedDataError:
        """Return the error that names a shard, and a record in it."""
        error = super().bad(number, row, reason)
        error.path = self._name
        return error


class _RemoteFile(CachedObject):
    """An open shard."""

    def __init__(
        self, store: Store, cache: Cache, url: str, size: int, known: Known, number: int
    ) -> None:
        [etag] = store.etags([url])
        super().__init__(cache, store, url, size, etag, known)
        self.number = number
        self.identity: tuple[object, ...] = (etag,)


def _columns(shard: Shard) -> list[Range]:
    """Return the ranges of a shard's file that are not payloads."""
    begins = [0, *(start + length for start, length in shard.payload)]
    ends = [*(start for start, _ in shard.payload), shard.bytes]
    return [span for span in zip(begins, ends, strict=True) if span[0] < span[1]]
