"""Fields of a netCDF file. Its C library has no locks, and ends the interpreter if two threads are in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import torch
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT


class Fields(Dataset[Any]):
    """Fields of a file that each sample opens."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        with netCDF4.Dataset(self.path) as file:
            return torch.from_numpy(file["t"][index].filled(0)), index


class Held(Fields):
    """Fields of a variable that is open from the beginning."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.variable = netCDF4.Dataset(path)["t"]

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.variable[index].filled(0)), index


def opened_each_time(folder: Path) -> Made:
    path = folder / "field.nc"
    with netCDF4.Dataset(path, "w") as file:
        for name, size in (("time", COUNT), ("x", 16)):
            file.createDimension(name, size)
        variable = file.createVariable("t", "f4", ("time", "x"))
        variable[:] = np.arange(COUNT * 16, dtype=np.float32).reshape(COUNT, 16)
    return Made(Fields(path))


def held(folder: Path) -> Made:
    return Made(Held(opened_each_time(folder).dataset.path))
