"""`Batch`, the ticket that carries samples from the sampler to the loop."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload._kit.user_errors import file_of
from fastload.memory.collate import DISCARD, BatchBuilder
from fastload.memory.ticket import Ticket
from fastload.random.keys import StreamKeys
from fastload.telemetry import Place, Recorder


class Batch(Ticket):
    """A batch on its way through the pipeline: the indices of its samples, then its data or its error.

    A sample may depend only on the seed, `epoch`, its position and its index: they are the key of its random stream.

    Args:
        units: units of work, see `Ticket`.
        indices: the sampler's indices, as a sequence with one element for each sample.
        size: the number of samples that the sampler gave.
        keys: computes the keys of the random streams.
        recorders: the epoch's recorders, by worker.
        epoch: the epoch's number.
        ordinal: the batch's number in the epoch.
        position: the first sample's position in this loader's order.
        lane: see `Ticket`.
        checksum: covers all indices of the epoch up to this batch; 0 unless the sampler draws, see `sampler_state`.
    """

    __slots__ = (
        "_sample_keys",
        "builder",
        "checksum",
        "data",
        "epoch",
        "error",
        "failed",
        "first_failed",
        "given",
        "handled",
        "indices",
        "keys",
        "left_out",
        "ordinal",
        "position",
        "recorders",
        "retries",
        "size",
        "skipped",
        "where",
    )

    def __init__(
        self,
        units: int,
        indices: Any,
        *,
        size: int,
        keys: StreamKeys,
        recorders: list[Recorder],
        epoch: int,
        ordinal: int,
        position: int,
        lane: int = 0,
        checksum: int = 0,
    ) -> None:
        super().__init__(units, lane)
        self.indices = indices
        self.given: Any = None  # a copy of what the sampler gave, for `__getitems__` and processes
        self.size = size
        self.keys = keys
        self.recorders = recorders
        self.epoch = epoch
        self.ordinal = ordinal
        self.position = position
        self.checksum = checksum
        self.builder: BatchBuilder | None = None
        self._sample_keys: NDArray[np.uint64] | None = None
        # Position -> the error, and where it happened. The batch raises the one at the lowest position.
        self.failed: dict[int, tuple[Exception, str]] = {}
        self.first_failed = units  # a position in `failed`, not always the lowest; or `units`
        self.handled: dict[int, Exception] = {}  # position -> error that on_error handled
        self.skipped: set[int] = set()  # positions that on_error skipped
        self.retries: deque[int] = deque()  # the error number of each read that was repeated
        # For the loop: data or an error. Neither if on_error skipped the one sample (without batching).
        self.data: Any = None
        self.error: Exception | None = None
        self.where = str(self)
        self.left_out = False

    def __str__(self) -> str:
        return f"batch {self.ordinal} of epoch {self.epoch}"

    def release(self) -> None:
        """Drop the samples. If a user keeps an error, its traceback keeps this batch alive."""
        self.builder = DISCARD
        self.data = None

    def first_index(self, start: int) -> Any:
        """Return the index of the sample at `start`, or None past the end."""
        return next(islice(self.indices, start, None), None)

    def place(self, dataset: Any, start: int) -> Place:
        """Return where the sample at `start` is, for the report. `dataset` knows its file."""
        index = self.first_index(start)
        return Place(self.epoch, self.ordinal, index, file_of(dataset, index))

    def stream_key(self, at: int | None, *, seeded: bool = True) -> int:
        """Return the key of the random stream of the sample at a position, or of the batch if `at` is None."""
        if at is None:
            return self.keys.batch(self.position, next(iter(self.indices), None), seeded=seeded)
        return self.keys.sample(self.position + at, self.indices[at], seeded=seeded)

    def stream_keys(self, start: int, stop: int) -> NDArray[np.uint64]:
        """Return the keys of the random streams of samples `start` to `stop`, uint64[stop - start]."""
        # All keys at once. Threads that race here compute the same keys.
        if self._sample_keys is None:
            self._sample_keys = self.keys.samples(self.position, self.indices)
        return self._sample_keys[start:stop]
