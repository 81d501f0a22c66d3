"""Arrays changed by scipy.ndimage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.ndimage as ndi
import torch
from scipy.signal import convolve
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT, pixels


class Rotated(Dataset[Any]):
    """Images turned by a random angle and smoothed."""

    def __init__(self, images: Any) -> None:
        self.images = images
        self.kernel = np.ones((3, 3), np.float32) / 9

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image = self.images[index].astype(np.float32)
        image = ndi.rotate(image, np.random.uniform(-20, 20), reshape=False, order=1)
        image = convolve(ndi.gaussian_filter(image, sigma=1), self.kernel, mode="same")
        image /= 255
        return torch.from_numpy(image), index


def rotated(folder: Path) -> Made:
    return Made(Rotated(np.stack([pixels(index)[..., 0] for index in range(COUNT)])))
