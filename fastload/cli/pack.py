"""`fastload pack`: pictures into a packed set."""

from __future__ import annotations

from typing import Any

import click

from fastload.cli._common import require
from fastload.errors import FastloadError


@click.command()
@click.argument("source", type=click.Path(exists=True), metavar="FILE_LIST|FOLDER|PARQUET")
@click.argument("out", type=click.Path(file_okay=False))
@click.option(
    "--mode",
    default="jpeg",
    show_default=True,
    type=click.Choice(["encoded", "jpeg", "raw"]),
    help="encoded: the files as they are. jpeg: pictures of --max-size, as JPEGs. raw: their pixels. "
    "These two neither apply an EXIF orientation nor keep it.",
)
@click.option(
    "--max-size",
    type=click.IntRange(1, 65535),
    help="Pixels of the longer side, at most; for jpeg and raw.  [default: 256]",
)
@click.option(
    "--quality", type=click.IntRange(1, 95), help="libjpeg's quality, for jpeg.  [default: 90]"
)
@click.option(
    "--shard-mb",
    default=256.0,
    show_default=True,
    type=click.FloatRange(min=0.001, max=1_000_000),
    help="A shard ends with the record that makes its payloads and --columns so many million bytes.",
)
@click.option(
    "--workers",
    type=click.IntRange(0, 1024),
    help="Threads that read, decode and encode; by default one for each core. 0: none beside the main one.",
)
@click.option(
    "--on-error",
    default="raise",
    show_default=True,
    type=click.Choice(["raise", "skip"]),
    help="An input that cannot be read or decoded. raise: ends the run. skip: is left out, and listed in rejected.txt.",
)
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="With --mode encoded: decode each picture to see whether it can be. Without, any bytes are packed.",
)
@click.option(
    "--base-dir",
    type=click.Path(exists=True, file_okay=False),
    help="Folder that relative paths in the list start from; by default the list's own folder.",
)
@click.option(
    "--image-column",
    default="image",
    show_default=True,
    help="Of PARQUET: the column with the files' bytes, or with structs of bytes and path.",
)
@click.option(
    "--label-column",
    default="label",
    show_default=True,
    help="Of PARQUET: the column with class numbers or names.",
)
@click.option(
    "--columns",
    default="",
    metavar="NAME,NAME,...",
    help="Of PARQUET: columns to keep beside these.",
)
def pack(source: str, out: str, columns: str, **options: Any) -> None:
    """Pack pictures into few large files, in the folder OUT.

    FILE_LIST has one path a line; FOLDER has one folder for each class, or Parquet files. OUT gets Arrow files and an
    index; any Arrow tool reads them, fastload.datasets.PackedDataset trains on them. A run that was stopped is
    completed by running it again; until then OUT does not open as a set.

    \b
    Examples:
        fastload pack train.txt packed --mode jpeg --max-size 256 --quality 90
        fastload pack /data/imagenet/train packed --mode raw --on-error skip
    """
    require("arrow", pyarrow="pyarrow")
    require("images", PIL="Pillow")
    from fastload.datasets.packed.packing import pack as run_pack

    names = [name.strip() for name in columns.split(",") if name.strip()]
    try:
        click.echo(str(run_pack(source, out, columns=names, progress=True, **options)))
    except FastloadError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error
