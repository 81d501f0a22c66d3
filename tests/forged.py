"""Messages of Arrow with false numbers, which any peer can send and no writer of Arrow makes."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pyarrow as pa
from pyarrow import flight

BYTES = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])
"""The schema of messages of bytes."""
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


class Liar(flight.FlightServerBase):  # type: ignore[misc]
    """Answers each call with one batch, and each action with results."""

    def __init__(self, batch: pa.RecordBatch, results: Sequence[bytes] = ()) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._batch, self._results = batch, results

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        schema = self._batch.schema
        return flight.RecordBatchStream(pa.RecordBatchReader.from_batches(schema, [self._batch]))

    def do_action(self, context: Any, action: flight.Action) -> list[flight.Result]:
        return [flight.Result(result) for result in self._results]

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        writer.begin(self._batch.schema)
        reader.read_chunk()
        rows = self._batch.num_rows - 1
        tensor = {"tensor: dtype, shape, first byte": ["uint8", [rows], 0]}
        head = struct.pack("<q", rows) + json.dumps({"run": "x", "values": tensor}).encode()
        writer.write_with_metadata(self._batch, pa.py_buffer(head))
