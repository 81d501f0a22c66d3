"""What a worker process's answer means for the batch that the loop takes, and for the loop's measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastload._kit.user_errors import contained, file_of
from fastload.memory.batch import Batch
from fastload.order.lanes import LaneBatch
from fastload.processes.jobs import Answer, Read
from fastload.processes.packing import Forms, PackedError, UnknownClass, unpack, unpack_error
from fastload.processes.reader import RaisedInLoop
from fastload.reading.notices import Notices
from fastload.telemetry import Place


def fill(
    batch: Batch,
    answer: Answer,
    memories: Sequence[np.ndarray],
    raised: list[BaseException],
    pid: int,
    forms: Forms | None,
) -> bool:
    """Give a batch what a worker process made of it. Return False if that may run the user's code and must not.

    Args:
        batch: the ticket.
        answer: the process's.
        memories: those of the segments that the batch takes.
        raised: what `on_error` raised for this batch, in the loop's process.
        pid: the process.
        forms: unpacks plain data without code of the user's. None: that may run, as it does if unpickling makes objects
            of classes beyond torch's and NumPy's.
    """
    unpacks = unpack if forms is None else forms.unpack
    if answer.failure is not None and forms is not None:
        return False
    batch.nbytes, batch.left_out = answer.nbytes, answer.left_out
    if isinstance(batch, LaneBatch):
        assert answer.lane is not None
        batch.position, batch.size, batch.ended, state = answer.lane
        batch.indices = range(batch.position, batch.position + batch.size)
        if isinstance(state, PackedError):
            batch.state = unpack_error(state)
        else:
            try:
                batch.state = unpacks(state, ())
            except UnknownClass:
                return False
    if answer.failure is not None:
        _fail(batch, answer.failure, raised)
    if answer.data is not None and not batch.dropped:
        try:
            batch.data = unpacks(answer.data, memories)
        except UnknownClass:
            return False
        except BaseException as exc:
            batch.error = contained(exc)
            batch.where = f"{batch}; stage: hand over from worker process {pid}"
    return True


def _fail(batch: Batch, failure: Any, raised: list[BaseException]) -> None:
    packed, batch.where, batch.hint, handled, batch.skipped, retries = failure
    batch.retries.extend(retries)
    batch.handled = {k: unpack_error(error) for k, error in handled.items()}
    if packed is not None:
        error = unpack_error(packed)
        batch.error = contained(raised[error.args[0]]) if isinstance(error, RaisedInLoop) else error
    raised.clear()  # the traceback of each holds the frame that holds this list


def report(answer: Answer, batch: Batch, notices: Notices, dataset: Any) -> float:
    """Add what workers measured and noticed to their recorders and the notices. Return the CPU seconds since last."""
    for read in map(Read._make, answer.reads):
        recorder = batch.recorders[read.worker]
        if read.samples:

            def place() -> Place:
                index = batch.first_index(0)
                return Place(batch.epoch, batch.ordinal, index, file_of(dataset, index))

            recorder.run(read.samples, read.seconds, read.cpu_s, place)
        for stage, mean, count, computed in read.stages:
            recorder.add(stage, mean, count, cpu_seconds=computed)
    notices.warnings.extend(answer.warnings)
    if answer.waits is None:
        return 0.0
    core_wait_s, switches, cpu_s = answer.waits
    recorder.waited(core_wait_s, switches)
    return cpu_s
