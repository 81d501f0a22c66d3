"""`fastload stage`: copy a set to the node's own disk, or into its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fastload.cli import options as opt
from fastload.cli._common import (
    bad_values_are_usage_errors,
    is_set_of_columns,
    require,
    sigterm_raises,
    threads_option,
)


@click.command()
@click.argument("source", type=click.Path(exists=True, file_okay=False), metavar="SRC")
@click.argument("target", type=click.Path(file_okay=False, path_type=Path), metavar="DST")
@opt.flag(
    "--verify",
    help="Read the files that DST already has, and copy damaged ones again. Without this flag, only their sizes are "
    "compared.",
)
@threads_option("copy, one file each")
def stage(source: str, target: Path, verify: bool, workers: int | None) -> None:
    """Copy the set SRC to DST, on this node's own disk or in its memory, and print DST.

    SRC is the folder of a packed set or of a set of columns. DST becomes such a folder. Every byte is checked
    against its checksum during the copy. Valid files in DST are reused. An interrupted copy cannot be opened as a set.
    Run the command again to complete it. All ranks may run this at the same time: one rank per node copies, and the
    others wait. Needs pip install '.[arrow]' in the clone.

    If DST is in /dev/shm/fastload-UID, `fastload store ls` lists a set of columns, and `fastload.store.get("mnist")`
    opens it by its name. Open any other copy by its path: `fastload.store.get(DST)`.

    \b
    Examples:
        fastload train --packed "$(fastload stage /project/imagenet /local/scratch/imagenet)"
        fastload stage /project/sets/mnist /dev/shm/fastload-$UID/mnist
    """
    require("arrow", pyarrow="pyarrow")
    run_stage: Any
    if is_set_of_columns(source):
        from fastload.store.staging import stage as run_stage
    else:
        from fastload.datasets.packed.staging import stage as run_stage

    with sigterm_raises(), bad_values_are_usage_errors():
        staged = run_stage(
            source,
            target,
            verify=verify,
            workers=workers,
            progress=True,
            say=lambda text: click.echo(text, err=True),
        )
    click.echo(str(staged), err=True)
    click.echo(staged.path)
