"""Points that are projected by pyproj."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pyproj import Geod, Transformer
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT

GEOD = Geod(ellps="WGS84")


class Points(Dataset[Any]):
    """Points in meters, and their distances from the first one."""

    def __init__(self, points: list[tuple[float, float]]) -> None:
        self.points = points
        self.projection = Transformer.from_crs("EPSG:4326", "EPSG:32633", always_xy=True)
        self.first = self.projection.transform(*points[0])

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        x, y = self.projection.transform(*self.points[index])
        _, _, distance = GEOD.inv(*self.points[0], *self.points[index])
        return torch.tensor([x - self.first[0], y - self.first[1]]), distance


def projected(folder: Path) -> Made:
    return Made(Points([(12 + index / 10, 45 - index / 10) for index in range(COUNT)]))
