"""Payloads of records, read from their shards and compared with their checksums."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from fastload.datasets.packed.format import fault_of
from fastload.datasets.packed.shards import Shards

_scratch = threading.local()  # `buffer`: uint8[n], into which the thread reads encoded records


class Payloads:
    """Reads the payloads of a set. A record is named by its shard's number and its row in the shard.

    Args:
        shards: the shards of the set.
        read_ahead_bytes: see `PackedDataset`.

    Raises PackedDataError, with shard and record, if the set is damaged. Raises OSError if a disk fails.
    """

    def __init__(self, shards: Shards, read_ahead_bytes: int) -> None:
        self.shards = shards
        self.read_ahead_bytes = read_ahead_bytes

    @contextmanager
    def buffer(self, number: int, row: int) -> Iterator[NDArray[np.uint8]]:
        """Lend memory of the calling thread, large enough for the payload. A nested block gets another one."""
        length = int(self.shards.table(number).lengths[row])
        buffer: NDArray[np.uint8] | None = _scratch.__dict__.pop("buffer", None)
        if buffer is None or len(buffer) < length:
            buffer = np.empty(max(length, 2**16) * 5 // 4, np.uint8)
        try:
            yield buffer
        finally:
            _scratch.buffer = buffer

    def read(self, number: int, row: int, buffer: NDArray[np.uint8] | None = None) -> memoryview:
        """Return a payload, in `buffer` or in new memory. The first read of it is checked."""
        table = self.shards.table(number)
        payload = self._fetch(number, row, buffer, 0, int(table.lengths[row]))
        if not table.seen[row]:
            if fault := fault_of(payload, table, row):
                raise self.shards.bad(number, row, fault)
            table.seen[row] = True
        return payload

    def read_rows(
        self, number: int, row: int, buffer: NDArray[np.uint8], first: int, stop: int
    ) -> NDArray[np.uint8]:
        """Return rows `first` to `stop` of raw pixels, uint8[stop - first, width, 3].

        It reads no other rows, unless the checksum needs them: at the first read of this record.
        """
        table = self.shards.table(number)
        assert table.sides is not None
        width = int(table.sides[row, 1])
        begin, end = 3 * width * first, 3 * width * stop
        if table.seen[row] and self.shards.in_parts:
            payload = self._fetch(number, row, buffer, begin, end)
        else:
            payload = self.read(number, row, buffer)[begin:end]
        return np.frombuffer(payload, np.uint8).reshape(stop - first, width, 3)

    def _fetch(
        self, number: int, row: int, buffer: NDArray[np.uint8] | None, first: int, stop: int
    ) -> memoryview:
        """Return bytes `first` to `stop` of a payload, unchecked, in memory as `read` does."""
        begin, length = int(self.shards.table(number).begins[row]) + first, stop - first
        file = self.shards.file(number)
        payload = (np.empty(length, np.uint8) if buffer is None else buffer[:length]).data
        try:
            whole = (
                self.read_ahead_bytes > 0 and self._read_cached(file.fd, payload, begin)
            ) or file.read_into(payload, begin) == length
        except OSError as error:
            raise self.shards.named(error, number) from error.__cause__
        if not whole:
            raise self.shards.bad(
                number, row, f"the file ends before byte {begin + length:,}. It was cut off"
            )
        return payload

    def _read_cached(self, fd: int, payload: memoryview, begin: int) -> bool:
        """Fill `payload` and return True if it is in memory. Otherwise start to read its piece, and return False."""
        try:
            if os.preadv(fd, [payload], begin, os.RWF_NOWAIT) == len(payload):
                return True
        except OSError as error:
            # It is not in memory, or the file system cannot tell.
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise
        piece = begin - begin % self.read_ahead_bytes
        length = begin + len(payload) - piece  # the record may reach beyond its piece
        os.posix_fadvise(fd, piece, max(length, self.read_ahead_bytes), os.POSIX_FADV_WILLNEED)
        return False
