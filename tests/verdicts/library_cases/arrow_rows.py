"""Rows of an Arrow table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT


class Rows(Dataset[Any]):
    """Values and labels from the columns of a table."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table.combine_chunks()

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: int) -> Any:
        values = self.table.column("values")[index].as_py()
        return torch.tensor(values), self.table["label"][index].as_py()


def table(folder: Path) -> Made:
    columns = {
        "values": [[float(index), 1.0] for index in range(COUNT)],
        "label": [index % 2 for index in range(COUNT)],
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return Made(Rows(pq.read_table(folder / "rows.parquet")))
