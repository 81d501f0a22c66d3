"""The outcome of one run, as pure values."""

from __future__ import annotations

from dataclasses import dataclass

from fastload.bench.plan import SweepRun
from fastload.errors import FastloadError
from fastload.measure.figures import Figures


class BenchError(FastloadError):
    """Raised if a benchmark cannot run with these arguments, or if a run gave wrong samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run and its result: figures, or an error in one line."""

    run: SweepRun
    figures: Figures | None
    error: str | None
    peak_bytes: int | None
    """The largest memory seen, with child processes, or None if unknown."""
    cached_share: float | None
    """Share (0 to 1) of the run's bytes that were in the page cache when it started, or None if unknown."""
    others_share: float | None
    """Share (0 to 1) of this process's cores that other processes used during the run. The more, the less reliable."""
    messages: str
    """Standard error of the run: warnings and tracebacks."""
