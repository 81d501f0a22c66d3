"""The row groups of Parquet files: decoded when they are needed, each by one thread. The last used ones are cached."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from fastload.datasets.arrow_columns import Column, Kind, decoded
from fastload.errors import ParquetError
from fastload.telemetry import stage


class ParquetPart:
    """One file: its footer, read once, and its identity, which tells if the file is replaced.

    Raises FileNotFoundError or OSError, and ParquetError if the file has no valid footer.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.identity = _identity(path)
        with self.guarded("expected a footer: this is not a Parquet file, or it was cut off"):
            self.metadata = pq.read_metadata(path)
            self.footer = _footer_of(path)
            self.schema: pa.Schema = self.metadata.schema.to_arrow_schema()
            count = self.metadata.num_row_groups
            self.groups = [self.metadata.row_group(k).num_rows for k in range(count)]
            if min(self.groups, default=0) < 0 or sum(self.groups) != self.metadata.num_rows:
                raise ValueError(
                    f"row groups of {self.groups} rows, {self.metadata.num_rows} in all"
                )

    @contextmanager
    def guarded(self, expected: str) -> Iterator[None]:
        """Turn Arrow's error about bad bytes into a ParquetError. Raise one too if the file was replaced."""
        self._check()
        try:
            yield
        except MemoryError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            self._check()
            # A system error has a number. Arrow's error about bad bytes has none.
            if isinstance(error, OSError) and error.errno is not None:
                error.filename = error.filename or self.path
                raise
            reason = " ".join(str(error).split())
            raise ParquetError(f"{self.path}: {expected}. pyarrow found: {reason}") from error
        self._check()

    def _check(self) -> None:
        found = _identity(self.path)
        if found != self.identity:
            raise ParquetError(
                f"{self.path}: the file was replaced or changed since the dataset was created. The file has "
                f"{found[2]:,} bytes now, and had {self.identity[2]:,} then. Create the dataset again"
            )

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Return a row group. In a worker it uses no Arrow threads, because the workers already run in parallel."""
        rows = self.groups[group]
        with (
            self.guarded(f"row group {group}: expected {rows:,} rows"),
            pq.ParquetFile(
                self.path, metadata=self.metadata, page_checksum_verification=True
            ) as file,
        ):
            table = file.read_row_group(
                group, columns=[*columns], use_threads=get_worker_info() is None
            )
            table.validate(full=True)  # offsets, indices of dictionaries and strings
        if table.num_rows != rows:
            raise ParquetError(
                f"{self.path}: row group {group}: expected {rows:,} rows, found {table.num_rows:,}"
            )
        return table


def _identity(path: str) -> tuple[int, ...]:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The decoded columns of a row group, by name."""

    columns: dict[str, Column]
    nbytes: int


class Decoder:
    """Reads and decodes the columns of a dataset.

    Args:
        parts: the files.
        kinds: the form that each column to read takes in samples.
        fills: the value that replaces nulls, by column.
    """

    def __init__(
        self, parts: Sequence[ParquetPart], kinds: dict[str, Kind], fills: dict[str, Any]
    ) -> None:
        self.parts = parts
        self.kinds = kinds
        self.fills = fills
        # For each row group of all files: its file, and its number in that file.
        self.places = [(part, k) for part in parts for k in range(len(part.groups))]

    def decode(self, number: int, kept: NDArray[np.int64] | None) -> RowGroup:
        """Return row group `number`, or its rows `kept`."""
        part, group = self.places[number]
        with stage("read"):
            table = part.read(group, [*self.kinds])
        with (
            stage("decode"),
            part.guarded(f"row group {group}: expected columns of {part.schema.names}"),
        ):
            if kept is not None and len(kept) < table.num_rows:
                table = table.take(pa.array(kept))
            columns = {
                name: decoded(table.column(name), kind, self.fills.get(name))
                for name, kind in self.kinds.items()
            }
        return RowGroup(columns, sum(column.nbytes for column in columns.values()))


class RowGroupCache:
    """Caches the row groups that were used last, up to `limit` bytes. The newest stays, whatever its size.

    Threads that need the same row group wait for the first of them to decode it. This takes no lock: the thread that
    first puts a future into the dict decodes, and always ends that future. Every step on the dict is atomic.

    A copy, and the child of a fork, begins empty: the thread that decodes in the parent is not in the child.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._forget()

    def _forget(self) -> None:
        self._held: dict[int, _Held] = {}
        self._ticks = count()
        self._pid = os.getpid()

    def __getstate__(self) -> int:
        return self._limit

    def __setstate__(self, limit: int) -> None:
        self.__init__(limit)  # type: ignore[misc]

    @property
    def nbytes(self) -> int:
        """Bytes of the row groups that are cached now."""
        return sum(held.nbytes for held in [*self._held.values()])

    def get(self, number: int, decode: Callable[[], RowGroup]) -> RowGroup:
        """Return a row group. Call `decode()` if it is not cached, and raise what that raises."""
        if self._pid != os.getpid():
            self._forget()
        while True:
            held = self._held.get(number)
            if held is None:
                found = self._decoded(number, decode)
            else:
                held.used = next(self._ticks)
                # The group before the future: threads that look at a future at the same time wait for its lock.
                found = held.group or held.future.result()
            # None: the thread that decoded it failed. This thread tries again, and may raise an error of its own.
            if found is not None:
                return found

    def _decoded(self, number: int, decode: Callable[[], RowGroup]) -> RowGroup | None:
        """Decode and cache a row group. Return None if another thread has just begun to do so."""
        own, held = _Held(next(self._ticks)), self._held
        try:
            if held.setdefault(number, own) is not own:
                return None
            found = decode()
            own.group, own.nbytes = found, found.nbytes
            own.future.set_result(found)
            self._evict(held, own)
            return found
        finally:
            if not own.future.done():  # wake the waiting threads, whatever happened
                if held.get(number) is own:
                    del held[number]
                own.future.set_result(None)

    def _evict(self, all_held: dict[int, _Held], newest: _Held) -> None:
        # Two threads may evict at once: then they evict more than they must.
        done = [(held.used, number, held) for number, held in [*all_held.items()] if held.nbytes]
        total = sum(held.nbytes for _, _, held in done)
        for _, number, held in sorted(done, key=lambda entry: entry[0]):
            if total <= self._limit:
                return
            if held is not newest:
                total -= held.nbytes
                all_held.pop(number, None)


class _Held:
    """A row group that is cached, or is being decoded."""

    __slots__ = ("future", "group", "nbytes", "used")

    def __init__(self, used: int) -> None:
        self.future: Future[RowGroup | None] = Future()
        self.group: RowGroup | None = None
        self.nbytes = 0
        self.used = used


def _footer_of(path: str) -> str:
    """Return a hash of a file's footer, which has the sizes of all columns, and their smallest and largest values."""
    with open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, os.SEEK_END)
        return hashlib.sha256(file.read(length)).hexdigest()
