"""`fastload check`: compare what a dataset gives serially and by workers."""

from __future__ import annotations

from typing import Annotated

import click

from fastload._kit.options import Count, Option, Threads, options
from fastload.cli._command import Command
from fastload.cli._common import sigterm_raises

READS = "reading "
"""Begins a line of the child: how it reads now."""


@options
class Samples:
    """What to compare."""

    dataset: Annotated[str, Option("DATASET")]
    samples: Count = 64
    """Number of samples to compare, spread over the length of a map-style dataset."""
    workers: Annotated[Threads | None, Option(min=1)] = None
    """Number of workers that read at the same time. [default: one per core, but two at least]"""


@Command
def check(options: Samples) -> None:
    """Read some samples serially and by workers, and compare them.

    DATASET is MODULE:NAME, or MODULE:FUNCTION for a function or class that makes it without arguments. Modules in the
    current folder are found too.

    The report says which kind of workers a loader uses by default for this dataset, and why. It says if workers give
    the samples of a serial loop, and what to change. It finds shared file positions, draws from global random state,
    and iterable datasets that are not sharded. If a later epoch may be read by threads, threads are compared too. The
    reading happens in a child process, so a dataset that crashes is reported as well. The exit code is 1 if the samples
    differ, if a sample raises, or if there are no samples.

    \b
    Example:
        fastload check my_project.data:make_train_set
    """
    from dataclasses import asdict

    from fastload.measure.fresh import run_fresh

    how = "as it was imported"

    def hear(line: str) -> None:
        nonlocal how
        if reads := line.startswith(READS):
            how = f"as it was read {line.removeprefix(READS)}"
        click.echo(f"{line} ..." if reads else line, err=reads)

    with sigterm_raises():
        ended = run_fresh("fastload.cli._checking", asdict(options), say=hear, watch_memory=False)
    if ended.messages:
        click.echo(ended.messages, err=True)
    if ended.error:
        click.echo(_of_death(ended.error, how))
        raise SystemExit(1)
    if "usage" in ended.result:
        raise click.UsageError(ended.result["usage"])
    click.echo(ended.result["report"])
    if not ended.result["ok"]:
        raise SystemExit(1)


def _of_death(error: str, how: str) -> str:
    """Return the report on a dataset that ended the process that read it."""
    from fastload.check import Finding

    advice = (
        'A library that it calls is not thread-safe. Use worker_method="process", or call the library under a lock.'
        if "threads" in how
        else "The dataset would end a training loop as well. If stacks are printed above, look for the call in them."
    )
    fault = Finding("fault", f"the dataset ended the process {how}: {error}", advice)
    return f"{fault}\nDo not read this dataset with workers until this is fixed."
