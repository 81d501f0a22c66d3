"""Look-ahead: a dataset with a method `will_read` hears which batches are read next, and can begin to fetch them."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

from fastload._kit.user_errors import contained, shown_indices
from fastload._kit.will_read import will_read_of
from fastload.memory.batch import Batch
from fastload.reading.failures import fail
from fastload.reading.sources import Source

_log = logging.getLogger("fastload")


class LookAhead:
    """Tells a dataset of each batch once, in the order of reading, before a worker may read it.

    Args:
        dataset: the loader's. It may have no `will_read`, and then nothing is done.
        source: knows by which indices a batch is read.
        lock: one thread at a time calls the dataset.
    """

    def __init__(self, dataset: Any, source: Source, lock: AbstractContextManager[Any]) -> None:
        self._will_read, self._source, self._lock = will_read_of(dataset), source, lock
        self._name = type(dataset).__name__
        self.listens = self._will_read is not None
        self._told = self._over = False  # of a batch since the last `forget`; that it hears no more

    def announce(self, batch: Batch) -> None:
        """Tell the dataset of a batch. If that raises, the batch raises it, in its turn."""
        if self._will_read is None or not (indices := self._source.ahead(batch)):
            return
        with self._lock:
            if self._over or batch.dropped or batch.error is not None:
                return
            self._told = True
            try:
                self._will_read(indices)
            except BaseException as exc:
                where = f"{batch}; stage: {self._name}.will_read({shown_indices(indices)})"
                fail(batch, -1, contained(exc), where)  # before any sample

    def forget(self, *, over: bool = False) -> None:
        """Say that nothing more is read of what the dataset was told. `over`: and tell it nothing from now on.

        An error is logged: the loop may have ended, and no sample is lost.
        """
        with self._lock:
            told, self._told, self._over = self._told, False, over or self._over
            try:
                if told and self._will_read is not None:
                    self._will_read([])
            except Exception:
                _log.exception("fastload: %s.will_read([]) raised", self._name)
