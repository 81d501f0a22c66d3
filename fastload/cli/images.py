"""`fastload images`: make sample images for measurements."""

from __future__ import annotations

from pathlib import Path

import click

from fastload.cli import options as opt
from fastload.cli._common import require, threads_option


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@opt.count("--count", within=(1, 2**30), default=2048, help="Number of images to make.")
@opt.count(
    "--seed",
    within=(0, None),
    default=0,
    help="Seed of the images. The same seed gives the same images.",
)
@threads_option("make them")
def images(out: Path, count: int, seed: int, workers: int | None) -> None:
    """Make sample images for measurements, in the folder OUT.

    The images are synthetic, photo-like JPEGs in ImageNet's layout, of 80 to 110 KB on average. A list of their paths
    is written as well. If a run is stopped, run the command again to complete it.

    \b
    Examples:
        fastload images samples
        fastload images samples --count 512 --seed 1
    """
    require("images", PIL="Pillow")
    from fastload.datasets.synthetic import generate_images

    file_list = generate_images(out, count=count, seed=seed, workers=workers, progress=True)
    click.echo(f"{count} images, listed in {file_list}")
    click.echo(f"Next: fastload bench --file-list-path {file_list}")
