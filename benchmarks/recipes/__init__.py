"""How each loader is told to do the same work: one module per loader, with the recipe that its own documents recommend.

A module of this package offers

    opened(task: Task) -> generator of the passes, one iterable whose every pass is an epoch of Batch, which it closes
    pack(root: Path, out: Path, variant: str)      where the loader reads a format of its own: writes `root` to `out`

and imports its loader at the top, so that a loader which is not installed is an ImportError. The work is:
RandomResizedCrop(224) with torchvision's defaults and a random flip, shuffled, `task.batch` images a batch,
`task.workers` threads or processes. `root` is `tree(count)`: a directory for each image, so that the number of its
class is the number of the image.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

import torch

from benchmarks._data import sample_images

Batch = tuple[torch.Tensor, torch.Tensor]
"""uint8[B, 3, 224, 224] in any memory format, and the images' numbers, int64[B]."""

SIZE = 224
PACKED_SIDE = 256
"""The longer side, in pixels, of images that are made smaller when they are packed."""
QUALITY = 90
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """What a recipe is to do."""

    source: Path
    """The tree of images, or what `pack` wrote."""
    variant: str
    """Which of a module's recipes, or of its formats."""
    count: int
    """Images in `source`."""
    batch: int
    workers: int
    how: str = "planes"
    """Of fastload's plan: "planes" or "last" (channels-last), and the same with " whole" (whole JPEGs are decoded)."""


class Endless(Generic[T]):
    """Passes over an iterator that never ends: each one takes `count` from it."""

    def __init__(self, source: Iterable[T], count: int) -> None:
        self._source, self._count = iter(source), count

    def __iter__(self) -> Iterator[T]:
        return islice(self._source, self._count)


def points(images: torch.Tensor) -> torch.Tensor:
    """A copy of 8 x 8 pixels of each image, symmetric about its middle: what is kept to see that it is right."""
    return images[:, :, 10::29, 10::29].clone(memory_format=torch.contiguous_format)


def tree(count: int) -> Path:
    """The directory of `count` generated JPEGs, each in a directory whose name, among the sorted ones, is its number.

    Beside the directories stands filelist.txt, with the paths in that order. Kept between runs.
    """
    images = [Path(path) for path in sample_images(count)]
    root = Path(os.path.commonpath(images)).parent.parent / f"peers-{count}-images" / "images"
    if not root.exists():
        partial = _emptied(root.with_name(f"images.{os.getpid()}"))
        for number, image in enumerate(images):
            directory = partial / f"{number:05d}"
            directory.mkdir()
            os.link(image, directory / "image.jpg")
        lines = [f"{number:05d}/image.jpg\n" for number in range(count)]
        (partial / "filelist.txt").write_text("".join(lines))
        partial.rename(root)
    return root


def files(root: Path) -> list[str]:
    """The images of a tree, by number."""
    return [str(root / line) for line in (root / "filelist.txt").read_text().splitlines()]


def packed(recipe: str, variant: str, root: Path) -> Path:
    """What the recipe's `pack` made of a tree; kept beside it between runs, and made by a process of its own.

    Raises subprocess.CalledProcessError where that process fails; its message is on the standard error.
    """
    out = root.parent / f"{recipe}-{variant}"
    if not out.exists():
        partial = _emptied(root.parent / f"{recipe}-{variant}.{os.getpid()}")
        command = [sys.executable, "-m", "benchmarks.recipes", recipe, variant, root, partial]
        try:
            subprocess.run(command, check=True, stdout=sys.stderr.fileno())
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return out


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
