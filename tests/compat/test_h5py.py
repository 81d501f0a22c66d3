"""Promise: With h5py and zarr, 8 workers read 2,048 right rows. The file may be opened early or at the first sample,
and the dataset may keep a buffer.

A dataset keeps an open file, or a buffer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.compat.eight_workers import PAIRS, Pairs, filled, library, wrong_pairs

CHUNK = 16


def rows() -> np.ndarray[Any, Any]:
    return torch.stack([filled(i) for i in range(PAIRS)]).numpy()


@pytest.fixture(scope="module")
def h5_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    h5py = library("h5py")
    path: Path = tmp_path_factory.mktemp("h5") / "rows.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("rows", data=rows(), chunks=(CHUNK, 64))
    return path


@pytest.fixture(scope="module")
def zarr_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    zarr = library("zarr")
    path: Path = tmp_path_factory.mktemp("zarr") / "rows.zarr"
    array = zarr.create_array(store=str(path), shape=(PAIRS, 64), chunks=(CHUNK, 64), dtype="int64")
    array[:] = rows()
    return path


class Rows(Pairs):
    """Rows of a file that is opened at the first sample."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: Any = None
        self.rows: Any = None

    def open(self) -> None:
        if self.rows is None:
            self.file = library("h5py").File(self.path, "r")
            self.rows = self.file["rows"]

    def read(self, index: int) -> Any:
        self.open()
        return self.rows[index]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return torch.from_numpy(self.read(index)).clone(), filled(index)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class Buffered(Rows):
    """A row that is read into a buffer, as h5py's documentation advises for speed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.buffer = np.zeros(64, np.int64)

    def read(self, index: int) -> Any:
        self.open()
        self.rows.read_direct(self.buffer, np.s_[index])
        return self.buffer


class ZarrRows(Rows):
    """Rows of an array that is opened at the first sample."""

    def open(self) -> None:
        if self.rows is None:
            self.rows = library("zarr").open_array(str(self.path), mode="r")


@pytest.mark.parametrize("dataset", [Rows, Buffered])
@pytest.mark.parametrize("early", [True, False], ids=["open", "lazy"])
def test_h5py(h5_file: Path, dataset: type[Rows], early: bool) -> None:
    read = dataset(h5_file)
    if early:
        read.open()
    assert wrong_pairs(read, shuffle=True) == 0
    read.close()


@pytest.mark.parametrize("early", [True, False], ids=["open", "lazy"])
def test_zarr(zarr_store: Path, early: bool) -> None:
    read = ZarrRows(zarr_store)
    if early:
        read.open()
    assert wrong_pairs(read, shuffle=True) == 0
