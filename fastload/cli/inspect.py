"""`fastload inspect`: describe a set."""

from __future__ import annotations

import click

from fastload.cli._common import described_set, require


@click.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False), metavar="SET")
@click.option(
    "--records", default=5, type=click.IntRange(min=0), help="Number of records, or rows, to show."
)
def inspect(path: str, records: int) -> None:
    """Describe SET: its columns, counts and sizes, how it was made, and its first records.

    SET is the folder of a packed set (`fastload pack`) or of a set of columns (`fastload store`).

    \b
    Examples:
        fastload inspect packed
        fastload inspect /dev/shm/fastload-1000/mnist --records 2
    """
    require("arrow", pyarrow="pyarrow")
    click.echo(described_set(path, records))
