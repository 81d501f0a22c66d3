"""How a worker reads the samples that it claimed, in their random streams, and finishes the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter, thread_time
from typing import Any

from fastload._kit.torch_private import current_worker_info, set_worker_info
from fastload._kit.user_errors import file_of
from fastload.memory.batch import Batch
from fastload.random.held import NewGenerators
from fastload.reading.failures import Wait
from fastload.reading.fetch import Fetcher
from fastload.reading.modes import Modes
from fastload.safety import WorkerCopies
from fastload.telemetry import Place, recording, span


class WorkerContext:
    """What one worker, or the loop without workers, reads with: dataset, collate function and random stream.

    It is made in the worker's thread, and first calls the `worker_init_fn`, if there is one.

    Args:
        own: the worker's copies of dataset and functions.
        info: what `get_worker_info()` returns in the dataset. None, for the loop, changes nothing: if the loop runs
            inside a sample, the dataset sees the outer worker's info. Nor does it call a `worker_init_fn`.
        fetcher: reads the batches.
        wait: waits until a condition holds, see `Changes.wait`.
        modes: torch's modes in which samples are read.
        lane: the window's lane from which the worker claims.
        others: finds the generators that are the worker's alone, beside those in its copies.
    """

    def __init__(
        self,
        own: WorkerCopies,
        info: Any,
        fetcher: Fetcher,
        wait: Wait,
        modes: Modes,
        *,
        lane: int = 0,
        others: Callable[[], Sequence[tuple[str, Any]]] = tuple,
    ) -> None:
        init_fn = None if info is None else own.init_fn
        if init_fn is not None:
            set_worker_info(info)
            try:
                with modes.entered():
                    init_fn(info.id)
            finally:
                set_worker_info(None)
        streams, found = fetcher.streams, own.generators
        if streams.keyed and (found is None or init_fn is not None):
            found = [*own.current_generators(), *others()]
        self.stream = stream = streams.make(found, initialised=init_fn is not None)
        self.worker = 0 if info is None else info.id  # selects its recorder
        self.dataset = own.dataset
        self.collate_fn = own.collate_fn
        self.info = info
        self.lane = lane
        self.wait = wait
        self.modes = modes
        self.fetcher = fetcher
        self.filler = fetcher.source.filler_of(own.dataset)
        self._new: dict[str, NewGenerators] = {}
        self._blocks = {"sample": 0, "collate": 0}
        if (
            self.worker == 0 and fetcher.keyed and stream.keyed
        ):  # a search is slow: one for all workers
            for stage in ("sample", "collate") if fetcher.collates else ("sample",):
                self._new[stage] = NewGenerators(
                    found or (), own.current_generators, stream.noticed
                )

    def looking(self, stage: str) -> AbstractContextManager[None]:
        """Return the span of a stage. After its fourth and its eighth block, look for generators that user code stored.

        Not after the first: a walk over the dataset would hold up the workers that are just starting.
        """
        if stage not in self._new:
            return span(stage)
        self._blocks[stage] += 1
        return _looking(stage, self._new[stage]) if self._blocks[stage] in (4, 8) else span(stage)


@contextmanager
def _looking(stage: str, new: NewGenerators) -> Iterator[None]:
    try:
        with span(stage):
            yield
    finally:
        new.look()


def read_run(batch: Batch, start: int, stop: int, context: WorkerContext) -> float:
    """Read units `start` to `stop` of a batch, and return the seconds that it took."""
    recorder = batch.recorders[context.worker]
    started = perf_counter()
    # If no user code runs, skip the preparations for it: a batch may take only 30 us.
    if context.fetcher.source.copies:
        samples = context.fetcher.read(batch, start, stop, context)
        cpu_s = perf_counter() - started
    else:
        samples, cpu_s = _read(batch, start, stop, context)
    seconds = perf_counter() - started
    if samples:  # 0 if the lane had ended, or the batch was dropped

        def place() -> Place:
            index = batch.first_index(start)
            return Place(batch.epoch, batch.ordinal, index, file_of(context.dataset, index))

        recorder.run(samples, seconds, cpu_s, place)
    # Before the loop can take the batch, so that it warns at its next `next()` at the latest.
    _tell(context)
    return seconds


def _tell(context: WorkerContext) -> None:
    while context.stream.noticed:
        what = context.stream.noticed.pop()
        if context.fetcher.keyed:
            sentence = f"{type(context.dataset).__name__} {what}"
            context.fetcher.notices.warn(what, sentence, UserWarning)


def _read(batch: Batch, start: int, stop: int, context: WorkerContext) -> tuple[int, float]:
    """Read the claimed samples with worker info and recorder in place. Return their number, and the CPU seconds."""
    outer = current_worker_info()
    set_worker_info(context.info or outer)
    cpu_started = thread_time()
    try:
        own = recording(batch.recorders[context.worker])
        with own, context.looking("sample"):
            samples = context.fetcher.read(batch, start, stop, context)
    finally:
        # Not while collating: if torch's collate finds a worker info, it uses shared memory.
        set_worker_info(outer)
    return samples, thread_time() - cpu_started


def finish(batch: Batch, context: WorkerContext) -> None:
    """Make a batch, all of whose samples are read."""
    started = perf_counter()
    with context.looking("collate"):
        context.fetcher.finish(batch, context.collate_fn, context.stream)
    batch.recorders[context.worker].add("collate", perf_counter() - started)
    if batch.dropped:
        batch.release()  # `discard` may have done so before the data was made
    _tell(context)
