"""Images read by imageio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import imageio.v3 as iio
import torch
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import image_folder


class Images(Dataset[Any]):
    """Images, with a label from the folder's name."""

    classes = ("cat", "dog")

    def __init__(self, root: Path) -> None:
        self.paths = sorted(root.rglob("*.png"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = iio.imread(self.paths[index])
        label = self.classes.index(self.paths[index].parent.name)
        return torch.from_numpy(image).permute(2, 0, 1) / 255.0, label


def read(folder: Path) -> Made:
    return Made(Images(image_folder(folder, "png")))
