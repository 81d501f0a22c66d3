"""stats.csv: a table of runs, a line for each, which many processes may append to."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from fastload.disk import locked, write_all
from fastload.errors import FastloadError


class StatsFileError(FastloadError, ValueError):
    """A table of runs cannot be appended to; the message names the file, what it has and what to do."""


def check_table(path: Path, columns: Sequence[str]) -> None:
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
    with path.open("a+", newline="") as file, locked(file, needed=False):
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
        write_all(file.fileno(), str(path), text.getvalue().encode(errors="backslashreplace"))


def _check_header(path: Path, file: IO[str], columns: Sequence[str]) -> None:
    try:
        found = next(csv.reader(file), None)
    except (UnicodeDecodeError, csv.Error) as error:
        raise StatsFileError(
            f"{path} is no table of runs: {error}. Move the file away, or write to another one"
        ) from error
    if found is not None and found != list(columns):
        only = [name for name in found if name not in columns]
        new = [name for name in columns if name not in found]
        raise StatsFileError(
            f"{path}: the header has other columns than this run writes (only there: {', '.join(only) or 'none'}; "
            f"only here: {', '.join(new) or 'none'}; or their order): move the file away, or write to another one"
        )


def _ends_a_line(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, 1, size - 1) == b"\n"
