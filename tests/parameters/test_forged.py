"""Promises:
- A message whose memory does not hold what it says is refused by servers and by clients, and ends neither. See also
  `tests/store/test_damaged_sets.py` for sets.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import flight

from fastload.errors import ParametersError
from fastload.parameters import PSClient, connect, wire
from tests.forged import BYTES, batch_of_too_many_rows

pytestmark = pytest.mark.usefixtures("descriptors_that_stay")

ROWS = 2**20 + 12_345
BATCHES: list[tuple[Any, str]] = [
    (batch_of_too_many_rows(ROWS), "do not hold its rows"),
    (None, "expected a record batch"),
    (pa.record_batch({"bytes": pa.array([1], pa.int64())}), "expected a record batch"),
    (pa.record_batch({"other": pa.array([1], pa.uint8())}), "expected a record batch"),
    (pa.RecordBatch.from_arrays([pa.array([1, None], pa.uint8())], schema=wire.SCHEMA), "has nulls"),
]  # fmt: skip
LIES: list[Any] = [
    *([kind, [4], 0] for kind in ("quint8", "uint", "Tensor", "load", 5)),
    *(["float32", shape, 0] for shape in ([2**62], [33], [-1], [-2, -8], [2.0], [True], "4", [1] * 65)),
    *(["float32", [4], first] for first in (-64, 4, 2**70)),
    ["bool", [4], 64], ["float32", [4]], None,
]  # fmt: skip


def test_messages_that_do_not_hold_what_they_say_are_refused() -> None:
    for batch, said in BATCHES:
        for door in (wire.aligned, wire.bytes_of, wire.Gathered(ROWS).add):
            with pytest.raises(ValueError, match=said):
                door(batch)
    content = torch.full((128,), 2, dtype=torch.uint8)
    for lie in LIES:
        text = json.dumps({"values": {wire._TENSOR: lie}}).encode()
        with pytest.raises((ValueError, TypeError)):
            wire.decode(text, content)


class LyingServer(flight.FlightServerBase):  # type: ignore[misc]
    """Answers each call with one batch."""

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        writer.begin(BYTES)
        reader.read_chunk()
        text = json.dumps({"run": "x", "values": {wire._TENSOR: ["uint8", [ROWS], 0]}})
        head = np.int64(ROWS).tobytes() + text.encode()
        writer.write_with_metadata(batch_of_too_many_rows(ROWS), pa.py_buffer(head))


def test_a_client_refuses_an_answer_of_a_server_that_lies() -> None:
    with LyingServer("grpc://127.0.0.1:0") as server:
        client = PSClient(connect(f"grpc://127.0.0.1:{server.port}"), patience_s=5)
        with pytest.raises(ParametersError, match="gave an answer that cannot be read: ValueError"):
            client.pull_variable()
        client.close()
