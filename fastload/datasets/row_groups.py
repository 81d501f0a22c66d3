"""The row groups of Parquet files: decoded when they are needed, each by one thread. The last used ones are cached."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import get_worker_info

from fastload._kit.disk import identity
from fastload.datasets.arrow_columns import Column, decoded
from fastload.errors import ParquetError
from fastload.telemetry import stage

RowGroup = dict[str, Column]
"""The decoded columns of a row group, by name."""


class ParquetPart:
    """One file: its footer, read once, and its identity, which tells if the file is replaced.

    Raises FileNotFoundError or OSError, and ParquetError if the file has no valid footer.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.identity = identity(path)
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
        found = identity(self.path)
        if found != self.identity:
            raise ParquetError(
                f"{self.path}: the file was replaced or changed since the dataset was created. The file has "
                f"{found[2]:,} bytes now, and had {self.identity[2]:,} then. Create the dataset again"
            )

    def read(self, group: int, names: Sequence[str]) -> RowGroup:
        """Return the columns `names` of a row group.

        In a worker this uses no Arrow threads, because the workers already run in parallel.
        """
        expected = f"row group {group}: expected {self.groups[group]:,} rows"
        checked = {"metadata": self.metadata, "page_checksum_verification": True}
        with (
            stage("read"),
            self.guarded(expected),
            pq.ParquetFile(self.path, **checked) as file,
        ):
            threads = get_worker_info() is None
            table = file.read_row_group(group, columns=[*names], use_threads=threads)
            table.validate(full=True)  # offsets, indices of dictionaries and strings
            if table.num_rows != self.groups[group]:
                raise ValueError(f"{table.num_rows:,} rows")
        with stage("decode"), self.guarded(f"{expected} with columns of {self.schema.names}"):
            return {name: decoded(self.schema.field(name), table.column(name)) for name in names}


class RowGroupCache:
    """Caches the row groups that were used last, up to `limit` bytes. The newest stays, whatever its size.

    Threads that need the same row group wait for the first of them to decode it. This takes no lock: the thread that
    first puts an entry into the dict decodes, and always ends its future. Every step on the dict is atomic.

    A copy, and the child of a fork, begins empty: the thread that decodes in the parent is not in the child.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[int, _Held] = {}
        self._ticks = count()
        self._pid = os.getpid()

    def __reduce__(self) -> Any:
        return RowGroupCache, (self._limit,)

    @property
    def nbytes(self) -> int:
        """Bytes of the row groups that are cached now."""
        return sum(held.nbytes for held in [*self._held.values()])

    def get(self, number: int, decode: Callable[[], RowGroup]) -> RowGroup:
        """Return a row group. Call `decode()` if it is not cached, and raise what that raises."""
        if self._pid != os.getpid():
            self.__init__(self._limit)  # type: ignore[misc]
        while True:
            held = self._held.get(number)
            if held is None:
                own = _Held()
                held = self._held.setdefault(number, own)
                if held is own:
                    self._decode(number, own, decode)
            held.used = next(self._ticks)
            # The group before the future: threads that look at a future at the same time wait for its lock.
            found = held.group or held.future.result()
            # None: the thread that decoded it failed. This thread tries again, and may raise an error of its own.
            if found is not None:
                return found

    def _decode(self, number: int, own: _Held, decode: Callable[[], RowGroup]) -> None:
        held = self._held
        try:
            own.group = decode()
            own.nbytes = sum(column.nbytes for column in own.group.values())
            # Two threads may evict at once: then they evict more than they must.
            done = sorted(
                [(each.used, k, each.nbytes) for k, each in [*held.items()] if each.nbytes]
            )
            total = sum(nbytes for *_, nbytes in done)
            for _, k, nbytes in done:
                if total > self._limit and k != number:
                    total -= nbytes
                    held.pop(k, None)
        finally:  # wake the waiting threads, whatever happened
            if own.group is None:
                held.pop(number, None)
            own.future.set_result(own.group)


class _Held:
    """A row group that is cached, or is being decoded."""

    __slots__ = ("future", "group", "nbytes", "used")

    def __init__(self) -> None:
        self.future: Future[RowGroup | None] = Future()
        self.group: RowGroup | None = None
        self.nbytes = self.used = 0


def _footer_of(path: str) -> str:
    """Return a hash of a file's footer, which has the sizes of all columns, and their smallest and largest values."""
    with open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, os.SEEK_END)
        return hashlib.sha256(file.read(length)).hexdigest()
