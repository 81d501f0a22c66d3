"""The shards of a packed set. A shard is opened when it is needed, and its columns stay loaded."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fastload._kit.disk import Descriptor, identity, preadv
from fastload.datasets.manifest import Index, Shard
from fastload.datasets.packed.format import Table, columns_of, read_table
from fastload.errors import PackedDataError
from fastload.telemetry import stage


class AnyFile(Protocol):
    """An open shard, here or at a URL. `fd` may be read where `Shards.held` says so."""

    number: int
    fd: int
    identity: tuple[object, ...]

    @property
    def size(self) -> int:
        """Its size in bytes."""

    def read_into(self, buffer: memoryview, at: int) -> int:
        """Fill a buffer from an offset, and return how many bytes were read."""


class Shards:
    """The open files and the loaded columns of a set. Threads that need the same shard at once may each load it.

    Args:
        path, index: the set.
        extras: names of extra columns to load.

    `columns` are those of all shards, end to end, and `begins`, int64[shards + 1], the first record of each. At most
    `most_open` files stay open.
    """

    in_parts = True
    """Part of a payload may be read without the rest."""

    def __init__(self, path: str, index: Index, *, extras: Sequence[str]) -> None:
        self._path = path
        self._index = index
        self._extras = extras
        self.begins = np.cumsum([0, *(shard.rows for shard in index.shards)])
        try:
            self.columns = columns_of(index)
        except (MemoryError, ValueError) as error:
            reason = f"the columns of {index.rows:,} records do not fit into memory"
            raise PackedDataError(path, reason) from error
        self._tables: list[Table | None] = [None] * len(index.shards)  # parts of `columns`
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most_open = len(index.shards)
        if limit != resource.RLIM_INFINITY:
            self.most_open = min(self.most_open, max(16, limit // 4))
        self._files: list[AnyFile | None] = [None] * self.most_open
        self._identities: dict[int, tuple[object, ...]] = {}  # of the shards that were opened

    def table(self, number: int) -> Table:
        """Return the columns of a shard. Raises PackedDataError if it is damaged or missing, and OSError."""
        if (table := self._tables[number]) is not None:
            return table
        file, shard = self.file(number), self._index.shards[number]
        try:
            with stage("read"):
                table = self._read_table(shard, file)
        except OSError as error:
            raise self.named(error, number) from error.__cause__
        first, stop = self.begins[number : number + 2]
        self._tables[number] = table = self.columns.hold(table, first, stop)
        return table

    def _read_table(self, shard: Shard, file: AnyFile) -> Table:
        return read_table(
            self._path, self._index, shard, file.size, file.read_into, columns=self._extras
        )

    def file(self, number: int) -> AnyFile:
        """Return an open shard. Keep it while its descriptor is in use: it closes with the last reference."""
        place = number % len(self._files)
        file = self._files[place]
        if file is None or file.number != number:
            try:
                file = self._open(number)
            except FileNotFoundError as error:
                raise self.bad(number, None, "the file is missing") from error
            # An evicted shard is opened again. It must be the file whose table is loaded.
            if self._identities.setdefault(number, file.identity) != file.identity:
                raise self.bad(number, None, "the file was replaced since it was first read")
            self._files[place] = file
        return file

    def _open(self, number: int) -> AnyFile:
        return OpenFile(self.where(number), number)

    def held(
        self, files: dict[int, AnyFile], records: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> AbstractContextManager[bool]:
        """Return a context in which the payloads of records can be read from the open `files`, unless it is False.

        `numbers` are those of their shards, whose columns are loaded.
        """
        return nullcontext(True)

    @property
    def will_read(self) -> Callable[[Sequence[int]], None] | None:
        """Begins to fetch samples, or None for files of this machine; see `PackedDataset.will_read`."""
        return None

    def may_locate(self, number: int) -> bool:
        """Return whether a shard may be read for a message."""
        return True

    def where(self, number: int) -> str:
        """Return the path of a shard."""
        return os.path.join(self._path, self._index.shards[number].name)

    def named(self, error: OSError, number: int) -> OSError:
        """Let an error of a read name its shard."""
        error.filename = self.where(number)  # unlike open(), a read does not name it
        return error

    def bad(self, number: int, row: int | None, reason: str) -> PackedDataError:
        """Return the error that names a shard, and a record in it."""
        return PackedDataError(
            self._path, reason, shard=self._index.shards[number].name, record=row
        )


class OpenFile(Descriptor):
    """An open shard."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        self.number = number
        self.identity: tuple[object, ...] = identity(self.fd)

    @property
    def size(self) -> int:
        """The file's size in bytes, now."""
        return os.fstat(self.fd).st_size

    def read_into(self, buffer: memoryview, at: int) -> int:
        """Fill a buffer from an offset, and return how many bytes were read."""
        return preadv(self.fd, buffer, at)
