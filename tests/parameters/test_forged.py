"""Promises:
- A message whose memory does not hold what it says is refused by servers and by clients, and ends neither. See also
  `tests/distributed/test_flight.py` for clients.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from fastload.distributed.arrow_memory import SCHEMA, batch_of
from fastload.parameters import wire
from tests.forged import batch_of_too_many_rows

ROWS = 2**20 + 12_345
BATCHES: list[tuple[Any, str]] = [
    (batch_of_too_many_rows(ROWS), "do not hold its rows"),
    (None, "expected a record batch"),
    (pa.record_batch({"bytes": pa.array([1], pa.int64())}), "expected a record batch"),
    (pa.record_batch({"other": pa.array([1], pa.uint8())}), "expected a record batch"),
    (pa.RecordBatch.from_arrays([pa.array([1, None], pa.uint8())], schema=SCHEMA), "has nulls"),
]  # fmt: skip
LIES: list[Any] = [
    *([kind, [4], 0] for kind in ("quint8", "uint", "Tensor", "load", 5)),
    *(["float32", shape, 0] for shape in ([2**62], [33], [-1], [-2, -8], [2.0], [True], "4", [1] * 65)),
    *(["float32", [4], first] for first in (-64, 4, 2**70)),
    ["bool", [4], 64], ["float32", [4]], None,
]  # fmt: skip


def test_messages_that_do_not_hold_what_they_say_are_refused() -> None:
    for batch, said in BATCHES:
        with pytest.raises(ValueError, match=said):
            wire.gathered(ROWS, [batch])
    for size, said in ((1, "fewer bytes"), (3, "more bytes")):
        with pytest.raises(ValueError, match=said):
            wire.gathered(2, [batch_of(np.zeros(size, np.uint8))])
    for size in (-1, 2**62):
        with pytest.raises((ValueError, MemoryError)):
            wire.gathered(size, [])
    content = torch.full((128,), 2, dtype=torch.uint8)
    for lie in LIES:
        text = json.dumps({"values": {wire._TENSOR: lie}}).encode()
        with pytest.raises((ValueError, TypeError)):
            wire.decode(text, content)
