"""Batches whose rows the dataset fills: one call of `fill_rows` for a run of samples, not one for each sample."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastload._kit.user_errors import contained, shown
from fastload.memory.batch import Batch
from fastload.memory.collate import BatchBuilder, SlotBuilder
from fastload.memory.layout import Layout
from fastload.memory.slots import SlotPool
from fastload.reading.fetch import Reader, SlotFetcher
from fastload.reading.notices import Notices
from fastload.reading.rows import Filler, NotPositions, alike, filler, positions
from fastload.reading.run_length import FILL_SECONDS
from fastload.rows import Run
from fastload.settings import Settings

LIGHT_BYTES = 1024 * 1024
"""Gathering a batch of this size takes some 100 us, about as long as handing it to a thread and back."""


class _NoStream:
    """The stream during `fill_rows`. A draw raises: which samples share a call depends on timing."""

    def stream_key(self, at: int | None, *, seeded: bool = True) -> int:
        raise RuntimeError(
            "fill_rows() drew random numbers from a global function. Which samples share a call depends on timing, so "
            "the batch would not be reproducible. Draw from `run.keys`, one key for each sample"
        )


_NO_STREAM = _NoStream()


def find_filler(dataset: Any, notices: Notices) -> Filler | None:
    """Return the filler of `dataset`, or None to read its samples one by one. Warn if `empty_sample()` raises."""
    try:
        return filler(dataset)
    except Exception as error:
        name = type(dataset).__name__
        notices.warn("rows", f"{name} is read sample by sample: empty_sample() raised {error!r}")
        return None


def find_layout(found: Filler, dataset: Any, notices: Notices) -> Layout | None:
    """Return how samples lie in a batch whose rows the dataset fills, or None if they cannot. Warn of a bad sample."""
    try:
        return Layout(found.sample, filled=True)
    except LookupError:
        return None
    except TypeError as error:
        notices.warn(
            "rows",
            f"{type(dataset).__name__} is read sample by sample: {error}. empty_sample() must return tensors, arrays "
            "and numbers, in tuples, lists and dicts",
        )
        return None


class FillingFetcher(SlotFetcher):
    """Lets the dataset fill the rows of slots.

    Args:
        settings, pool, notices: see `Fetcher`.
        found: fills rows from the loader's dataset. Each worker has one for its own dataset.
        layout: how samples lie in a batch.
    """

    run_seconds = FILL_SECONDS

    def __init__(
        self, settings: Settings, pool: SlotPool, notices: Notices, found: Filler, layout: Layout
    ) -> None:
        super().__init__(settings, pool, notices)
        self.copies = found.copies
        self._sample = found.sample
        self._layout = layout

    def filler_of(self, dataset: Any) -> Filler | None:
        """See `Fetcher`."""
        found = find_filler(dataset, self.notices)
        # `worker_init_fn` may have changed what its samples are.
        return found if found is not None and alike(found.sample, self._sample) else None

    def is_light(self, batch_size: int | None) -> bool:
        """See `Fetcher`."""
        if not self.copies or batch_size is None:
            return False
        return batch_size * self._layout.nbytes <= LIGHT_BYTES

    def _builder(self, n: int) -> BatchBuilder:
        return SlotBuilder(n, self._pool, self._layout)

    def read(self, batch: Batch, start: int, stop: int, reader: Reader) -> int:
        """See `Fetcher`. Read one by one the samples that the dataset did not fill."""
        if reader.filler is None:
            return super().read(batch, start, stop, reader)
        stop = min(stop, len(batch.indices))
        for k in self._fill_rows(batch, start, stop, reader, reader.filler):
            self._read_samples(batch, k, k + 1, reader)
        return stop - start

    def _fill_rows(
        self, batch: Batch, start: int, stop: int, reader: Reader, found: Filler
    ) -> Iterable[int]:
        """Let the dataset fill the rows of its samples. Return the positions that must be read one by one."""
        every = range(start, stop)
        builder = batch.builder
        # If the dataset holds generators, they are keyed for each sample, so samples are read one by one.
        if not every or reader.stream.held is not None or not isinstance(builder, SlotBuilder):
            return every
        reader.stream.move(_NO_STREAM, None)
        try:
            indices = batch.indices if stop - start == batch.units else batch.indices[start:stop]
            run = Run(indices, builder.rows(start, stop), lambda: batch.stream_keys(start, stop))
        except Exception:
            return every  # no memory, or unusable indices: reading a sample raises the error
        try:
            return [every[k] for k in positions(found.fill(run), len(every))]
        except NotPositions as exc:
            what = str(exc)
        except BaseException as exc:
            contained(exc)  # Ctrl-C passes
            what = f"raised {type(exc).__name__}: {shown(exc, str)}"
        self.notices.warn(
            "fill_rows",
            f"{type(reader.dataset).__name__}.fill_rows() {what}. Its samples are read one by one instead. This is "
            "slower; the batches are the same",
        )
        return every
