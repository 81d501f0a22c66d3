"""`fastload mnist`: write synthetic digits in MNIST's format, for a machine without a network."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import click

from fastload._kit.options import Folder, Option, options
from fastload.cli._command import Command


@options
class Digits:
    """The digits to make."""

    root: Annotated[Folder, Option("--synthetic OUT")]
    """Folder for the synthetic digits. The files are written to OUT/MNIST/raw."""
    train: Annotated[int, Option(min=1, max=10_000_000)] = 60_000
    """Number of training images."""
    test: Annotated[int, Option(min=1, max=10_000_000)] = 10_000
    """Number of test images."""
    seed: Annotated[int, Option(min=0, max=2**31 - 1)] = 0
    """Seed of the digits. The same seed gives the same digits."""


@Command
def mnist(digits: Digits) -> None:
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
    from fastload.datasets.synthetic import generate_digits

    folder = generate_digits(**asdict(digits), progress=True)
    counts = f"{digits.train} for training, {digits.test} for testing"
    click.echo(f"Synthetic digits, not MNIST: {counts}, in {folder}")
    click.echo(f"Next: fastload.datasets.MNIST({str(digits.root)!r}, train=True)")
