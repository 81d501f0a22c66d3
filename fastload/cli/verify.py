"""`fastload verify`: everything in a set, read and checked."""

from __future__ import annotations

import click

from fastload.cli._common import is_set_of_columns, require


@click.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False), metavar="SET")
@click.option(
    "--workers",
    type=click.IntRange(0, 1024),
    help="Threads that read; by default one for each core. 0: none beside the main one.",
)
def verify(path: str, workers: int | None) -> None:
    """Read all of SET and name what is bad.

    Of a packed set, every record is held against its checksum; of a set of columns, every part. Parts that were put
    without checksums are said, and so are parts that lie on other nodes; neither counts as bad. The exit code is 1 if
    something is bad.

    \b
    Examples:
        fastload verify packed
        fastload verify /project/sets/mnist
    """
    require("arrow", pyarrow="pyarrow")
    if is_set_of_columns(path):
        _verify_columns(path, workers)
    else:
        _verify_packed(path, workers)


def _verify_packed(path: str, workers: int | None) -> None:
    from fastload.datasets.packed.verifying import verify as run_verify

    found = run_verify(path, workers=workers, progress=True, say=click.echo)
    rate = found.bytes / 1e6 / max(found.seconds, 1e-9)
    click.echo(f"{found.records:,} records read in {found.seconds:.1f} s, {rate:,.0f} MB/s")
    if found.bad:
        raise click.ClickException(f"{len(found.bad)} shards or records are bad")
    click.echo("All of them are right.")


def _verify_columns(path: str, workers: int | None) -> None:
    from fastload.store.verifying import verify as run_verify

    found = run_verify(path, workers=workers, progress=True, say=click.echo)
    click.echo(str(found))
    if found.bad:
        raise click.ClickException(f"{len(found.bad)} of {found.parts} parts are bad")
    click.echo("All parts that were checked are right.")
