"""`fastload verify`: every record of a packed set, read."""

from __future__ import annotations

import click

from fastload.cli._common import require


@click.command()
@click.argument("packed_set", type=click.Path(exists=True, file_okay=False), metavar="SET")
@click.option(
    "--workers",
    type=click.IntRange(0, 1024),
    help="Threads that read; by default one for each core. 0: none beside the main one.",
)
def verify(packed_set: str, workers: int | None) -> None:
    """Read every record of a packed SET and name the bad ones.

    Everything is held against its checksum. The exit code is 1 if something is wrong.
    """
    require("arrow", pyarrow="pyarrow")
    from fastload.datasets.packed.verifying import verify as run_verify

    found = run_verify(packed_set, workers=workers, progress=True, say=click.echo)
    rate = found.bytes / 1e6 / max(found.seconds, 1e-9)
    click.echo(f"{found.records:,} records read in {found.seconds:.1f} s, {rate:,.0f} MB/s")
    if found.bad:
        raise click.ClickException(f"{len(found.bad)} shards or records are bad")
    click.echo("All of them are right.")
