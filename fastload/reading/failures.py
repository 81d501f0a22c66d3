"""What an error of user code becomes: another attempt, a sample left out or replaced, or the error of its batch.

The batch carries its error, and the loop gets it in the batch's turn. Only Ctrl-C and SystemExit in the main thread
pass through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload._kit.user_errors import (
    annotate,
    contained,
    file_note,
    shown,
    transient_errno,
)
from fastload.memory.batch import Batch
from fastload.settings import Settings


class _Skip:
    """The type of `SKIP`."""

    def __repr__(self) -> str:
        return "fastload.SKIP"

    def __reduce__(self) -> str:
        return "SKIP"  # one object, also after pickling


SKIP = _Skip()
"""An `on_error` callable returns this to leave a sample out of its batch."""

Wait = Callable[[Callable[[], bool], float | None], None]
"""Waits until a condition holds, for at most a number of seconds; see `Changes.wait`."""

RETRY_SECONDS = 0.1
"""The wait before the first retry of a read. It doubles with each retry."""


class Failures:
    """Decides what becomes of an error, by the loader's `on_error` and `retries`."""

    def __init__(self, settings: Settings) -> None:
        self._on_error = settings.on_error
        self._retries = settings.retries

    def may_retry(
        self,
        batch: Batch,
        exc: BaseException,
        attempt: int,
        wait: Wait,
    ) -> bool:
        """Count a retry, wait and return True; or return False if `exc` must not be retried."""
        number = transient_errno(exc) if attempt < self._retries else None
        if number is None:
            return False
        batch.retries.append(number)
        wait(lambda: batch.dropped, RETRY_SECONDS * 2**attempt)
        return True

    def are_handled(self, exc: BaseException) -> bool:
        """Return whether `on_error` gets such an error."""
        return self._on_error != "raise" and isinstance(exc, Exception)

    def of_sample(self, batch: Batch, k: int, dataset: Any, exc: BaseException) -> None:
        """Let `on_error` handle the error of the sample at position `k`, or let the batch raise it."""
        index = batch.indices[k]
        error, stage = contained(exc), f"sample{file_note(dataset, index, exc)}"
        where = f"sample index {shown(index)}, position {k} of {batch}; stage: "
        if not self.are_handled(exc):
            fail(batch, k, error, where + stage)
            return
        sample: Any = SKIP
        try:
            if callable(self._on_error):
                annotate(error, where + stage)
                sample = self._on_error(index, error)
        except BaseException as raised:
            if raised is not exc:  # on_error may raise the sample's own error
                error, stage = contained(raised), "on_error"
            fail(batch, k, error, where + stage)
            del error, exc  # their tracebacks hold this frame
            return
        batch.handled[k] = error
        if sample is SKIP:
            batch.skipped.add(k)
        else:
            assert batch.builder is not None
            batch.builder.put(k, sample)


def fail(batch: Batch, k: int, error: Exception, where: str) -> None:
    """Let a batch raise `error`, unless a sample before position `k` fails too."""
    batch.failed[k] = error, where
    batch.first_failed = min(batch.first_failed, k)
