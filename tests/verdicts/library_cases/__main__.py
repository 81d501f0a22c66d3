"""Prints a table: each case with its verdict, the reason, and the time of the first and of the second verdict."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
import warnings
from pathlib import Path

from fastload.verdicts import Verdict, verdict
from tests.verdicts.library_cases import CASES, Case, Made


def timed(made: Made) -> tuple[Verdict, float]:
    """Return the verdict and the milliseconds that it took."""
    begin = time.perf_counter()
    found = verdict(made.dataset, made.collate_fn)
    return found, (time.perf_counter() - begin) * 1_000


def row(case: Case, folder: Path) -> str:
    """Return the row of a case."""
    name = f"{case.module}.{case.name}"
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = case.make(folder)
    except Exception as error:
        return f"| {name} | cannot be made | {type(error).__name__}: {error!s:.100} | | |"
    found, first = timed(made)
    _, second = timed(made)
    mark = "" if found.kind == case.expected else ", not as expected"
    return f"| {name} | {found.kind}{mark} | {found.reason} | {first:.1f} | {second:.1f} |"


def main(wanted: list[str]) -> None:
    """Print the table of the cases whose names contain one of the words, or of all."""
    print("| case | kind | reason | first, ms | second, ms |\n|---|---|---|---|---|")
    for case in CASES:
        if not wanted or any(word in f"{case.module}.{case.name}" for word in wanted):
            with tempfile.TemporaryDirectory() as folder:
                print(row(case, Path(folder)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
