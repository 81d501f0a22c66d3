"""What a worker process made of a batch and measured: for the batch that the loop takes, and for its recorders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fastload._kit.user_errors import contained
from fastload.memory.batch import Batch
from fastload.order.lanes import LaneBatch
from fastload.processes.jobs import RaisedInLoop
from fastload.processes.packing import Packed, unpack
from fastload.reading.notices import Notices
from fastload.telemetry.remote_reads import Counts

_FIELDS = "nbytes", "left_out", "error", "where", "handled", "skipped", "retries"
_OF_LANES = "position", "size", "indices", "ended", "state"


def fields_of(batch: Batch) -> dict[str, Any]:
    """Return the fields of a batch that reading it has set, by name: all but the data."""
    fields = {name: value for name in _FIELDS if (value := getattr(batch, name))}
    if isinstance(batch, LaneBatch):
        fields |= {name: getattr(batch, name) for name in _OF_LANES}
    return fields


class Outcome(NamedTuple):
    """What a worker process made of a batch. It travels as a plain tuple."""

    number: int
    fields: dict[str, Any]
    """What `fields_of` returned."""
    data: Packed | None
    used: list[tuple[tuple[int, int], int, int]]
    """The segments that it takes: key, bytes used, and size if the process created it (its descriptor comes along)."""
    reads: list[Any]
    """What `Observed.read` returned, of each worker that read a run. The last one has finished the batch."""
    waits: tuple[float, int, float, tuple[int, int]] | None
    """Of the last worker, if it looked: seconds without a core, and how often it blocked, since its last look. Of its
    process, since the start: CPU seconds, and how often the GIL was probed and in use."""
    warnings: list[tuple[str, str, type[Warning]]]
    fetched: Counts | None
    """What the process has read from object stores since it began, or None if that is nothing."""
    kept: bool = False
    """Whether the dataset still sees the memory of the batch. Then it is never lent again."""

    def fill(
        self, batch: Batch, memories: Sequence[np.ndarray], raised: list[BaseException], pid: int
    ) -> None:
        """Give a batch what the process made of it.

        Args:
            batch: the ticket.
            memories: those of the segments that the batch takes.
            raised: what `on_error` raised for this batch, in the loop's process. It is cleared.
            pid: the process.
        """
        for name, value in self.fields.items():
            setattr(batch, name, value)
        if isinstance(batch.error, RaisedInLoop):
            batch.error = contained(raised[batch.error.args[0]])
        raised.clear()  # the traceback of each holds the frame that holds this list
        if self.data is not None and not batch.dropped:
            try:
                batch.data = unpack(self.data, memories)
            except BaseException as exc:
                batch.error = contained(exc)
                batch.where = f"{batch}; stage: hand over from worker process {pid}"

    def report(self, batch: Batch, notices: Notices, dataset: Any) -> None:
        """Add what workers measured and noticed to their recorders and the notices."""
        place = partial(batch.place, dataset, 0)
        for worker, samples, seconds, cpu_s, stages in self.reads:
            recorder = batch.recorders[worker]
            if samples:
                recorder.run(samples, seconds, cpu_s, place)
            for stage, mean, count, computed in stages:
                recorder.add(stage, mean, count, cpu_seconds=computed)
        notices.warnings.extend(self.warnings)
        if self.waits is not None:  # of the last reader
            recorder.waited(*self.waits[:2])
