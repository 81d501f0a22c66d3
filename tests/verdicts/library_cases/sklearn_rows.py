"""Arrays that scikit-learn made, and a fitted scaler that samples use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made


class Table(Dataset[Any]):
    """Rows, scaled when they are read."""

    def __init__(self, x: Any, y: Any, scaler: StandardScaler) -> None:
        self.x, self.y, self.scaler = x, y, scaler

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        row = self.scaler.transform(self.x[index : index + 1])[0]
        return torch.tensor(row, dtype=torch.float32), int(self.y[index])


def scaled(folder: Path) -> Made:
    x, y = make_classification(n_samples=32, n_features=6, random_state=0)
    train, _, labels, _ = train_test_split(x, y, random_state=0)
    return Made(Table(train, labels, StandardScaler().fit(train)))
