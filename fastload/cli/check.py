"""`fastload check`: a data set read serially and in threads, compared."""

from __future__ import annotations

import pkgutil
import sys
from inspect import isclass, isroutine
from typing import Any

import click

import fastload
from fastload.inspection import require_data_set


@click.command()
@click.argument("dataset", metavar="DATASET")
@click.option(
    "--samples",
    default=64,
    show_default=True,
    type=click.IntRange(min=1),
    help="Samples to compare; of a map-style data set, spread over its length.",
)
@click.option(
    "--workers",
    default=4,
    show_default=True,
    type=click.IntRange(1, 1024),
    help="Threads that read at once.",
)
def check(dataset: str, samples: int, workers: int) -> None:
    """Read some samples serially and in threads, and compare them.

    DATASET is where Python finds the data set: MODULE:NAME, or MODULE:FUNCTION for a function or a class that makes it
    without arguments. Modules are looked for in the current folder too.

    Says whether threads give what a serial loop gives, how much of the time is under the GIL, and what to do: a shared
    file position, draws from global random state, an iterable data set that is not sharded. The exit code is 1 if
    threads would give other samples, or samples raise, or there are none.

    \b
    Example:
        fastload check my_project.data:make_train_set
    """
    report = fastload.check(_import(dataset), samples=samples, workers=workers)
    click.echo(str(report))
    if not report.ok:
        raise SystemExit(1)


def _import(path: str) -> Any:
    """The object at "package.module:name", called if it is a class or a function."""
    if not all(path.partition(":")):
        raise click.UsageError(
            f"expected MODULE:NAME, such as my_project.data:train_set, got {path!r}"
        )
    sys.path.insert(0, "")
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.UsageError(f"cannot import {path}: {error}") from error
    if isclass(found) or isroutine(found):
        try:
            found = found()
        except TypeError as error:
            raise click.UsageError(f"cannot call {path} without arguments: {error}") from error
    try:
        require_data_set(found)
    except TypeError as error:
        raise click.UsageError(f"{path}: {error}") from error
    return found
