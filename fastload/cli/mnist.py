"""`fastload mnist`: digits in MNIST's files, for a machine without a network."""

from __future__ import annotations

from pathlib import Path

import click

_COUNT = click.IntRange(1, 10_000_000)


@click.command()
@click.option(
    "--synthetic",
    "out",
    required=True,
    metavar="OUT",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to write synthetic digits to, in OUT/MNIST/raw.",
)
@click.option(
    "--train",
    default=60_000,
    show_default=True,
    type=_COUNT,
    help="Images for training.",
)
@click.option(
    "--test",
    default=10_000,
    show_default=True,
    type=_COUNT,
    help="Images for testing.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0, 2**31 - 1),
    help="Same seed, same digits.",
)
def mnist(out: Path, train: int, test: int, seed: int) -> None:
    """Write synthetic digits in MNIST's files, to try a training without a network.

    The digits are drawn: 28 x 28 pixels, 10 classes. A small convolutional network learns them in an epoch. They are
    not MNIST, and SYNTHETIC.txt beside them says so: report no accuracy on them as one on MNIST.

    fastload and torchvision both read the folder:

    \b
        from fastload.datasets import MNIST
        dataset = MNIST("OUT", train=True, tensors=True)

    Nothing is overwritten. A run that was stopped is completed by running it again. For MNIST itself, on a machine with
    a network: MNIST("OUT", download=True).
    """
    from fastload.datasets.digits import generate_digits

    folder = generate_digits(out, train=train, test=test, seed=seed, progress=True)
    click.echo(
        f"Synthetic digits, not MNIST: {train} for training, {test} for testing, in {folder}"
    )
    click.echo(f"Next: fastload.datasets.MNIST({str(out)!r}, train=True)")
