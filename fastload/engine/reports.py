"""What the loop counts and reports: the log, `on_stats`, `max_errors`."""

from __future__ import annotations

import logging
import warnings
from time import perf_counter

from fastload._kit.user_errors import annotate, file_note, shown
from fastload.engine.epoch_counts import EpochCounts
from fastload.errors import TooManyErrorsError
from fastload.memory.batch import Batch
from fastload.settings import Settings

TELL_SECONDS = 10.0
"""The time between two calls of `on_stats` within an epoch."""

_log = logging.getLogger("fastload")


class Reports:
    """Counts what an iterator delivers, and reports it. It runs on the loop's thread.

    Args:
        counts: the counts of the epoch.
    """

    def __init__(self, counts: EpochCounts) -> None:
        self._counts = counts

    def begin(self, settings: Settings) -> None:
        """Begin another epoch."""
        self._settings = settings
        self._handled = 0
        self._told = perf_counter()

    def count(self, batch: Batch) -> None:
        """Count a batch that the loop takes, and log what `on_error="skip"` left out of it."""
        # A callable on_error has seen the errors already.
        told = self._settings.on_error == "skip"
        for k, exc in sorted(batch.handled.items()) if told else ():
            index, text = batch.indices[k], shown(exc, str)
            file = file_note(self._settings.dataset, index, exc)
            if file.partition(": ")[2] in text:
                file = ""
            name = type(exc).__name__
            _log.warning(
                "fastload: skipped sample index %s: %s: %s%s", shown(index), name, text, file
            )
        counts = self._counts.now
        counts.batches += not batch.left_out
        counts.errors += len(batch.handled) + (batch.error is not None)
        counts.retries += len(batch.retries)
        self._handled += len(batch.handled)
        most = self._settings.max_errors
        if batch.handled and most is not None and self._handled > most:
            last = batch.handled[max(batch.handled)]
            batch.error = TooManyErrorsError(
                f"failed samples of epoch {batch.epoch}: {self._handled}, but max_errors allows "
                f"only {most}. Fix these samples, or raise max_errors"
            )
            batch.error.__cause__ = last
            batch.data = None
        batch.handled.clear()  # the errors refer to the batch by their tracebacks
        if batch.error is None and not batch.left_out:
            counts.samples += batch.size - len(batch.skipped)
            counts.bytes += batch.nbytes
        declared = self._settings.declared_length
        if declared is not None and not batch.left_out and counts.batches > declared:
            warnings.warn(
                f"Length of IterableDataset {self._settings.dataset} was reported to be {declared} (when accessing "
                f"len(dataloader)), but {counts.batches} samples have been fetched.",
                stacklevel=4,
            )

    def tell(self) -> None:
        """Call `on_stats`."""
        self._told = perf_counter()
        if self._settings.on_stats is None:
            return
        try:
            self._settings.on_stats(self._counts.stats())
        except BaseException as exc:
            annotate(exc, f"epoch {self._counts.now.epoch}; stage: on_stats; no batch is lost")
            raise

    def tell_if_due(self) -> None:
        """Call `on_stats` if its last call was `TELL_SECONDS` ago."""
        if perf_counter() - self._told > TELL_SECONDS:
            self.tell()
