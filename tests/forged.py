"""Messages of Arrow with false numbers, which any peer can send and no writer of Arrow makes."""

from __future__ import annotations

import re
import struct
from itertools import combinations

import pyarrow as pa

BYTES = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])
"""The schema of messages to parameter servers."""
PIECES = pa.schema([pa.field("bytes", pa.binary(), nullable=False)])
"""The schema of pieces of a part's file."""
HELD = 61
"""Bytes in the buffer of a forged batch. Arrow pads them to 64, so no other number of the message is the same."""


def parts_of(message: pa.Buffer) -> tuple[bytes, bytes]:
    """Return the metadata and the body of an encapsulated message."""
    raw = message.to_pybytes()
    (length,) = struct.unpack_from("<i", raw, 4)
    return raw[8 : 8 + length], raw[8 + length :]


def read(head: bytes, body: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """Return the record batch of a message. Arrow does not look at what its buffers hold."""
    return pa.ipc.read_record_batch(
        pa.py_buffer(b"\xff\xff\xff\xff" + struct.pack("<i", len(head)) + head + body), schema
    )


def of_too_many_rows(rows: int) -> tuple[bytes, bytes]:
    """Return the metadata and the body of a batch that says `rows` rows, but whose buffer has `HELD` bytes."""
    column = pa.Array.from_buffers(pa.uint8(), HELD, [None, pa.py_buffer(b"\1" * HELD)])
    head, body = parts_of(pa.RecordBatch.from_arrays([column], schema=BYTES).serialize())
    places = [found.start() for found in re.finditer(re.escape(struct.pack("<q", HELD)), head)]
    for chosen in combinations(places, 2):  # of the rows of batch and column, and the buffer's size
        forged = bytearray(head)
        for place in chosen:
            struct.pack_into("<q", forged, place, rows)
        try:
            batch = read(bytes(forged), body, BYTES)
        except (pa.ArrowException, OSError):
            continue
        if batch.num_rows == rows and batch.column(0).buffers()[1].size == HELD:
            return bytes(forged), body
    raise AssertionError("Arrow lays out its messages in another way")


def batch_of_too_many_rows(rows: int) -> pa.RecordBatch:
    """Return a batch that says `rows` rows, but whose buffer has `HELD` bytes."""
    return read(*of_too_many_rows(rows), BYTES)


def piece_beyond_its_buffer(length: int) -> pa.RecordBatch:
    """Return a batch with one value of 100 bytes, whose offsets say that it has `length`."""
    batch = pa.record_batch([pa.array([b"x" * 100], pa.binary())], schema=PIECES)
    head, body = parts_of(batch.serialize())
    assert body.startswith(struct.pack("<2i", 0, 100))
    return read(head, struct.pack("<2i", 0, length) + body[8:], PIECES)
