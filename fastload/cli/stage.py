"""`fastload stage`: a set on the node's own disk, or in its memory."""

from __future__ import annotations

from pathlib import Path

import click

from fastload.cli._common import is_set_of_columns, require, sigterm_raises
from fastload.errors import FastloadError


@click.command()
@click.argument("source", type=click.Path(exists=True, file_okay=False), metavar="SRC")
@click.argument("target", type=click.Path(file_okay=False, path_type=Path), metavar="DST")
@click.option(
    "--verify",
    is_flag=True,
    help="Read what is in DST already, and copy again what is wrong; else its sizes decide.",
)
@click.option(
    "--workers",
    type=click.IntRange(0, 1024),
    help="Threads that copy, a file each; by default one for each core. 0: none beside the main one.",
)
def stage(source: str, target: Path, verify: bool, workers: int | None) -> None:
    """Copy the set SRC to DST on this node's own disk, or in its memory, once, and print DST.

    SRC is the folder of a packed set, or of a set of columns; DST becomes such a folder. Every byte is held against its
    checksum as it is copied. What DST has already is kept if it is right: a complete copy is used again, and one that
    was stopped is completed. Any number of ranks may call this at once; one on each node copies, the others wait.
    Whatever happens, DST opens as a set only once it is whole.

    A copy of a set of columns in /dev/shm/fastload-UID is listed by `fastload store ls`, and
    `fastload.store.get("mnist")` finds it by its name. Any other copy opens by its path: `fastload.store.get(DST)`.

    \b
    Examples:
        fastload train --packed "$(fastload stage /project/imagenet /local/scratch/imagenet)"
        fastload stage /project/sets/mnist /dev/shm/fastload-$UID/mnist
    """
    require("arrow", pyarrow="pyarrow")
    if is_set_of_columns(source):
        from fastload.store.staging import stage as run_stage
    else:
        from fastload.datasets.packed.staging import stage as run_stage

    with sigterm_raises():
        try:
            staged = run_stage(
                source,
                target,
                verify=verify,
                workers=workers,
                progress=True,
                say=lambda text: click.echo(text, err=True),
            )
        except FastloadError:
            raise
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    click.echo(str(staged), err=True)
    click.echo(staged.path)
