"""`fastload images`: sample images to measure with."""

from __future__ import annotations

from pathlib import Path

import click

from fastload.cli._common import require


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--count",
    default=2048,
    show_default=True,
    type=click.IntRange(1, 2**30),
    help="Images to make.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Same seed, same images.",
)
@click.option(
    "--workers",
    type=click.IntRange(0, 1024),
    help="Threads that make them; by default one for each core. 0: none beside the main one.",
)
def images(out: Path, count: int, seed: int, workers: int | None) -> None:
    """Make sample images to measure with, in the folder OUT.

    Photo-like JPEGs in ImageNet's layout, 80 to 110 KB on average, and a list of them. They are synthetic. A run that
    was stopped is completed by running it again.
    """
    require("images", PIL="Pillow")
    from fastload.datasets.synthetic import generate_images

    file_list = generate_images(out, count=count, seed=seed, workers=workers, progress=True)
    click.echo(f"{count} images, listed in {file_list}")
    click.echo(f"Next: fastload bench --file-list {file_list}")
