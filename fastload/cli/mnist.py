"""`fastload mnist`: write synthetic digits in MNIST's format, for a machine without a network."""

from __future__ import annotations

from pathlib import Path

import click

from fastload.cli import options as opt

_COUNT = click.IntRange(1, 10_000_000)


@click.command()
@opt.folder(
    "--synthetic out",
    required=True,
    metavar="OUT",
    help="Folder for the synthetic digits. The files are written to OUT/MNIST/raw.",
)
@click.option("--train", default=60_000, type=_COUNT, help="Number of training images.")
@click.option("--test", default=10_000, type=_COUNT, help="Number of test images.")
@opt.count(
    "--seed",
    within=(0, 2**31 - 1),
    default=0,
    help="Seed of the digits. The same seed gives the same digits.",
)
def mnist(out: Path, train: int, test: int, seed: int) -> None:
    """Write synthetic digits in MNIST's format, to try training without a network.

    The digits are drawn by a program, with 28 x 28 pixels and 10 classes. A small convolutional network learns them in
    one epoch. They are not MNIST, as SYNTHETIC.txt in the folder says. Do not report an accuracy on them as one on
    MNIST.

    Both fastload and torchvision read the folder:

    \b
        from fastload.datasets import MNIST
        dataset = MNIST("OUT", train=True, tensors=True)

    Nothing is overwritten. If a run is stopped, run the command again to complete it. For MNIST itself, use
    MNIST("OUT", download=True) on a machine with a network.
    """
    from fastload.datasets.digits import generate_digits

    folder = generate_digits(out, train=train, test=test, seed=seed, progress=True)
    click.echo(
        f"Synthetic digits, not MNIST: {train} for training, {test} for testing, in {folder}"
    )
    click.echo(f"Next: fastload.datasets.MNIST({str(out)!r}, train=True)")
