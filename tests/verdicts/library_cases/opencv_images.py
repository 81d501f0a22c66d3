"""Images read and resized by OpenCV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import image_folder


class Images(Dataset[Any]):
    """Images in RGB, of one size, flipped at random."""

    def __init__(self, paths: list[str], size: int) -> None:
        self.paths, self.size = paths, size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = cv2.imread(self.paths[index], cv2.IMREAD_COLOR)
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        image = cv2.resize(image, (self.size, self.size), interpolation=cv2.INTER_AREA)
        if np.random.rand() < 0.5:
            image = cv2.flip(image, 1)
        image = image.astype(np.float32)
        image -= 127.5
        image /= 127.5
        return torch.from_numpy(image.transpose(2, 0, 1).copy()), index


def read_and_resized(folder: Path) -> Made:
    return Made(Images(sorted(map(str, image_folder(folder).rglob("*.jpg"))), size=24))
