"""What a worker does with the units of a ticket: read samples, put them into the batch, finish it.

What user code raises becomes part of the batch, at its place in the order. Only Ctrl-C and SystemExit in the main
thread pass through. `choose_fetcher.make_fetcher` chooses how a loader's batches are read.
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

from fastload.batch import Batch
from fastload.collate import BatchBuilder, ListBuilder, data_bytes, in_channels_last, make_builder
from fastload.errors import EmptyBatchError
from fastload.notices import Notices
from fastload.randomness import Stream
from fastload.rows import Filler
from fastload.settings import Settings
from fastload.slots import SlotPool
from fastload.user_errors import (
    annotate,
    contained,
    file_note,
    sharing_note,
    shown,
    shown_indices,
    transient_errno,
)


class _Skip:
    """The type of `SKIP`."""

    def __repr__(self) -> str:
        return "fastload.SKIP"

    def __reduce__(self) -> str:
        return "SKIP"  # one object, also after pickling


SKIP = _Skip()
"""What an `on_error` callable returns to leave a sample out of its batch."""

RETRY_SECONDS = 0.1
"""The wait before the first retry of a read; it doubles with each."""


class Reader(Protocol):
    """What a worker reads through."""

    dataset: Any
    stream: Stream
    filler: Filler | None
    """What fills rows from `dataset`; None: it is read sample by sample."""
    pause: Callable[[Batch, float], None]
    """Waits for some seconds, or until the batch is dropped."""


class Fetcher(ABC):
    """Reads and finishes batches of one dataset. Shared by all workers.

    Args:
        settings: the loader's arguments.
        pool: where the memory of batches comes from.
        notices: of what the loop is to warn.
    """

    whole = True
    """Whether a batch is one unit of work: read in one call."""
    batches_in_parallel = True
    """Whether workers are busy with a batch each, rather than all with one."""
    fills = False
    """Whether the dataset fills the rows of a batch itself: then a run of samples is one call."""
    copies = False
    """Whether a batch is only copied together: no code of the user's runs, and nothing is drawn."""

    def __init__(self, settings: Settings, pool: SlotPool, notices: Notices) -> None:
        self.notices = notices
        self.collates = settings.collate_fn not in (default_collate, default_convert)
        """Whether a batch is made by a function of the user's."""
        self._batched = settings.batched
        self._on_error = settings.on_error
        self._retries = settings.retries
        self._pool = pool

    def filler_of(self, dataset: Any) -> Filler | None:
        """Return what fills rows from a worker's own dataset, or None if samples are read one by one."""
        return None

    def is_light(self, batch_size: int | None) -> bool:
        """Return whether batches run no code of the user's and are made sooner than handed to a thread and back."""
        return False

    @abstractmethod
    def read(self, batch: Batch, start: int, stop: int, reader: Reader) -> None:
        """Read units `start` to `stop` of `batch`, each sample in its random stream.

        Gives up between samples once the batch is dropped.
        """

    def _read_samples(self, batch: Batch, start: int, stop: int, reader: Reader) -> None:
        # No name here for the builder: an error that the user keeps holds this frame with its traceback,
        # and of the batch only what `finish` and the loop leave in it.
        dataset, stream, indices = reader.dataset, reader.stream, batch.indices
        stream.source = batch
        held = stream.held
        k, attempt = start, 0
        while k < stop:
            try:
                # After a failure only samples before it can change what the batch raises.
                # `first_failed` is the place of some failure, if not of the first, so a sample too
                # many may be read and never one too few.
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
        """Return False unless `exc` may be retried; otherwise count the retry, wait, and return True."""
        number = transient_errno(exc) if attempt < self._retries else None
        if number is None:
            return False
        batch.retries.append(number)
        reader.pause(batch, RETRY_SECONDS * 2**attempt)
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
            del error, exc  # whose tracebacks hold this frame
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
        """Make the batch of its samples, or its error of theirs, in the random stream of the batch.

        Called once, by the worker that delivered the last of them, with its own `collate_fn`.
        """
        builder, batch.builder = batch.builder, None
        if stream.source is not batch or stream.at is not None:
            stream.move(batch, None)  # else it goes on where `__getitems__` left it
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
                where += f", of which {shown_indices(replaced)} are what on_error returned"
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
                f"all {batch.size} samples of {batch} were skipped by on_error"
            ) from batch.handled[max(skipped)]
        else:
            batch.data = builder.make(skipped, collate_fn)
            if self._pool.channels_last:
                batch.data = in_channels_last(batch.data)
        batch.nbytes = data_bytes(batch.data)


