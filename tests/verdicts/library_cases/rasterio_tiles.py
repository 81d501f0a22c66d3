"""Windows of a raster, which each sample opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import torch
from rasterio.windows import Window
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT

SIDE = 8


class Tiles(Dataset[Any]):
    """Tiles of an image with coordinates."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        with rasterio.open(self.path) as source:
            tile = source.read(window=Window(index * SIDE, 0, SIDE, SIDE))
        return torch.from_numpy(tile.astype(np.float32)), index


def opened_each_time(folder: Path) -> Made:
    path = folder / "raster.tif"
    bands = np.arange(2 * SIDE * SIDE * COUNT, dtype=np.uint16).reshape(2, SIDE, SIDE * COUNT)
    with rasterio.open(
        path,
        "w",
        driver="GTiff",
        count=2,
        height=SIDE,
        width=SIDE * COUNT,
        dtype="uint16",
        crs="EPSG:32633",
        transform=rasterio.transform.from_origin(500_000, 5_000_000, 10, 10),
    ) as target:
        target.write(bands)
    return Made(Tiles(path))
