"""`fastload set pack`: pack images into a packed set."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

import click

from fastload._kit.options import Count, ExistingFolder, Option, options
from fastload.cli._command import Command
from fastload.cli._common import Parallel, bad_values_are_usage_errors, sigterm_raises


@options
class Packing(Parallel):
    """What a packed set is made of, and how."""

    source: Annotated[str, Option("FILE_LIST|FOLDER|PARQUET", exists=True)]
    out: Annotated[str, Option("OUT", file_okay=False)]
    mode: Literal["encoded", "jpeg", "raw"] = "jpeg"
    """Content of the set. encoded: the files as they are. jpeg: images reduced to --max-size, as JPEGs. raw: their
    pixels. jpeg and raw ignore and drop the EXIF orientation."""
    max_size: Annotated[Count | None, Option(max=65535)] = None
    """Maximum length of the longer side with jpeg and raw, in pixels. [default: 256]"""
    quality: Annotated[Count | None, Option(max=95)] = None
    """Quality of the JPEGs with --mode jpeg, as in libjpeg. [default: 90]"""
    shard_mb: Annotated[float, Option(min=0.001, max=1_000_000)] = 256.0
    """Size of a shard, in megabytes (millions of bytes) of images and --columns. A shard ends with the record that
    reaches this size."""
    on_error: Literal["raise", "skip"] = "raise"
    """Action for an input that cannot be read or decoded. raise: end with an error. skip: leave it out, and list it in
    rejected.txt."""
    check: bool = True
    """With --mode encoded: decode each image as a check. --no-check packs any bytes."""
    base_dir: ExistingFolder | None = None
    """Folder that relative paths in the list start from. [default: folder of the list]"""
    image_column: str = "image"
    """Column of PARQUET with the image files, as bytes or as structs of bytes and path."""
    label_column: str = "label"
    """Column of PARQUET with class numbers or names."""
    columns: Annotated[tuple[str, ...], Option("--columns NAME,NAME,...")] = ()
    """Other columns of PARQUET to keep. [default: none]"""


@Command
def pack(packing: Packing) -> None:
    """Pack images into few large files, in the folder OUT.

    FILE_LIST has one path per line. FOLDER has one folder per class, or Parquet files. OUT becomes a packed set: an
    index and Arrow files, which any Arrow tool reads. fastload.datasets.PackedDataset trains on them. If a run is
    stopped, there is no OUT, and the same command begins anew.

    Needs the extra `arrow`.

    \b
    Examples:
        fastload set pack train.txt packed --mode jpeg --max-size 256 --quality 90
        fastload set pack /data/imagenet/train packed --mode raw --on-error skip
    """
    from fastload.datasets.packed.packing import pack as run_pack

    with sigterm_raises(), bad_values_are_usage_errors():
        click.echo(str(run_pack(**asdict(packing), progress=True)))
