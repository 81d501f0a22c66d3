"""How a worker reads a batch and finishes it: a source fills the run, and what is missing is read sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import Subset, default_collate, default_convert

from fastload._kit.user_errors import contained, sharing_note, shown_indices
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
from fastload.random.streams import Stream, Streams
from fastload.reading.failures import Failures
from fastload.reading.filling import Rows, find_filler, find_layout
from fastload.reading.iterable import Lanes
from fastload.reading.notices import Notices
from fastload.reading.sources import Batches, Reader, Source, Unbatched
from fastload.settings import Settings


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
        self._failures = Failures(settings, notices)
        self.source = _source_of(settings, self.pool, notices, self._failures)
        self._in_slots = not self.source.batches_in_parallel
        # Without workers and a seed, Python's and NumPy's functions draw from the loop's own state.
        draws = self.keyed and not self.source.copies
        self.streams = Streams(
            settings.modules() if draws else frozenset(),
            keyed=draws and not settings.iterable,
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
                batch.hint = sharing_note(self.notices.shared, batch.error)
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
            batch.hint = sharing_note(self.notices.shared, exc)

    def _make(self, batch: Batch, builder: BatchBuilder, collate_fn: Callable[[Any], Any]) -> None:
        skipped = batch.skipped
        if not self.settings.batched:
            batch.left_out = bool(skipped)
            if not skipped:
                batch.data = builder.make((), lambda samples: collate_fn(samples[0]))
        elif skipped and len(skipped) == batch.size:
            raise EmptyBatchError(
                f"on_error skipped all {batch.size} samples of {batch}. Return other samples from a callable on_error"
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
