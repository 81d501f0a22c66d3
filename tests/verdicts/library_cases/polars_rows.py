"""Rows of a polars frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT


class Rows(Dataset[Any]):
    """Features and a target from the columns of a frame."""

    def __init__(self, df: pl.DataFrame, target: str) -> None:
        self.df, self.target = df, target

    def __len__(self) -> int:
        return self.df.height

    def __getitem__(self, idx: int) -> Any:
        row = self.df.row(idx, named=True)
        y = row.pop(self.target)
        return torch.tensor(list(row.values()), dtype=torch.float32), y


def frame(folder: Path) -> Made:
    df = pl.DataFrame({"a": range(COUNT), "b": range(COUNT), "y": [0, 1] * (COUNT // 2)})
    scaled = df.with_columns((pl.col("a") / pl.col("a").max()).alias("a"))
    return Made(Rows(scaled, "y"))
