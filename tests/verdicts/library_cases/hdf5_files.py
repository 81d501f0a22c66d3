"""An HDF5 file, opened at the first sample or for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT, pixels


class Lazy(Dataset[Any]):
    """Opens the file at the first sample, in each worker."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file: Any = None
        with h5py.File(path, "r") as file:
            self.length = len(file["images"])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        image = self.file["images"][index]
        return torch.from_numpy(image).float() / 255, int(self.file["labels"][index])


class EachTime(Lazy):
    """Opens the file for each sample."""

    def __getitem__(self, index: int) -> Any:
        with h5py.File(self.path, "r") as file:
            image = file["images"][index]
            label = file["labels"][index]
        return torch.from_numpy(image), int(label)


def written(folder: Path) -> str:
    """Write images and labels, and return the path."""
    path = str(folder / "images.h5")
    with h5py.File(path, "w") as file:
        images = np.stack([pixels(index) for index in range(COUNT)])
        file.create_dataset("images", data=images, chunks=(1, 32, 32, 3), compression="gzip")
        file["labels"] = np.arange(COUNT) % 2
    return path


def opened_lazily(folder: Path) -> Made:
    return Made(Lazy(written(folder)))


def opened_each_time(folder: Path) -> Made:
    return Made(EachTime(written(folder)))
