"""Areas of polygons that windows cut, by shapely."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shapely
import torch
from shapely.geometry import Point, box
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT


class Overlaps(Dataset[Any]):
    """For each window, the areas that three polygons have in it."""

    def __init__(self, polygons: list[Any]) -> None:
        self.polygons = polygons
        self.tree = shapely.STRtree(polygons)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        window = box(index, 0, index + 2, 2)
        found = sorted(self.tree.query(window))[:3]
        return torch.tensor([self.polygons[k].intersection(window).area for k in found]), index


def overlaps(folder: Path) -> Made:
    return Made(Overlaps([Point(k, 1).buffer(2) for k in range(COUNT + 4)]))
