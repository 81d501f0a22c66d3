"""`fastload pack`: pack images into a packed set."""

from __future__ import annotations

from typing import Any

import click

from fastload.cli import options as opt
from fastload.cli._common import (
    bad_values_are_usage_errors,
    base_option,
    names_option,
    require,
    threads_option,
)


@click.command()
@click.argument("source", type=click.Path(exists=True), metavar="FILE_LIST|FOLDER|PARQUET")
@click.argument("out", type=click.Path(file_okay=False))
@opt.choice(
    "--mode",
    ["encoded", "jpeg", "raw"],
    default="jpeg",
    help="Content of the set. encoded: the files as they are. jpeg: images reduced to --max-size, as JPEGs. raw: "
    "their pixels. jpeg and raw ignore and drop the EXIF orientation.",
)
@opt.count(
    "--max-size",
    within=(1, 65535),
    help="Maximum length of the longer side with jpeg and raw, in pixels.  [default: 256]",
)
@opt.count(
    "--quality",
    within=(1, 95),
    help="Quality of the JPEGs with --mode jpeg, as in libjpeg.  [default: 90]",
)
@click.option(
    "--shard-mb",
    default=256.0,
    type=click.FloatRange(min=0.001, max=1_000_000),
    help="Size of a shard, in megabytes (millions of bytes) of images and --columns. A shard ends with the record "
    "that reaches this size.",
)
@threads_option("read, decode and encode")
@opt.choice(
    "--on-error",
    ["raise", "skip"],
    help="Action for an input that cannot be read or decoded. raise: end with an error. skip: leave it out, and list "
    "it in rejected.txt.",
)
@click.option(
    "--check/--no-check",
    default=True,
    help="With --mode encoded: decode each image as a check. --no-check packs any bytes.",
)
@base_option
@click.option(
    "--image-column",
    default="image",
    help="Column of PARQUET with the image files, as bytes or as structs of bytes and path.",
)
@click.option(
    "--label-column", default="label", help="Column of PARQUET with class numbers or names."
)
@names_option("Other columns of PARQUET to keep.  [default: none]")
def pack(source: str, out: str, **options: Any) -> None:
    """Pack images into few large files, in the folder OUT.

    FILE_LIST has one path per line. FOLDER has one folder per class, or Parquet files. OUT becomes a packed set: an
    index and Arrow files, which any Arrow tool reads. fastload.datasets.PackedDataset trains on them. If a run is
    stopped, run the command again to complete it. Until then, OUT cannot be opened as a set.

    Needs pip install '.[arrow]' in the clone.

    \b
    Examples:
        fastload pack train.txt packed --mode jpeg --max-size 256 --quality 90
        fastload pack /data/imagenet/train packed --mode raw --on-error skip
    """
    require("arrow", pyarrow="pyarrow")
    require("images", PIL="Pillow")
    from fastload.datasets.packed.packing import pack as run_pack

    with bad_values_are_usage_errors():
        click.echo(str(run_pack(source, out, progress=True, **options)))
