"""Averages, quantiles and rows of a table of runs: what a training run makes of what it has timed."""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import math
import os
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from fastload.errors import FastloadError

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""What flock(2) fails with on a file system that has no locks, as Lustre mounted without them."""


class StatsFileError(FastloadError, ValueError):
    """A table of runs cannot be appended to; the message names the file, what it has and what to do."""


class Average:
    """Mean and population standard deviation of the values added, by Welford's update.

    (B. P. Welford, "Note on a Method for Calculating Corrected Sums of Squares and Products",
    Technometrics 4, 1962.) A sum of squares would cancel where the values are alike.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = math.nan
        self._squares = 0.0

    def add(self, value: float) -> None:
        """Count one more value."""
        self.count += 1
        before = self.mean if self.count > 1 else value
        self.mean = before + (value - before) / self.count
        self._squares += (value - before) * (value - self.mean)

    @property
    def stddev(self) -> float:
        """Population standard deviation; NaN where nothing was added."""
        return math.sqrt(self._squares / self.count) if self.count else math.nan

    def __str__(self) -> str:
        return f"mean: {self.mean:.2f}, stddev: {self.stddev:.2f}" if self.count else "n/a"


class Quantiles:
    """The median, and what 95 and 99 of a hundred values do not exceed. Memory: 8 bytes a value."""

    def __init__(self) -> None:
        self._values = array("d")

    def add(self, value: float) -> None:
        """Count one more value."""
        self._values.append(value)

    def at(self, *percentages: float) -> list[float]:
        """The values below which so many per cent lie, interpolated; NaN where nothing was added."""
        if not self._values:
            return [math.nan] * len(percentages)
        found: list[float] = np.percentile(self._values, percentages).tolist()
        return found


def figure(value: float | None, form: str = ".2f") -> str:
    """A figure in words; "n/a" where there is none (None or NaN)."""
    return "n/a" if value is None or math.isnan(value) else format(value, form)


def check_table(path: Path, columns: list[str]) -> None:
    """Raise `StatsFileError` where the table at `path` has other columns; nothing is made or changed."""
    if path.exists():
        with path.open(newline="") as file:
            _check_header(path, file, columns)


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Append a line to the table (CSV) at `path`; where there is none, make it, with a header of the row's names.

    Processes may append at once, from several nodes too where the file system has locks: each takes its turn. A line
    that some crash has cut off stays a line of its own. Raises `StatsFileError` where the header has other names.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="") as file, _locked(file):
        file.seek(0)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if os.fstat(file.fileno()).st_size == 0:
            writer.writerow(row)
        else:
            _check_header(path, file, list(row))
            if not _ends_a_line(file.fileno()):
                text.write("\n")
        writer.writerow(["" if value is None else value for value in row.values()])
        # One write to a file open for appending: even without locks, a row lands in one piece.
        os.write(file.fileno(), text.getvalue().encode())


@contextmanager
def _locked(file: IO[str]) -> Iterator[None]:
    """Hold the file's lock in the block; the kernel lets go of it with the process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield
    finally:
        try:
            fcntl.flock(file, fcntl.LOCK_UN)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise


def _check_header(path: Path, file: IO[str], columns: list[str]) -> None:
    found = next(csv.reader(file), [])
    if found and found != columns:
        only = [name for name in found if name not in columns]
        new = [name for name in columns if name not in found]
        raise StatsFileError(
            f"{path}: the header has other columns than this run writes (only there: {', '.join(only) or 'none'}; "
            f"only here: {', '.join(new) or 'none'}; or their order): move the file away, or write to another one"
        )


def _ends_a_line(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, 1, size - 1) == b"\n"
