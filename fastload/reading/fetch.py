"""How a worker reads a batch: fetchers read samples, put them into the batch, and finish it.

If user code raises, the batch carries the error, and the loop gets it in the batch's turn. Only Ctrl-C and SystemExit
in the main thread pass through. `choose_fetcher.make_fetcher` chooses the fetcher of a loader.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert

from fastload._kit.user_errors import (
    annotate,
    contained,
    file_note,
    sharing_note,
    shown,
    shown_indices,
    transient_errno,
)
from fastload.errors import EmptyBatchError
from fastload.memory.batch import Batch
from fastload.memory.collate import (
    BatchBuilder,
    ListBuilder,
    data_bytes,
    in_channels_last,
    make_builder,
)
from fastload.memory.slots import SlotPool
from fastload.random.streams import Stream
from fastload.reading.notices import Notices
from fastload.reading.rows import Filler
from fastload.reading.run_length import RUN_SECONDS
from fastload.settings import Settings


class _Skip:
    """The type of `SKIP`."""

    def __repr__(self) -> str:
        return "fastload.SKIP"

    def __reduce__(self) -> str:
        return "SKIP"  # one object, also after pickling


SKIP = _Skip()
"""An `on_error` callable returns this to leave a sample out of its batch."""

RETRY_SECONDS = 0.1
"""The wait before the first retry of a read. It doubles with each retry."""


class Reader(Protocol):
    """What a fetcher needs from the worker that reads. `WorkerContext` implements it."""

    dataset: Any
    stream: Stream
    filler: Filler | None
    """Fills rows from `dataset`, or None to read it sample by sample."""
    wait: Callable[[Callable[[], bool], float | None], None]
    """Waits until a condition holds, for at most a number of seconds; see `Changes.wait`."""


class Fetcher(ABC):
    """Reads and finishes the batches of a loader. All workers share one.

    Args:
        settings: the loader's arguments.
        pool: lends the memory of batches.
        notices: collects warnings for the loop.
    """

    batches_in_parallel = True
    """Whether each worker reads its own batch, rather than all of them the same one."""
    run_seconds = RUN_SECONDS
    """How long a run of samples, which a worker claims at once, should last."""
    copies = False
    """Whether making a batch only copies memory: no user code runs, and nothing is drawn."""
    decodes = False
    """Whether one reader serves all workers, which decode its samples."""

    def __init__(self, settings: Settings, pool: SlotPool, notices: Notices) -> None:
        self.notices = notices
        self.collates = settings.collate_fn not in (default_collate, default_convert)
        """Whether a user's function collates."""
        self._batched = settings.batched
        self._on_error = settings.on_error
        self._retries = settings.retries
        self._pool = pool

    def reader(self, worker: int, window: Any) -> Callable[[Any, Stream], None] | None:
        """Return a function that reads a worker's dataset in a second thread, or None if no second thread is needed."""
        return None

    def claim(self, window: Any, lane: int, reader: Reader) -> Any:
        """Wait for units to read in a lane, and claim some. Return None once the window is closed."""
        return window.claim(lane)

    def filler_of(self, dataset: Any) -> Filler | None:
        """Return the filler of a worker's own dataset, or None to read its samples one by one."""
        return None

    def is_light(self, batch_size: int | None) -> bool:
        """Return whether copying a batch takes less time than a hand-over between threads, and runs no user code."""
        return False

    @abstractmethod
    def read(self, batch: Batch, start: int, stop: int, reader: Reader) -> int:
        """Read units `start` to `stop` of `batch`, each sample in its random stream. Return the number of samples.

        Stop between two samples once the batch is dropped.
        """

    def _read_samples(self, batch: Batch, start: int, stop: int, reader: Reader) -> None:
        # No local name for the builder: an error that the user keeps holds this frame by its traceback, and must not
        # keep the samples. The batch itself holds only what `finish` and the loop leave in it.
        dataset, stream, indices = reader.dataset, reader.stream, batch.indices
        stream.source = batch
        held = stream.held
        k, attempt = start, 0
        while k < stop:
            try:
                # After a failure, only earlier samples can change what the batch raises. `first_failed` is the
                # position of some failure, not always of the first. So this may read too many samples, never too few.
                while k < stop and k <= batch.first_failed and not batch.dropped:
                    stream.at, stream.stale = k, True
                    if held is not None:
                        held.begin(batch.stream_key(k, seeded=stream.seeded))
                    batch.builder.put(k, dataset[indices[k]])  # type: ignore[union-attr]
                    k, attempt = k + 1, 0
                return
            except BaseException as exc:
                if not self._pause_for_retry(batch, exc, attempt, reader):
                    self._sample_failed(batch, k, dataset, exc)
                    k, attempt = k + 1, 0
                else:
                    attempt += 1

    def _pause_for_retry(
        self, batch: Batch, exc: BaseException, attempt: int, reader: Reader
    ) -> bool:
        """Count a retry, wait and return True; or return False if `exc` must not be retried."""
        number = transient_errno(exc) if attempt < self._retries else None
        if number is None:
            return False
        batch.retries.append(number)
        reader.wait(lambda: batch.dropped, RETRY_SECONDS * 2**attempt)
        return True

    def _sample_failed(self, batch: Batch, k: int, dataset: Any, exc: BaseException) -> None:
        index = batch.indices[k]
        error, stage = contained(exc), f"sample{file_note(dataset, index, exc)}"
        where = f"sample index {shown(index)}, position {k} of {batch}; stage: "
        if self._on_error == "raise" or not isinstance(exc, Exception):
            self._fail(batch, k, error, where + stage)
            return
        sample: Any = SKIP
        try:
            if self._on_error != "skip":
                annotate(error, where + stage, sharing_note(self.notices.shared, error))
                sample = self._on_error(index, error)
        except BaseException as raised:
            if raised is not exc:
                error, stage = contained(raised), "on_error"
            self._fail(batch, k, error, where + stage)
            del error, exc  # their tracebacks hold this frame
            return
        batch.handled[k] = error
        if sample is SKIP:
            batch.skipped.add(k)
        else:
            assert batch.builder is not None
            batch.builder.put(k, sample)

    @staticmethod
    def _fail(batch: Batch, k: int, error: Exception, where: str) -> None:
        batch.failed[k] = error, where
        batch.first_failed = min(batch.first_failed, k)

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
                self._make(batch, builder, collate_fn)
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
        if not self._batched:
            batch.left_out = bool(skipped)
            if not skipped:
                batch.data = builder.make((), lambda samples: collate_fn(samples[0]))
        elif skipped and len(skipped) == batch.size:
            raise EmptyBatchError(
                f"on_error skipped all {batch.size} samples of {batch}. Return other samples from a callable on_error"
            ) from batch.handled[max(skipped)]
        else:
            batch.data = builder.make(skipped, collate_fn)
            if self._pool.channels_last:
                batch.data = in_channels_last(batch.data)
        batch.nbytes = data_bytes(batch.data)


