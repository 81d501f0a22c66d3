"""Promises:
- Lengths come from an array, a column of a set or of Parquet files, or a function of the index, and no sample is read.
- A column of lists in a Parquet file gives the numbers of their values. Filters and chosen rows count.
- A length that is missing, less than 1 or no integer is named with its sample, and so is another number of samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from fastload.datasets import ParquetDataset
from fastload.sequences import TokenBatchSampler, lengths_of
from fastload.store import get, put
from fastload.store.dataset import SetDataset

COUNTS = np.random.default_rng(0).integers(1, 9, 100)
TABLE = pa.table(
    {
        "length": COUNTS,
        "tokens": pa.array([[7] * k for k in COUNTS], pa.list_(pa.int32())),
        "pair": pa.array([[1, 2]] * 100, pa.list_(pa.int32(), 2)),
        "id": range(100),
        "wide": pa.array(COUNTS, pa.uint64()),
        "text": ["a"] * 100,
    }
)


@pytest.mark.parametrize(
    "source",
    [
        COUNTS,
        COUNTS.tolist(),
        torch.from_numpy(COUNTS),
        COUNTS.astype(np.uint8),
        lambda k: COUNTS[k],
    ],
    ids=["array", "list", "tensor", "bytes", "function"],
)
def test_lengths_of_arrays_and_functions(source: Any) -> None:
    for dataset in (100, [0] * 100):
        assert lengths_of(source, dataset).tolist() == COUNTS.tolist()


@pytest.mark.parametrize("column", ["length", "tokens", "wide"])
def test_lengths_of_parquet_files(column: str, tmp_path: Path) -> None:
    pq.write_table(TABLE[:60], tmp_path / "a.parquet", row_group_size=7)
    pq.write_table(TABLE[60:], tmp_path / "b.parquet", row_group_size=11)
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for where in (tmp_path, str(tmp_path), files, ParquetDataset(tmp_path, columns="id")):
        assert lengths_of((where, column), 100).tolist() == COUNTS.tolist()
    assert lengths_of((files[1], column)).tolist() == COUNTS[60:].tolist()
    for filters in (
        pc.field("id") % 2 == 1 if hasattr(pc.Expression, "__mod__") else pc.field("id") > 70,
        [("id", ">", 70)],
    ):
        kept = ParquetDataset(tmp_path, columns="text", filters=filters)
        ids = [int(k) for k in ParquetDataset(tmp_path, columns="id", filters=filters)]
        assert 0 < len(ids) < 100
        assert lengths_of((kept, column), kept).tolist() == COUNTS[ids].tolist()
    assert lengths_of((tmp_path, "pair")).tolist() == [2] * 100


def test_lengths_of_a_set_and_of_some_of_its_rows(tmp_path: Path) -> None:
    put(
        [{"length": COUNTS[:30], "x": COUNTS[:30]}, {"length": COUNTS[30:], "x": COUNTS[30:]}],
        "a",
        root=tmp_path,
    )
    whole = get("a", data="x", root=tmp_path)
    assert lengths_of((whole, "length"), whole).tolist() == COUNTS.tolist()
    rows = np.array([99, 3, 3, 40])
    some = SetDataset(whole.path, data="x", rows=rows, order="some")
    assert lengths_of((some, "length"), some).tolist() == COUNTS[rows].tolist()
    with pytest.raises(KeyError, match="tokens"):
        lengths_of((whole, "tokens"))


def test_no_sample_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    dataset = ParquetDataset(tmp_path, columns="text")
    read: list[Any] = []
    monkeypatch.setattr(ParquetDataset, "__getitems__", lambda _self, indices: read.append(indices))
    lengths = lengths_of((dataset, "length"), dataset)
    assert len([*TokenBatchSampler(lengths, budget=20)]) > 20
    assert read == []


@pytest.mark.parametrize(
    ("source", "dataset", "error", "message"),
    [
        ([3, 0, 2], None, ValueError, "expected 1 or more, got 0 for sample 1"),
        (lambda k: k, 3, ValueError, "expected 1 or more, got 0 for sample 0"),
        (lambda k: 1.5, 3, TypeError, "the length of sample 0 must be an integer, got 1.5"),
        (lambda k: k + 1, None, TypeError, "need the dataset, or the number of its samples"),
        ([1, 2], 3, ValueError, "a length for each of 3 samples, got 2"),
        ([0.5], None, TypeError, "expected integers in one dimension, got float64"),
        ([True], None, TypeError, "got bool"),
        ([[1, 2], [3]], None, TypeError, "expected integers in one dimension, got lists"),
        ("abc", None, TypeError, "expected integers in one dimension"),
    ],
)
def test_wrong_lengths_are_named(
    source: Any, dataset: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        lengths_of(source, dataset)
