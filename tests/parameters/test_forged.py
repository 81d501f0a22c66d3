"""Promises:
- A message whose memory does not hold what it says is refused by servers and by clients, and ends neither. See also
  `tests/store/test_damaged_sets.py` for sets.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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


def gathered(batch: pa.RecordBatch) -> None:
    wire.Gathered(ROWS).add(batch)


@pytest.mark.parametrize("door", [wire.aligned, wire.bytes_of, gathered])
def test_rows_beyond_the_buffer_are_refused(door: Callable[[Any], object]) -> None:
    batch = batch_of_too_many_rows(ROWS)
    assert batch.num_rows == ROWS
    with pytest.raises(ValueError, match="do not hold its rows"):
        door(batch)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (None, "expected a record batch"),
        (pa.record_batch({"bytes": pa.array([1], pa.int64())}), "expected a record batch"),
        (pa.record_batch({"other": pa.array([1], pa.uint8())}), "expected a record batch"),
        (
            pa.RecordBatch.from_arrays([pa.array([1, None], pa.uint8())], schema=wire.SCHEMA),
            "has nulls",
        ),
    ],
)
def test_a_batch_of_another_kind_is_refused(batch: Any, said: str) -> None:
    for door in (wire.aligned, wire.bytes_of, gathered):
        with pytest.raises(ValueError, match=said):
            door(batch)


LIES: list[Any] = [
    ["float32", [2**62], 0],
    ["float32", [33], 0],
    ["float32", [-1], 0],
    ["float32", [-2, -8], 0],
    ["float32", [2.0], 0],
    ["float32", [True], 0],
    ["float32", "4", 0],
    ["float32", [4], -64],
    ["float32", [4], 4],
    ["float32", [4], 2**70],
    ["float32", [1] * 65, 0],
    ["quint8", [4], 0],
    ["uint", [4], 0],
    ["Tensor", [4], 0],
    ["load", [4], 0],
    [5, [4], 0],
    ["bool", [4], 64],
    ["float32", [4]],
    None,
]


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_tensor_that_does_not_lie_in_its_message_is_refused(lie: Any) -> None:
    content = torch.full((128,), 2, dtype=torch.uint8)
    text = json.dumps({"values": {wire._TENSOR: lie}}).encode()
    with pytest.raises((ValueError, TypeError)):
        wire.decode(text, content)


class LyingServer(flight.FlightServerBase):  # type: ignore[misc]
    """Answers each call with one batch."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._batch = batch

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        writer.begin(BYTES)
        while True:
            try:
                reader.read_chunk()
            except StopIteration:
                return
            text = json.dumps({"run": "x", "values": {wire._TENSOR: ["uint8", [ROWS], 0]}})
            head = np.int64(ROWS).tobytes() + text.encode()
            writer.write_with_metadata(self._batch, pa.py_buffer(head))


def test_a_client_refuses_an_answer_of_a_server_that_lies() -> None:
    with LyingServer(batch_of_too_many_rows(ROWS)) as server:
        client = PSClient(connect(f"grpc://127.0.0.1:{server.port}"), patience_s=5)
        with pytest.raises(ParametersError, match="gave an answer that cannot be read: ValueError"):
            client.pull_variable()
        client.close()
