"""Batches whose rows the dataset fills: one call of `fill_rows` for a run of samples, not one for each sample."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastload._kit.user_errors import contained, shown
from fastload.memory.batch import Batch
from fastload.memory.collate import SlotBuilder
from fastload.memory.layout import Layout
from fastload.memory.slots import SlotPool
from fastload.reading.notices import Notices
from fastload.reading.rows import Filler, NotPositions, find_filler, positions
from fastload.reading.runs import FILL_SECONDS
from fastload.reading.sources import Reader, Source
from fastload.rows import Run

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


class Rows(Source):
    """Lets the dataset fill the rows of a batch, whose memory a pool lends.

    Args:
        pool: lends the memory.
        notices: collects warnings for the loop.
        found: fills rows from the loader's dataset. Each worker has one for its own dataset.
        layout: how samples lie in a batch.
        unchanged: the dataset of `found`, or None if a `worker_init_fn` may change what its samples are.
    """

    run_seconds = FILL_SECONDS

    def __init__(
        self, pool: SlotPool, notices: Notices, found: Filler, layout: Layout, unchanged: Any
    ) -> None:
        super().__init__(lambda n: SlotBuilder(n, pool, layout), batches_in_parallel=False)
        self.copies = found.copies
        self._notices = notices
        self._layout, self._nbytes = layout, layout.nbytes
        self._found, self._unchanged = found, unchanged

    def filler_of(self, dataset: Any) -> Filler | None:
        """See `Source`."""
        if dataset is self._unchanged:
            return self._found
        found = find_filler(dataset, self._notices)
        return found if found is not None and self._layout.fits(found.sample) else None

    def is_light(self, batch_size: int | None) -> bool:
        """See `Source`."""
        return self.copies and batch_size is not None and batch_size * self._nbytes <= LIGHT_BYTES

    def fill(self, batch: Batch, start: int, stop: int, reader: Reader) -> Iterable[range]:
        """See `Source`."""
        every = range(start, min(stop, len(batch.indices)))
        builder = batch.builder
        # If the dataset holds generators, they are keyed for each sample, so samples are read one by one.
        held = reader.stream.held is not None
        if reader.filler is None or not every or held or not isinstance(builder, SlotBuilder):
            return (every,)
        reader.stream.move(_NO_STREAM, None)
        start, stop = every.start, every.stop
        try:
            indices = batch.indices if len(every) == batch.units else batch.indices[start:stop]
            run = Run(indices, builder.rows(start, stop), lambda: batch.stream_keys(start, stop))
        except Exception:
            return (every,)  # no memory, or unusable indices: reading a sample raises the error
        try:
            missing = positions(reader.filler.fill(run), len(every))
            return [range(start + k, start + k + 1) for k in missing]
        except NotPositions as exc:
            what = str(exc)
        except BaseException as exc:
            contained(exc)  # Ctrl-C passes
            what = f"raised {type(exc).__name__}: {shown(exc, str)}"
        self._notices.warn(
            "fill_rows",
            f"{type(reader.dataset).__name__}.fill_rows() {what}. Its samples are read one by one instead. This is "
            "slower; the batches are the same",
        )
        return (every,)
