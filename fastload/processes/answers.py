"""What a worker process's answer means for the batch that the loop takes, and for the loop's measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastload._kit.user_errors import contained, file_of
from fastload.memory.batch import Batch
from fastload.order.lanes import LaneBatch
from fastload.processes.jobs import Answer, Read
from fastload.processes.packed_errors import PackedError, unpack_error
from fastload.processes.packing import unpack
from fastload.processes.reader import RaisedInLoop
from fastload.reading.notices import Notices
from fastload.telemetry import Place


def fill(
    batch: Batch,
    answer: Answer,
    memories: Sequence[np.ndarray],
    raised: list[BaseException],
    pid: int,
) -> None:
    """Give a batch what a worker process made of it.

    Args:
        batch: the ticket.
        answer: the process's.
        memories: those of the segments that the batch takes.
        raised: what `on_error` raised for this batch, in the loop's process. It is cleared.
        pid: the process.
    """
    batch.nbytes, batch.left_out = answer.nbytes, answer.left_out
    if isinstance(batch, LaneBatch):
        assert answer.lane is not None
        batch.position, batch.size, batch.ended, state = answer.lane
        batch.indices = range(batch.position, batch.position + batch.size)
        batch.state = unpack_error(state) if isinstance(state, PackedError) else state
    if answer.failure is not None:
        packed, batch.where, batch.hint, handled, batch.skipped, retries = answer.failure
        batch.retries.extend(retries)
        batch.handled = {k: unpack_error(error) for k, error in handled.items()}
        if packed is not None:
            error = unpack_error(packed)
            batch.error = (
                contained(raised[error.args[0]]) if isinstance(error, RaisedInLoop) else error
            )
    raised.clear()  # the traceback of each holds the frame that holds this list
    if answer.data is not None and not batch.dropped:
        try:
            batch.data = unpack(answer.data, memories)
        except BaseException as exc:
            batch.error = contained(exc)
            batch.where = f"{batch}; stage: hand over from worker process {pid}"


def report(answer: Answer, batch: Batch, notices: Notices, dataset: Any) -> None:
    """Add what workers measured and noticed to their recorders and the notices."""
    for read in [Read(*read) for read in answer.reads]:
        recorder = batch.recorders[read.worker]
        if read.samples:

            def place() -> Place:
                index = batch.first_index(0)
                return Place(batch.epoch, batch.ordinal, index, file_of(dataset, index))

            recorder.run(read.samples, read.seconds, read.cpu_s, place)
        for stage, mean, count, computed in read.stages:
            recorder.add(stage, mean, count, cpu_seconds=computed)
    notices.warnings.extend(answer.warnings)
    if answer.waits is not None:  # of the last reader
        recorder.waited(*answer.waits[:2])