class IndexFetcher(Fetcher):
    """Reads what a sampler gives indices of: a map-style dataset."""

    @abstractmethod
    def batch(self, indices: Any, **place: Any) -> Batch:
        """Return a new batch of what the sampler gave, to be issued; `place` as of `Batch`."""


class SingleFetcher(IndexFetcher):
    """Without batching: a "batch" is one sample, read for whatever key the sampler gave."""

    def batch(self, indices: Any, **place: Any) -> Batch:
        """See `IndexFetcher`. A list comes from a sampler that batches; any other key is one sample."""
        size = len(indices) if isinstance(indices, list) else 1
        indices = _own(indices)
        batch = Batch(1, [indices], size=size, **place)
        batch.builder = ListBuilder([None])
        return batch

    def read(self, batch: Batch, start: int, stop: int, reader: Reader) -> None:
        """See `Fetcher`."""
        self._read_samples(batch, 0, 1, reader)


class BatchFetcher(IndexFetcher):
    """Reads a batch by one call of the dataset's `__getitems__`."""

    def batch(self, indices: Any, **place: Any) -> Batch:
        """See `IndexFetcher`. What is no collection (a slice, a generator) counts as one sample, as in torch."""
        given = _own(indices)
        one = [given if isinstance(given, slice) else type(given).__name__]
        indices = given if _is_collection(given) else one
        batch = Batch(1, indices, size=len(indices), **place)
        batch.given = given
        return batch

    def read(self, batch: Batch, start: int, stop: int, reader: Reader) -> None:
        """See `Fetcher`."""
        for attempt in count():
            if batch.dropped:
                return
            reader.stream.move(batch, None)
            try:
                batch.builder = ListBuilder(reader.dataset.__getitems__(batch.given))
            except BaseException as exc:
                again = not isinstance(batch.given, Iterator)
                if again and self._pause_for_retry(batch, exc, attempt, reader):
                    continue
                self._batch_failed(batch, exc, reader)
            return

    def _batch_failed(self, batch: Batch, exc: BaseException, reader: Reader) -> None:
        handled = self._on_error != "raise" and isinstance(exc, Exception)
        if handled and _is_collection(batch.given):
            n = batch.first_failed = len(batch.indices)
            batch.builder = ListBuilder([None] * n)
            self._read_samples(batch, 0, n, reader)  # which shows the bad samples
        else:
            where = f"__getitems__({shown_indices(batch.indices)}), {batch}; stage: sample"
            batch.failed[0] = contained(exc), where


class SampleFetcher(IndexFetcher):
    """Reads a batch sample by sample, for a `collate_fn`."""

    whole = False

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

    def read(self, batch: Batch, start: int, stop: int, reader: Reader) -> None:
        """See `Fetcher`."""
        self._read_samples(batch, start, min(stop, len(batch.indices)), reader)


class SlotFetcher(SampleFetcher):
    """Reads a batch sample by sample, for torch's `default_collate`, into slots."""

    batches_in_parallel = False

    def _builder(self, n: int) -> BatchBuilder:
        return make_builder(n, self._pool)

    def _make(self, batch: Batch, builder: BatchBuilder, collate_fn: Callable[[Any], Any]) -> None:
        super()._make(batch, builder, self._pool.collate)


def _own(indices: Any) -> Any:
    """Return indices that stay as they are: a sampler may use its list, array or tensor again."""
    if type(indices) is list:
        return indices.copy()
    if isinstance(indices, torch.Tensor):
        return indices.clone()
    return copy.copy(indices) if isinstance(indices, list | np.ndarray) else indices


def _is_collection(given: Any) -> bool:
    return isinstance(given, Sized) and isinstance(given, Iterable)
