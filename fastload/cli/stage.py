"""`fastload stage`: a packed set on the node's own disk."""

from __future__ import annotations

from pathlib import Path

import click

from fastload.cli._common import require, sigterm_raises
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
    help="Threads that copy, a shard each; by default one for each core. 0: none beside the main one.",
)
def stage(source: str, target: Path, verify: bool, workers: int | None) -> None:
    """Copy the packed set SRC to DST on this node's own disk, once, and print DST.

    Every byte is held against its checksum as it is copied. What is in DST and right stays: a complete copy is used
    again, one that was stopped is completed. Any number of ranks may call this at once; one of each node copies, the
    others wait. Whatever happens, DST opens as a set only when it is whole.

    \b
    Example:
        fastload train --packed "$(fastload stage /project/imagenet /local/scratch/imagenet)"
    """
    require("arrow", pyarrow="pyarrow")
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
