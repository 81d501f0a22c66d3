"""Images changed by functions of scikit-image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from skimage import color, exposure, io, transform
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import image_folder


class Rescale:
    """Resizes the image in a sample, as torch's tutorial on data loading does."""

    def __init__(self, output_size: int) -> None:
        self.output_size = output_size

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        image = transform.resize(sample["image"], (self.output_size, self.output_size))
        return {**sample, "image": image}


class Files(Dataset[Any]):
    """Images, turned and equalized."""

    def __init__(self, paths: list[Path], change: Any) -> None:
        self.paths, self.change = paths, change

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, idx: int) -> Any:
        sample = self.change({"image": io.imread(self.paths[idx]), "index": idx})
        turned = transform.rotate(sample["image"], np.random.uniform(-10, 10))
        gray = exposure.equalize_hist(color.rgb2gray(turned))
        return {"image": torch.from_numpy(gray).float(), "index": idx}


def warped(folder: Path) -> Made:
    return Made(Files(sorted(image_folder(folder, "png").rglob("*.png")), Rescale(24)))
