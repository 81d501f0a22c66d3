"""Tensors augmented by kornia."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kornia.augmentation as K
import torch
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT


class Tensors(Dataset[Any]):
    """Images in one tensor, each augmented when it is read."""

    def __init__(self, images: torch.Tensor, augment: Any) -> None:
        self.images, self.augment = images, augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        with torch.no_grad():
            return self.augment(self.images[index])[0], index


def augmented(folder: Path) -> Made:
    augment = K.AugmentationSequential(
        K.RandomHorizontalFlip(p=0.5), K.ColorJitter(0.1, 0.1, 0.1, 0.1), data_keys=["input"]
    )
    return Made(Tensors(torch.rand(COUNT, 3, 16, 16), augment))
