"""`fastload inspect`: describe a set, or read a loader's position out of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from fastload.cli import options as opt
from fastload.cli._checkpoints import positions
from fastload.cli._common import described_set, require


@click.command()
@click.argument("path", type=click.Path(exists=True), metavar="PATH")
@opt.count("--records", within=(0, None), default=5, help="Number of records, or rows, to show.")
def inspect(path: str, records: int) -> None:
    """Describe a set, or read the position of each loader out of a checkpoint.

    A set is the folder of a packed set (`fastload pack`) or of a set of columns (`fastload store`). You see its
    columns, counts and sizes, how it was made, and its first records. Needs pip install '.[arrow]' in the clone.

    A checkpoint is a file of torch.save, Lightning or JSON, or a folder of torch.distributed.checkpoint or Accelerate.
    You see the epoch, batches and samples of each `loader.state_dict()` in it, at any depth, and the seed, sampler and
    ranks that it needs.

    \b
    Examples:
        fastload inspect packed
        fastload inspect /dev/shm/fastload-1000/mnist --records 2
        fastload inspect checkpoint.pt
        fastload inspect checkpoints/step-1000
    """
    if (Path(path) / "index.json").exists():
        require("arrow", pyarrow="pyarrow")
        click.echo(described_set(path, records))
    else:
        click.echo(positions(Path(path)))
