"""`fastload verify`: read and check everything in a set."""

from __future__ import annotations

import click

from fastload.cli._common import is_set_of_columns, require, threads_option


@click.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False), metavar="SET")
@threads_option("read")
def verify(path: str, workers: int | None) -> None:
    """Read all of SET, and name the damaged records or parts.

    SET is the folder of a packed set (`fastload pack`) or of a set of columns (`fastload store`). Every record of a
    packed set, and every part of a set of columns, is checked against its checksum. Of parts without checksums, only
    the form is checked, and the output says so. Parts on other nodes are listed, but do not count as damaged. The exit
    code is 1 if anything is damaged. Needs pip install '.[arrow]' in the clone.

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
        raise click.ClickException(f"{len(found.bad)} shards or records are damaged")
    click.echo("All records are valid.")


def _verify_columns(path: str, workers: int | None) -> None:
    from fastload.store.verifying import verify as run_verify

    found = run_verify(path, workers=workers, progress=True, say=click.echo)
    click.echo(str(found))
    if found.bad:
        raise click.ClickException(f"{len(found.bad)} of {found.parts} parts are damaged")
    click.echo("No damage was found." if found.unread else "All checked parts are valid.")
