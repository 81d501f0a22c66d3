"""Rows of a pandas frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT


class Rows(Dataset[Any]):
    """Features and a target from the columns of a frame."""

    def __init__(self, df: pd.DataFrame, target: str) -> None:
        self.df = df.reset_index(drop=True)
        self.target = target
        self.features = [column for column in df.columns if column != target]

    def __len__(self) -> int:
        return len(self.df)

    def __getitem__(self, idx: int) -> Any:
        row = self.df.iloc[idx]
        x = row[self.features].to_numpy(dtype=np.float32)
        return torch.from_numpy(x), torch.tensor(row[self.target])


def frame(folder: Path) -> Made:
    columns = {"a": np.arange(COUNT) / 2, "b": np.arange(COUNT) * 3.0, "y": np.arange(COUNT) % 2}
    pd.DataFrame(columns).to_csv(folder / "train.csv", index=False)
    return Made(Rows(pd.read_csv(folder / "train.csv"), "y"))
