"""The bytes of a shard with payloads, read piece by piece and compared with their checksums."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from fastload._kit.disk import preadv
from fastload.datasets.manifest import Index, Shard
from fastload.datasets.packed.format import Table, fault_of, read_table
from fastload.errors import PackedDataError


def pieces(path: str, index: Index, shard: Shard) -> Iterator[memoryview]:
    """Yield the bytes of a shard, in order. A payload is checked before it is yielded.

    Raises `PackedDataError`, with the record, if a byte is wrong or missing. It raises after the last piece at the
    latest.
    """
    with opened(path, shard) as fd:
        table = read_table(path, index, shard, fd)
        checksum = at = row = 0
        for number, (start, length) in enumerate((*shard.payload, (shard.bytes, 0))):
            columns = read_piece(path, shard, fd, at, start - at)
            checksum = zlib.crc32(columns, checksum)
            yield columns
            payload = read_piece(path, shard, fd, start, length)
            end = int(table.batch_ends[number]) if number < len(shard.payload) else row
            for record in range(row, end):
                begin = int(table.begins[record]) - start
                one = payload[begin : begin + int(table.lengths[record])]
                expect_payload(path, shard, table, record, one)
            yield payload
            at, row = start + length, end
        if checksum != shard.checksum:
            raise PackedDataError(path, "the file changed while it was read", shard=shard.name)


def expect_payload(path: str, shard: Shard, table: Table, record: int, payload: memoryview) -> None:
    """Raise `PackedDataError` if a payload does not have the checksum of its record."""
    if fault := fault_of(payload, table, record):
        raise PackedDataError(path, fault, shard=shard.name, record=record)


@contextmanager
def opened(path: str, shard: Shard) -> Iterator[int]:
    """Yield a descriptor of a shard. Raises `PackedDataError` if the file is missing."""
    try:
        fd = os.open(os.path.join(path, shard.name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise PackedDataError(path, "the file is missing", shard=shard.name) from error
    try:
        yield fd
    finally:
        os.close(fd)


def read_piece(path: str, shard: Shard, fd: int, offset: int, length: int) -> memoryview:
    """Return `length` bytes of a shard. Raises `PackedDataError` if the file ends before them, and OSError."""
    piece = np.empty(length, np.uint8).data
    try:
        found = preadv(fd, piece, offset)
    except OSError as error:
        error.filename = os.path.join(path, shard.name)  # unlike open(), a read does not name it
        raise
    if found < length:
        reason = f"the file ends before byte {offset + length:,}. It was cut off"
        raise PackedDataError(path, reason, shard=shard.name)
    return piece
