"""A function that numba compiles, called in samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT


@njit
def running_mean(values: Any, width: int) -> Any:
    found = np.empty(len(values) - width + 1)
    for k in range(len(found)):
        found[k] = values[k : k + width].mean()
    return found


class Series(Dataset[Any]):
    """Series of numbers, smoothed when they are read."""

    def __init__(self, series: Any, width: int) -> None:
        self.series, self.width = series, width

    def __len__(self) -> int:
        return len(self.series)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(running_mean(self.series[index], self.width)), index


def compiled(folder: Path) -> Made:
    return Made(Series(np.arange(COUNT * 16.0).reshape(COUNT, 16), 4))