class IndexFetcher(Fetcher):
    """Reads a map-style dataset, by the indices of a sampler."""

    @abstractmethod
    def batch(self, indices: Any, **place: Any) -> Batch:
        """Return a new batch of the indices that the sampler gave. `place` holds the other arguments of `Batch`."""


class SingleFetcher(IndexFetcher):
    """Reads without batching: a "batch" is one sample, for any key that the sampler gave."""

    def batch(self, indices: Any, **place: Any) -> Batch:
        """See `IndexFetcher`. A list comes from a sampler that batches. Any other key is one sample."""
        size = len(indices) if isinstance(indices, list) else 1
        indices = _own(indices)
        batch = Batch(1, [indices], size=size, **place)
        batch.builder = ListBuilder([None])
        return batch

    def read(self, batch: Batch, start: int, stop: int, reader: Reader) -> int:
        """See `Fetcher`."""
        self._read_samples(batch, 0, 1, reader)
        return batch.size


class BatchFetcher(IndexFetcher):
    """Reads a batch with one call of the dataset's `__getitems__`."""

    def batch(self, indices: Any, **place: Any) -> Batch:
        """See `IndexFetcher`. A slice, a generator or another non-collection counts as one sample, as in torch."""
        given = _own(indices)
        one = [given if isinstance(given, slice) else type(given).__name__]
        indices = given if _is_collection(given) else one
        batch = Batch(1, indices, size=len(indices), **place)
        batch.given = given
        return batch

    def read(self, batch: Batch, start: int, stop: int, reader: Reader) -> int:
        """See `Fetcher`."""
        for attempt in count():
            if batch.dropped:
                break
            reader.stream.move(batch, None)
            try:
                batch.builder = ListBuilder(reader.dataset.__getitems__(batch.given))
            except BaseException as exc:
                again = not isinstance(batch.given, Iterator)
                if again and self._pause_for_retry(batch, exc, attempt, reader):
                    continue
                self._batch_failed(batch, exc, reader)
            break
        return batch.size

    def _batch_failed(self, batch: Batch, exc: BaseException, reader: Reader) -> None:
        handled = self._on_error != "raise" and isinstance(exc, Exception)
        if handled and _is_collection(batch.given):
            n = batch.first_failed = len(batch.indices)
            batch.builder = ListBuilder([None] * n)
            self._read_samples(batch, 0, n, reader)  # to find the bad samples
        else:
            where = f"__getitems__({shown_indices(batch.indices)}), {batch}; stage: sample"
            batch.failed[0] = contained(exc), where


class SampleFetcher(IndexFetcher):
    """Reads a batch sample by sample, for a `collate_fn`."""

    def batch(self, indices: Any, **place: Any) -> Batch:
        """See `IndexFetcher`."""
        indices = _own(indices)
        if not isinstance(indices, list | tuple):
            indices = list(indices)
        n = len(indices)
        batch = Batch(max(1, n), indices, size=n, **place)
        batch.builder = self._builder(n)
        return batch

    def _builder(self, n: int) -> BatchBuilder:
        return ListBuilder([None] * n)

    def read(self, batch: Batch, start: int, stop: int, reader: Reader) -> int:
        """See `Fetcher`."""
        stop = min(stop, len(batch.indices))
        self._read_samples(batch, start, stop, reader)
        return stop - start


class SlotFetcher(SampleFetcher):
    """Reads a batch sample by sample, for torch's `default_collate`, into slots."""

    batches_in_parallel = False

    def _builder(self, n: int) -> BatchBuilder:
        return make_builder(n, self._pool)

    def _make(self, batch: Batch, builder: BatchBuilder, collate_fn: Callable[[Any], Any]) -> None:
        super()._make(batch, builder, self._pool.collate)


def _own(indices: Any) -> Any:
    """Return a copy of indices that may change: a sampler may reuse its list, array or tensor."""
    if type(indices) is list:
        return indices.copy()
    if isinstance(indices, torch.Tensor):
        return indices.clone()
    return copy.copy(indices) if isinstance(indices, list | np.ndarray) else indices


def _is_collection(given: Any) -> bool:
    return isinstance(given, Sized) and isinstance(given, Iterable)
