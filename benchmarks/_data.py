"""Datasets of the benchmarks. Each sample, or its last element, is its index, so a lost or doubled one is found."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import sleep
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset


class Photos(Dataset[Any]):
    """A plain dataset of image files. The index takes the place of the label."""

    def __init__(self, paths: list[str], transform: Any) -> None:
        self.paths = paths
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB")), index


def sample_images(count: int) -> list[str]:
    """Return the paths of `count` generated images. A folder of this user keeps them between runs."""
    folder = Path(tempfile.gettempdir(), f"fastload-benchmarks-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{folder} belongs to another user. Set TMPDIR to a folder of your own"
        )
    images = folder / f"images-{count}"
    # Another process makes the images: it would leave threads and memory to the loaders that are measured here.
    command = [sys.executable, "-m", "fastload", "images", str(images), "--count", str(count)]
    if not (images / "filelist.txt").exists():
        subprocess.run(command, check=True)
    return [str(images / line) for line in (images / "filelist.txt").read_text().splitlines()]


class Slow(Dataset[int]):
    """`length` samples, each its own index. A simulated read of `seconds` releases the GIL."""

    def __init__(self, length: int, *, seconds: float) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        sleep(self.seconds)
        return index


class Floats(Dataset[Any]):
    """float32[3, 224, 224], which costs little to make."""

    pixels = torch.zeros(3, 224, 224)

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.pixels + index, index


class Ready(Floats):
    """Samples that cost nothing: float32[16], made beforehand."""

    row = torch.arange(16, dtype=torch.float32)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.row, index


class Arrays(Ready):
    """The same as an array of NumPy's."""

    row: Any = Ready.row.numpy()


class Bytes(Floats):
    """uint8[784], ready in memory."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rows = torch.zeros(length, 784, dtype=torch.uint8)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.rows[index], index


class Tokens(Floats):
    """int64[128] of a tokenizer in pure Python, which holds the GIL."""

    text = "the loader reads a sample in its own stream and puts it into the batch " * 8

    def __getitem__(self, index: int) -> tuple[Any, int]:
        ids, word = [], 0
        for letter in self.text:
            if letter == " ":
                ids.append(word % 30_000)
                word = index
            else:
                word = (word * 31 + ord(letter)) & 0xFFFF_FFFF
        return torch.tensor(ids[:128]), index


class FileNames(Floats):
    """Names as a dataset of image files keeps them: Python objects, whose pages are written when they are read."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.names = [f"train/n{k % 1000:08d}/n{k % 1000:08d}_{k}.JPEG" for k in range(length)]

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return len(self.names[index]), index


def pixels(length: int) -> TensorDataset:
    """Return uint8[length, 784] and the indices. Each row is a function of its index, so a wrong pair is found."""
    indices = torch.arange(length)
    return TensorDataset((indices[:, None] * 31 + torch.arange(784)).to(torch.uint8), indices)
