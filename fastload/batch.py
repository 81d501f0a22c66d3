"""`Batch`, the ticket that carries samples from the sampler to the loop."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.collate import DISCARD, BatchBuilder
from fastload.stream_keys import StreamKeys
from fastload.telemetry import Recorder
from fastload.window import Ticket


class Batch(Ticket):
    """A batch on its way through the pipeline: the indices of its samples, then its data or its error.

    `epoch` and `position` (of its first sample, in this loader's order) with the index of a sample
    are all that the sample may depend on: with the seed, they are the key of its random stream.
    `ordinal` counts the batches of the epoch, `size` the samples as the sampler gave them. `checksum` is that of all
    indices of the epoch up to this batch, 0 unless the sampler draws; see `sampler_state.checksum`.
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
        "hint",
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
        self.given: Any = None  # what the sampler gave, for `__getitems__`
        self.size = size
        self.keys = keys
        self.recorders = recorders
        self.epoch = epoch
        self.ordinal = ordinal
        self.position = position
        self.checksum = checksum
        self.builder: BatchBuilder | None = None
        self._sample_keys: NDArray[np.uint64] | None = None
        # Position -> error and where it happened. The batch raises the one at the lowest position.
        self.failed: dict[int, tuple[Exception, str]] = {}
        self.first_failed = (
            units  # a position in `failed`, not always the lowest; `units` if none failed
        )
        self.handled: dict[int, Exception] = {}  # position -> error that on_error took
        self.skipped: set[int] = set()  # positions that on_error left out
        self.retries: deque[int] = deque()  # the error number of each read that was tried again
        # For the loop: data or an error. Neither if a single sample, without batching, was skipped.
        self.data: Any = None
        self.error: Exception | None = None
        self.where = str(self)
        self.hint = ""  # why the error may have come
        self.left_out = False

    def __str__(self) -> str:
        return f"batch {self.ordinal} of epoch {self.epoch}"

    def release(self) -> None:
        """Keep no samples: an error of one of them, kept by the user, keeps this batch by its traceback."""
        self.builder = DISCARD
        self.data = None

    def first_index(self, start: int) -> Any:
        """Return the index of the sample at `start`, or None past the end."""
        return next(islice(self.indices, start, None), None)

    def stream_key(self, at: int | None, *, seeded: bool = True) -> int:
        """Return the key of the random stream of the sample at a position, or (None) of the batch."""
        if at is None:
            return self.keys.batch(self.position, next(iter(self.indices), None), seeded=seeded)
        return self.keys.sample(self.position + at, self.indices[at], seeded=seeded)

    def stream_keys(self, start: int, stop: int) -> NDArray[np.uint64]:
        """Return the keys of the random streams of samples `start` to `stop`, uint64[stop - start]."""
        # Of all at once; threads that do so at the same time find the same.
        if self._sample_keys is None:
            self._sample_keys = self.keys.samples(self.position, self.indices)
        return self._sample_keys[start:stop]
