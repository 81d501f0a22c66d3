"""How a worker reads a batch and finishes it, with its own objects, each sample in its random stream.

A source fills the run, and what is missing is read sample by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import perf_counter, thread_time
from typing import Any

import torch
from torch.utils.data import Subset, default_collate, default_convert

from fastload._kit.torch_private import current_worker_info, set_worker_info
from fastload._kit.user_errors import contained, shown_indices
from fastload.errors import EmptyBatchError
from fastload.memory.batch import Batch
from fastload.memory.collate import (
    BatchBuilder,
    data_bytes,
    in_channels_last,
    list_builder,
    make_builder,
)
from fastload.memory.slots import SlotPool
from fastload.random.held import NewGenerators
from fastload.random.streams import Stream, Streams
from fastload.reading.failures import Failures, Wait
from fastload.reading.filling import Rows, find_layout
from fastload.reading.iterable import Lanes
from fastload.reading.modes import Modes
from fastload.reading.notices import Notices
from fastload.reading.rows import find_filler
from fastload.reading.sources import Batches, Reader, Source, Unbatched
from fastload.safety import WorkerCopies
from fastload.settings import Settings
from fastload.telemetry import recording, span


class Fetcher:
    """Reads and finishes the batches of a loader. All workers share one.

    Args:
        settings: the loader's arguments.
        notices: collects warnings for the loop.
        pool: lends the memory of batches. None: a new one.

    Raises ValueError if these arguments can load nothing.
    """

    def __init__(self, settings: Settings, notices: Notices, pool: SlotPool | None = None) -> None:
        settings.check(loads=True)
        self.settings, self.notices, self.keyed = settings, notices, settings.keyed
        self.collates = settings.collate_fn not in (default_collate, default_convert)
        """Whether a user's function collates."""
        self.pool = pool or SlotPool(channels_last=settings.memory_format is torch.channels_last)
        self._failures = Failures(settings)
        self.source = _source_of(settings, self.pool, notices, self._failures)
        self._in_slots = not self.source.batches_in_parallel
        # Without workers and a seed, Python's and NumPy's functions draw from the loop's own state.
        draws = self.keyed and not self.source.copies
        self.streams = Streams(
            settings.modules() if draws else frozenset(),
            keyed=draws and (settings.exact or not settings.iterable),
            seeded=settings.seed is not None,
        )
        """Makes the random streams of the workers."""

    @property
    def is_light(self) -> bool:
        """Whether the loop copies a batch faster than a worker could hand it over, and no user code runs."""
        settings = self.settings
        return settings.worker_init_fn is None and self.source.is_light(settings.samples_per_batch)

    def read(self, batch: Batch, start: int, stop: int, reader: Reader) -> int:
        """Read units `start` to `stop` of `batch`, each sample in its random stream. Return the number of samples."""
        for missing in self.source.fill(batch, start, stop, reader):
            self._read_samples(batch, missing.start, missing.stop, reader)
        return batch.size if batch.units == 1 else stop - start

    def _read_samples(self, batch: Batch, start: int, stop: int, reader: Reader) -> None:
        dataset, stream, indices = reader.dataset, reader.stream, batch.indices
        k, failed, attempt = start, -1, 0
        while k < stop:
            try:
                put, move = batch.builder.put, stream.must_move  # type: ignore[union-attr]
                for k in range(k, stop):  # noqa: B020
                    # After a failure, only earlier samples can change what the batch raises. `first_failed` is the
                    # position of some failure, not always of the first. So this may read too many, never too few.
                    if k > batch.first_failed or batch.dropped:
                        return
                    if move:
                        stream.move(batch, k)
                    else:
                        stream.source, stream.at, stream.stale = batch, k, True
                    put(k, dataset[indices[k]])
                return
            except BaseException as exc:
                attempt, failed = attempt + 1 if k == failed else 0, k
                if not self._failures.may_retry(batch, exc, attempt, reader.wait):
                    self._failures.of_sample(batch, k, dataset, exc)
                    k += 1
            finally:
                # An error that the user keeps holds this frame by its traceback, and must not keep the samples. The
                # batch itself holds only what `finish` and the loop leave in it.
                put = None

    def finish(self, batch: Batch, collate_fn: Callable[[Any], Any], stream: Stream) -> None:
        """Make the batch, or set the error that it raises, in the random stream of the batch.

        The worker that delivered the last sample calls this once, with its own `collate_fn`.
        """
        builder, batch.builder = batch.builder, None
        if stream.source is not batch or stream.at is not None:
            stream.move(batch, None)  # after `__getitems__` the stream continues
        try:
            if batch.failed:
                batch.error, batch.where = batch.failed[min(batch.failed)]
                batch.failed.clear()  # the errors refer to the batch by their tracebacks
            elif builder is not None:
                self._make(batch, builder, self.pool.collate if self._in_slots else collate_fn)
        except EmptyBatchError as exc:
            batch.error = exc
        except BaseException as exc:
            where = f"{batch}; stage: collate; sample indices {shown_indices(batch.indices)}"
            if replaced := [batch.indices[k] for k in sorted(batch.handled.keys() - batch.skipped)]:
                where += f", of which on_error replaced {shown_indices(replaced)}"
            batch.error, batch.where = contained(exc), where

    def _make(self, batch: Batch, builder: BatchBuilder, collate_fn: Callable[[Any], Any]) -> None:
        skipped = batch.skipped
        if not self.settings.batched:
            batch.left_out = bool(skipped)
            if not skipped:
                batch.data = builder.make((), lambda samples: collate_fn(samples[0]))
        elif skipped and len(skipped) == batch.size:
            raise EmptyBatchError(
                f"on_error skipped each sample of {batch}. Return other samples from a callable on_error"
            ) from batch.handled[max(skipped)]
        else:
            batch.data = builder.make(skipped, collate_fn)
            if self.pool.channels_last:
                batch.data = in_channels_last(batch.data)
        batch.nbytes = data_bytes(batch.data)


