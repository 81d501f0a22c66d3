"""What a worker's answer means for the batch that the loop takes, and for the loop's measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastload._kit.user_errors import contained, file_of
from fastload.memory.batch import Batch
from fastload.order.lanes import LaneBatch
from fastload.processes.jobs import Answer
from fastload.processes.packing import PackedError, unpack, unpack_error
from fastload.processes.reader import RaisedInLoop
from fastload.reading.notices import Notices
from fastload.telemetry import Place, Recorder


def fill(
    batch: Batch,
    answer: Answer,
    memories: Sequence[np.ndarray],
    raised: Sequence[BaseException],
    pid: int,
) -> None:
    """Give a batch what a worker made of it.

    Args:
        batch: the ticket.
        answer: the worker's.
        memories: those of the segments that the batch takes.
        raised: what `on_error` raised for this batch, in the loop's process.
        pid: the worker's process.
    """
    batch.nbytes, batch.left_out = answer.nbytes, answer.left_out
    batch.where, batch.hint = answer.where, answer.hint
    batch.skipped = answer.skipped
    batch.retries.extend(answer.retries)
    batch.handled = {k: unpack_error(error) for k, error in answer.handled.items()}
    if isinstance(batch, LaneBatch):
        assert answer.lane is not None
        batch.position, batch.size, batch.ended, state = answer.lane
        batch.indices = range(batch.position, batch.position + batch.size)
        batch.state = unpack_error(state) if isinstance(state, PackedError) else state
    if answer.error is not None:
        error = unpack_error(answer.error)
        batch.error = contained(raised[error.args[0]]) if isinstance(error, RaisedInLoop) else error
    elif answer.data is not None and not batch.dropped:
        try:
            batch.data = unpack(answer.data, memories)
        except BaseException as exc:
            batch.error = contained(exc)
            batch.where = f"{batch}; stage: hand over from worker process {pid}"


def report(
    answer: Answer, batch: Batch, recorder: Recorder, notices: Notices, dataset: Any
) -> None:
    """Add what a worker measured and noticed to the recorder and the notices of the loop."""
    samples, seconds, cpu_s = answer.run
    if samples:

        def place() -> Place:
            index = batch.first_index(0)
            return Place(batch.epoch, batch.ordinal, index, file_of(dataset, index))

        recorder.run(samples, seconds, cpu_s, place)
    for stage, mean, count, computed in answer.observed:
        recorder.add(stage, mean, count, cpu_seconds=computed)
    core_wait_s, switches, _ = answer.waits
    recorder.waited(core_wait_s, switches)
    notices.warnings.extend(answer.warnings)
