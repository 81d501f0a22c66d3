"""The shards of a packed set. A shard is opened when it is needed, and its columns stay loaded."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

import numpy as np

from fastload._kit.disk import Descriptor, identity
from fastload.datasets.manifest import Index
from fastload.datasets.packed.format import Table, columns_of, read_table
from fastload.errors import PackedDataError
from fastload.telemetry import stage


class Shards:
    """The open files and the loaded columns of a set. Threads that need the same shard at once may each load it.

    Args:
        path, index: the set.
        extras: names of extra columns to load.

    `columns` are those of all shards, end to end, and `begins`, int64[shards + 1], the first record of each. At most
    `most_open` files stay open.
    """

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
        self._files: list[OpenFile | None] = [None] * self.most_open
        self._identities: dict[int, tuple[int, ...]] = {}  # of the shards that were opened

    def table(self, number: int) -> Table:
        """Return the columns of a shard. Raises PackedDataError if it is damaged or missing, and OSError."""
        if (table := self._tables[number]) is not None:
            return table
        file, shard = self.file(number), self._index.shards[number]
        try:
            with stage("read"):
                table = read_table(self._path, self._index, shard, file.fd, columns=self._extras)
        except OSError as error:
            error.filename = self.where(number)  # unlike open(), a read does not name it
            raise
        first, stop = self.begins[number : number + 2]
        self._tables[number] = table = self.columns.hold(table, first, stop)
        return table

    def file(self, number: int) -> OpenFile:
        """Return an open shard. Keep it while its descriptor is in use: it closes with the last reference."""
        place = number % len(self._files)
        file = self._files[place]
        if file is None or file.number != number:
            try:
                file = OpenFile(self.where(number), number)
            except FileNotFoundError as error:
                raise self.bad(number, None, "the file is missing") from error
            # An evicted shard is opened again. It must be the file whose table is loaded.
            if self._identities.setdefault(number, file.identity) != file.identity:
                raise self.bad(number, None, "the file was replaced since it was first read")
            self._files[place] = file
        return file

    def where(self, number: int) -> str:
        """Return the path of a shard."""
        return os.path.join(self._path, self._index.shards[number].name)

    def bad(self, number: int, row: int | None, reason: str) -> PackedDataError:
        """Return the error that names a shard, and a record in it."""
        return PackedDataError(
            self._path, reason, shard=self._index.shards[number].name, record=row
        )


class OpenFile(Descriptor):
    """An open shard."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        self.number, self.identity = number, identity(self.fd)
