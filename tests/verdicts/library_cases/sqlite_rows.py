"""Rows of sqlite, from a connection for each sample."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT


class Rows(Dataset[Any]):
    """Values and labels by their number."""

    def __init__(self, path: str) -> None:
        self.path = path
        with closing(sqlite3.connect(path)) as connection:
            (self.length,) = connection.execute("SELECT COUNT(*) FROM samples").fetchone()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        with closing(sqlite3.connect(self.path)) as connection:
            cursor = connection.execute("SELECT x, y FROM samples WHERE id = ?", (index,))
            x, y = cursor.fetchone()
        return torch.tensor(json.loads(x)), y


def opened_each_time(folder: Path) -> Made:
    path = str(folder / "samples.db")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, x TEXT, y INTEGER)")
        rows = [(index, json.dumps([index, index / 2]), index % 2) for index in range(COUNT)]
        connection.executemany("INSERT INTO samples VALUES (?, ?, ?)", rows)
    return Made(Rows(path))
