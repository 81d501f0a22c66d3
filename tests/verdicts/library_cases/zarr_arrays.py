"""A zarr array, open from the beginning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT


class Windows(Dataset[Any]):
    """Two successive steps of a field."""

    def __init__(self, path: str) -> None:
        self.array = zarr.open(path, mode="r")
        self.mean = float(np.mean(self.array[:]))

    def __len__(self) -> int:
        return self.array.shape[0] - 1

    def __getitem__(self, index: int) -> Any:
        x = self.array[index].astype(np.float32)
        y = self.array[index + 1].astype(np.float32)
        return torch.from_numpy(x - self.mean), torch.from_numpy(y - self.mean)


def array(folder: Path) -> Made:
    path = str(folder / "field.zarr")
    field = zarr.open(path, mode="w", shape=(COUNT, 8, 8), chunks=(1, 8, 8), dtype="f4")
    field[:] = np.arange(COUNT * 64, dtype=np.float32).reshape(COUNT, 8, 8)
    return Made(Windows(path))
