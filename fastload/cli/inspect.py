"""`fastload inspect`: what a packed set is."""

from __future__ import annotations

import click

from fastload.cli._common import require


@click.command()
@click.argument("packed_set", type=click.Path(exists=True, file_okay=False), metavar="SET")
@click.option(
    "--records",
    default=5,
    show_default=True,
    type=click.IntRange(min=0),
    help="How many records to show.",
)
def inspect(packed_set: str, records: int) -> None:
    """Say what a packed SET is: schema, counts, sizes, how it was made, its first records."""
    require("arrow", pyarrow="pyarrow")
    from fastload.datasets.packed.packing import inspect as run_inspect

    click.echo(run_inspect(packed_set, records=records))
