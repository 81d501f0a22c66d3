"""`fastload images`: make sample images for measurements."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import click

from fastload._kit.options import Folder, Index, Option, options
from fastload.cli._command import Command
from fastload.cli._common import Parallel


@options
class Images(Parallel):
    """The images to make."""

    out: Annotated[Folder, Option("OUT")]
    count: Annotated[int, Option(min=1, max=2**30)] = 2048
    """Number of images to make."""
    seed: Index = 0
    """Seed of the images. The same seed gives the same images."""


@Command
def images(options: Images) -> None:
    """Make sample images for measurements, in the folder OUT.

    The images are synthetic, photo-like JPEGs in ImageNet's layout, of 80 to 110 KB on average. A list of their paths
    is written as well. If a run is stopped, run the command again to complete it.

    \b
    Examples:
        fastload images samples
        fastload images samples --count 512 --seed 1
    """
    from fastload.datasets.synthetic import generate_images

    file_list = generate_images(**asdict(options), progress=True)
    click.echo(f"{options.count} images, listed in {file_list}")
    click.echo(f"Next: fastload bench --file-list-path {file_list}")
