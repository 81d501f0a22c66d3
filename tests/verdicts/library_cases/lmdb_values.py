"""Encoded images in an lmdb environment, opened at the first sample."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT, encoded


class Images(Dataset[Any]):
    """Images and labels, pickled together under a number."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.env: Any = None
        env = lmdb.open(path, readonly=True, lock=False)
        with env.begin() as txn:
            self.length = int(txn.get(b"length"))
        env.close()

    def _open(self) -> None:
        self.env = lmdb.open(self.path, readonly=True, lock=False, readahead=False, meminit=False)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.env is None:
            self._open()
        with self.env.begin(write=False) as txn:
            data, label = pickle.loads(txn.get(f"{index:08d}".encode()))
        image = Image.open(io.BytesIO(data)).convert("RGB")
        return torch.from_numpy(np.array(image)), label


def opened_lazily(folder: Path) -> Made:
    env = lmdb.open(str(folder / "images"), map_size=2**24)
    with env.begin(write=True) as txn:
        for index in range(COUNT):
            txn.put(f"{index:08d}".encode(), pickle.dumps((encoded(index), index % 2)))
        txn.put(b"length", str(COUNT).encode())
    env.close()
    return Made(Images(str(folder / "images")))
