"""The child process of `fastload check`, in which the dataset's code runs, because it may crash."""

from __future__ import annotations

import faulthandler
import sys
from typing import Any

import click

from fastload.cli._common import made_at
from fastload.cli.check import READS
from fastload.measure.fresh import answer


def checked(options: dict[str, Any]) -> dict[str, Any]:
    """Return the report on the dataset at MODULE:NAME, or why there is no such dataset."""
    from fastload.check import check

    path = options.pop("dataset")
    try:
        report = check(_dataset(path), **options, say=lambda how: print(READS + how, flush=True))
    except click.UsageError as error:
        return {"usage": error.message}
    return {"report": str(report), "ok": report.ok}


def _dataset(path: str) -> Any:
    from fastload.check import require_dataset

    found = made_at(path)
    try:
        require_dataset(found)
    except TypeError as error:
        raise click.UsageError(f"{path}: {error}") from error
    return found


if __name__ == "__main__":
    faulthandler.enable()  # the stacks say which call ended the process
    sys.exit(answer(checked))
