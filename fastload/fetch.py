"""What a worker does with the units of a ticket: read samples, put them into the batch, finish it.

What user code raises becomes part of the batch, at its place in the order; only Ctrl-C and
SystemExit in the main thread pass through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import count
from typing import Any, Literal, Protocol

from torch.utils.data import Subset, default_collate, default_convert

from fastload.batch import Batch
from fastload.collate import (
    Box,
    SampleBox,
    SlotBox,
    collate_box,
    data_bytes,
    in_channels_last,
)
from fastload.errors import EmptyBatchError
from fastload.faults import (
    annotate,
    contained,
    file_note,
    sharing_note,
    shown,
    shown_indices,
    transient_errno,
)
from fastload.randomness import Stream
from fastload.rows import Filler, NotPositions, Run, alike, filler, positions
from fastload.slots import Layout, SlotPool


class _Skip:
    """The type of `SKIP`."""

    def __repr__(self) -> str:
        return "fastload.SKIP"

    def __reduce__(self) -> str:
        return "SKIP"  # one object, also after pickling


SKIP = _Skip()
"""What an `on_error` callable returns to leave a sample out of its batch."""

LIGHT_BYTES = 1024 * 1024
"""Gathering a batch of this size costs about what two changes of threads cost: some 100 us."""

RETRY_SECONDS = 0.1
"""The wait before the first retry of a read; it doubles with each."""


OnError = Literal["raise", "skip"] | Callable[[Any, Exception], Any]


class _NoStream:
    """Where nothing may be drawn: which samples share a call of `fill_rows` depends on timing."""

    def stream_key(self, at: int | None, *, seeded: bool = True) -> int:
        raise RuntimeError(
            "fill_rows() drew random numbers from a global function. Which samples share a call depends on timing, so "
            "the batch would not be reproducible. Draw from `run.keys`, one key for each sample"
        )


_NO_STREAM = _NoStream()


class Reader(Protocol):
    """What a worker reads through."""

    dataset: Any
    stream: Stream
    filler: Filler | None
    """What fills rows from `dataset`; None: it is read sample by sample."""


class Fetcher:
    """Reads and finishes batches of one data set. Shared by all workers.

    `noticed` collects what the workers noticed of samples that depend on other threads, `warnings` what else the loop
    is to warn of, `shared` names the first object with a state that they share, if any; None without workers.

    Args:
        batched: indices come as one sequence a batch (torch's automatic batching); else one index is
            one "batch".
        collate_fn: of the loader: torch's `default_collate` is done in slots. Workers bring their own to `finish`.
        on_error, retries: see `fastload.DataLoader`.
        pool: where the slots come from.

    The iterator sets `pause`, which waits for some seconds, or until the batch is dropped.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batched: bool,
        collate_fn: Callable[[Any], Any],
        on_error: OnError,
        retries: int = 0,
        pool: SlotPool,
    ) -> None:
        self._batched = batched
        self._collate_fn = collate_fn
        self._on_error = on_error
        self._retries = retries
        self._pool = pool
        self.pause: Callable[[Batch, float], None] = _no_pause
        self.noticed: deque[tuple[type[Warning], str]] = deque()
        self.warnings: deque[tuple[str, str]] = deque()
        self.shared: str | None = None
        self._slots = batched and collate_fn is default_collate
        found = self._filler(dataset) if self._slots else None
        self._sample = None if found is None else found.sample
        self._layout = None if found is None else self._layout_of(found, dataset)
        # A batch is only copied together: no code of the user's runs, and nothing is drawn.
        self.copies = self._layout is not None and found is not None and found.copies
        self._getitems = batched and self._layout is None and _reads_batches(dataset)

    def _layout_of(self, found: Filler, dataset: Any) -> Layout | None:
        """Return how samples lie in a batch whose rows the dataset fills, or None if they cannot be rows."""
        try:
            return Layout(found.sample, filled=True)
        except LookupError:
            return None
        except TypeError as error:
            name = type(dataset).__name__
            self.warn(
                "rows",
                f"{name} is read sample by sample: {error}. empty_sample() must return tensors, arrays and numbers, in "
                "tuples, lists and dicts",
            )
            return None

    def filler_of(self, dataset: Any) -> Filler | None:
        """Return what fills rows from a worker's own dataset, or None if samples are read one by one."""
        found = None if self._layout is None else self._filler(dataset)
        # `worker_init_fn` may have changed what its samples are.
        return found if found is not None and alike(found.sample, self._sample) else None

    def _filler(self, dataset: Any) -> Filler | None:
        try:
            return filler(dataset)
        except Exception as error:
            name = type(dataset).__name__
            self.warn("rows", f"{name} is read sample by sample: empty_sample() raised {error!r}")
            return None

    @property
    def fills(self) -> bool:
        """Whether the dataset fills the rows of a batch itself: then a run of samples is one call."""
        return self._layout is not None

    @property
    def whole(self) -> bool:
        """Whether a batch is one unit of work: read in one call."""
        return self._getitems or not self._batched

    @property
    def collates(self) -> bool:
        """Whether a batch is made by a function of the user's."""
        return self._collate_fn not in (default_collate, default_convert)

    @property
    def batches_in_parallel(self) -> bool:
        """Whether workers are busy with a batch each, rather than all with one."""
        return self.whole or not self._slots

    def is_light(self, batch_size: int | None) -> bool:
        """Return whether batches run no code of the user's and are made sooner than handed to a thread and back."""
        if self._layout is None or not self.copies or batch_size is None:
            return False
        return batch_size * self._layout.nbytes <= LIGHT_BYTES

    def batch(self, indices: Any, **place: Any) -> Batch:
        """A new batch, to be issued; `place` as of `Batch`.

        What is no collection (a slice, a generator) is for `__getitems__` alone, as in torch: it counts as one sample.
        """
        given = indices if self._getitems else None
        if type(indices) is list:
            indices = indices.copy()  # the sampler may use its list again
        elif self._batched and not self._getitems and not isinstance(indices, list | tuple):
            indices = list(indices)
        elif self._getitems and not _is_collection(given):
            indices = [given if isinstance(given, slice) else type(given).__name__]
        # Without batching a list comes from a sampler that batches; any other key is one sample.
        size = len(indices) if self._batched or isinstance(indices, list) else 1
        units = 1 if self.whole else max(1, size)
        if not self._batched:
            indices = [indices]  # a batch of one
        batch = Batch(units, indices, size=size, **place)
        if type(given) is not list:
            batch.given = given
        if not self.whole:
            batch.box = self._box(batch)
        return batch

    def _box(self, batch: Batch) -> Box:
        n = len(batch.indices)
        if self._layout is not None:
            return SlotBox(n, self._pool, self._layout)
        return collate_box(n, self._pool) if self._slots else SampleBox([None] * n)

    def read(self, batch: Batch, start: int, stop: int, by: Reader) -> None:
        """Read units `start` to `stop` of `batch`, each sample in its random stream, or let the dataset fill rows.

        Gives up between samples once the batch is dropped.
        """
        dataset, stream, found = by.dataset, by.stream, by.filler
        if self.whole:
            self._read_whole(batch, dataset, stream)
            return
        stop = min(stop, len(batch.indices))
        if found is None:
            self._read_samples(batch, start, stop, dataset, stream)
            return
        for k in self._fill_rows(batch, start, stop, dataset, stream, found):
            self._read_samples(batch, k, k + 1, dataset, stream)

    def _fill_rows(
        self, batch: Batch, start: int, stop: int, dataset: Any, stream: Stream, found: Filler
    ) -> Iterable[int]:
        """Let the dataset fill the rows of its samples; return the positions that are to be read one by one."""
        every = range(start, stop)
        box = batch.box
        # Generators that the dataset holds are keyed for each sample: those are read one by one.
        if not every or stream.held is not None or not isinstance(box, SlotBox):
            return every
        stream.move(_NO_STREAM, None)
        try:
            indices = batch.indices if stop - start == batch.units else batch.indices[start:stop]
            run = Run(indices, box.rows(start, stop), lambda: batch.stream_keys(start, stop))
        except Exception:
            return every  # no memory, or strange indices: it is raised in its place
        try:
            return [every[k] for k in positions(found.fill(run), len(every))]
        except NotPositions as exc:
            what = str(exc)
        except BaseException as exc:
            contained(exc)  # Ctrl-C passes
            what = f"raised {type(exc).__name__}: {shown(exc, str)}"
        self.warn(
            "fill_rows",
            f"{type(dataset).__name__}.fill_rows() {what}. Its samples are read one by one instead. This is slower; "
            "the batches are the same",
        )
        return every

    def warn(self, kind: str, sentence: str) -> None:
        """Let the loop warn, once for each kind."""
        self.warnings.append((kind, sentence))

    def _read_samples(
        self, batch: Batch, start: int, stop: int, dataset: Any, stream: Stream
    ) -> None:
        # No name here for the box: an error that the user keeps holds this frame with its traceback,
        # and of the batch only what `finish` and the loop leave in it.
        indices = batch.indices
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
                    batch.box.put(k, dataset[indices[k]])  # type: ignore[union-attr]
                    k, attempt = k + 1, 0
                return
            except BaseException as exc:
                if not self._pause_for_retry(batch, exc, attempt):
                    self._sample_failed(batch, k, dataset, exc)
                    k, attempt = k + 1, 0
                else:
                    attempt += 1

    def _pause_for_retry(self, batch: Batch, exc: BaseException, attempt: int) -> bool:
        """Return False unless `exc` may be retried; otherwise count the retry, wait, and return True."""
        number = transient_errno(exc) if attempt < self._retries else None
        if number is None:
            return False
        batch.retries.append(number)
        self.pause(batch, RETRY_SECONDS * 2**attempt)
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
                annotate(error, where + stage, sharing_note(self.shared, error))
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
            assert batch.box is not None
            batch.box.put(k, sample)

    @staticmethod
    def _fail(batch: Batch, k: int, error: Exception, where: str) -> None:
        batch.failed[k] = error, where
        batch.first_failed = min(batch.first_failed, k)

    def _read_whole(self, batch: Batch, dataset: Any, stream: Stream) -> None:
        for attempt in count():
            if batch.dropped:
                return
            stream.move(batch, None if self._batched else 0)
            try:
                self._read_at_once(batch, dataset)
            except BaseException as exc:
                if not isinstance(batch.given, Iterator) and self._pause_for_retry(
                    batch, exc, attempt
                ):
                    continue
                self._whole_failed(batch, dataset, exc, stream)
            return

    def _read_at_once(self, batch: Batch, dataset: Any) -> None:
        if not self._batched:
            (index,) = batch.indices
            batch.box = SampleBox([None])
            batch.box.put(0, dataset[index])
        else:
            batch.box = SampleBox(dataset.__getitems__(batch.given))

    def _whole_failed(self, batch: Batch, dataset: Any, exc: BaseException, stream: Stream) -> None:
        if not self._batched:
            self._sample_failed(batch, 0, dataset, exc)
        elif (
            self._on_error != "raise" and isinstance(exc, Exception) and _is_collection(batch.given)
        ):
            n = batch.first_failed = len(batch.indices)
            batch.box = self._box(batch)
            self._read_samples(batch, 0, n, dataset, stream)  # which shows the bad samples
        else:
            where = f"__getitems__({shown_indices(batch.indices)}), {batch}; stage: sample"
            batch.failed[0] = contained(exc), where

    def finish(self, batch: Batch, collate_fn: Callable[[Any], Any], stream: Stream) -> None:
        """Make the batch of its samples, or its error of theirs, in the random stream of the batch.

        Called once, by the worker that delivered the last of them, with its own `collate_fn`.
        """
        box, batch.box = batch.box, None
        if stream.source is not batch or stream.at is not None:
            stream.move(batch, None)  # else it goes on where `__getitems__` left it
        try:
            if batch.failed:
                batch.error, batch.where = batch.failed[min(batch.failed)]
                batch.hint = sharing_note(self.shared, batch.error)
                batch.failed.clear()  # the errors refer to the batch by their tracebacks
            elif box is not None:
                skipped = batch.skipped
                if skipped and not self._batched:
                    batch.left_out = True
                    return
                if skipped and len(skipped) == batch.size:
                    raise EmptyBatchError(
                        f"all {batch.size} samples of {batch} were skipped by on_error"
                    ) from batch.handled[max(skipped)]
                if not self._batched:
                    batch.data = box.make((), lambda samples: collate_fn(samples[0]))
                elif self._slots and not self.whole:
                    batch.data = box.make(skipped, self._pool.collate)
                else:
                    batch.data = box.make(skipped, collate_fn)
            if self._pool.channels_last and self._batched:
                batch.data = in_channels_last(batch.data)
            batch.nbytes = data_bytes(batch.data)
        except EmptyBatchError as exc:
            batch.error = exc
        except BaseException as exc:
            where = f"{batch}; stage: collate; sample indices {shown_indices(batch.indices)}"
            if replaced := [batch.indices[k] for k in sorted(batch.handled.keys() - batch.skipped)]:
                where += f", of which {shown_indices(replaced)} are what on_error returned"
            batch.error, batch.where = contained(exc), where
            batch.hint = sharing_note(self.shared, exc)


def _no_pause(batch: Batch, seconds: float) -> None:
    return


def _is_collection(given: Any) -> bool:
    return isinstance(given, Sized) and isinstance(given, Iterable)


def _reads_batches(dataset: Any) -> bool:
    """Whether `__getitems__` is the user's: that of torch's Subset over a data set without one only loops."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))