def _source_of(settings: Settings, pool: SlotPool, notices: Notices, failures: Failures) -> Source:
    """Return the source of a loader: the first that applies."""
    dataset = settings.dataset
    if settings.iterable:
        return Lanes(settings, notices, failures)
    if not settings.batched:
        return Unbatched(list_builder)
    slots = settings.collate_fn is default_collate
    found = find_filler(dataset, notices) if slots else None
    if found is not None and (layout := find_layout(found, dataset, notices)) is not None:
        unchanged = dataset if settings.worker_init_fn is None else None
        return Rows(pool, notices, found, layout, unchanged)
    if _reads_batches(dataset):
        return Batches(failures)
    if slots:
        return Source(partial(make_builder, pool=pool), batches_in_parallel=False)
    return Source(list_builder)


def _reads_batches(dataset: Any) -> bool:
    """Return whether the dataset has its own `__getitems__`. That of torch's Subset may only loop over samples."""
    torchs = getattr(Subset.__getitems__, "__module__", "") == Subset.__module__  # and not replaced
    while torchs and type(dataset) is Subset and "__getitems__" not in vars(dataset):
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


# ---- what each worker reads with ----


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
        alone: whether no other worker shares modules with it, so that their generators are its own.
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
        alone: bool = False,
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
        current = partial(own.current_generators, alone=alone)
        if streams.keyed and (found is None or init_fn is not None):
            found = current()
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
        # A search is slow: one for all workers.
        if self.worker == 0 and fetcher.keyed and stream.keyed:
            for stage in ("sample", "collate") if fetcher.collates else ("sample",):
                self._new[stage] = NewGenerators(found or (), current, stream.noticed)

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
        recorder.run(samples, seconds, cpu_s, partial(batch.place, context.dataset, start))
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
