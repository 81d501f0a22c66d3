"""stats.csv: a table with one line per run, to which many processes may append."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from fastload._kit.disk import locked, write_all
from fastload.errors import FastloadError


class StatsFileError(FastloadError, ValueError):
    """Raised if a row cannot be added to a table of runs. The message names the file, its content and what to do."""


def check_table(path: Path, columns: Sequence[str]) -> None:
    """Raise `StatsFileError` if the table at `path` has other columns. Change nothing."""
    if path.exists():
        with path.open(newline="") as file:
            _check_header(path, file, columns)


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Append a line to the table (CSV) at `path`. Create the table, with a header, if it does not exist.

    Several processes may append at the same time, from several nodes too if the file system has locks. A line that a
    crash cut off stays a separate line. Raise `StatsFileError` if the header has other names.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="") as file, locked(file, needed=False):
        file.seek(0)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not (size := os.fstat(file.fileno()).st_size):
            writer.writerow(row)
        else:
            _check_header(path, file, list(row))
            if os.pread(file.fileno(), 1, size - 1) != b"\n":
                text.write("\n")
        writer.writerow(["" if value is None else value for value in row.values()])
        # One write to a file opened for appending, so that a row stays in one piece even without locks.
        write_all(file.fileno(), str(path), text.getvalue().encode(errors="backslashreplace"))


def _check_header(path: Path, file: IO[str], columns: Sequence[str]) -> None:
    try:
        found = next(csv.reader(file), None)
    except (UnicodeDecodeError, csv.Error) as error:
        raise StatsFileError(
            f"{path} is not a table of runs: {error}. Move the file away, or write to another one"
        ) from error
    if found is not None and found != list(columns):
        only = [name for name in found if name not in columns]
        new = [name for name in columns if name not in found]
        raise StatsFileError(
            f"{path} has other columns than this run writes, or in another order (only in the file: "
            f"{', '.join(only) or 'none'}; only in this run: {', '.join(new) or 'none'}). Move the file away, or write "
            "to another one"
        )
