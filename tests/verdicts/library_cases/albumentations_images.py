"""Images and masks in NumPy, augmented by albumentations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import torch
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT, pixels


class Segmentation(Dataset[Any]):
    """Images with masks, of which both are cut alike."""

    def __init__(self, images: Any, masks: Any, transform: Any = None) -> None:
        self.images, self.masks = images, masks
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image, mask = self.images[index], self.masks[index]
        if self.transform is not None:
            transformed = self.transform(image=image, mask=mask)
            image, mask = transformed["image"], transformed["mask"]
        return torch.from_numpy(image).permute(2, 0, 1), torch.from_numpy(mask)


def masks(folder: Path) -> Made:
    transform = A.Compose(
        [
            A.RandomCrop(width=24, height=24),
            A.HorizontalFlip(p=0.5),
            A.RandomBrightnessContrast(p=0.2),
            A.Normalize(),
        ]
    )
    images = np.stack([pixels(index) for index in range(COUNT)])
    return Made(Segmentation(images, (images[..., 0] > 40).astype(np.int64), transform))
