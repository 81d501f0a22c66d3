"""Volumes that SimpleITK reads and resamples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK as sitk
import torch
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT


class Volumes(Dataset[Any]):
    """Volumes from files, with other spacing."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        volume = sitk.ReadImage(self.paths[index])
        resampler = sitk.ResampleImageFilter()
        resampler.SetReferenceImage(volume)
        resampler.SetOutputSpacing((2.0, 2.0, 2.0))
        resampler.SetInterpolator(sitk.sitkLinear)
        resampled = resampler.Execute(volume)
        return torch.from_numpy(sitk.GetArrayFromImage(resampled)), index


def resampled(folder: Path) -> Made:
    paths = [str(folder / f"{index}.nii.gz") for index in range(COUNT)]
    for index, path in enumerate(paths):
        values = np.arange(512, dtype=np.float32).reshape(8, 8, 8) * index
        sitk.WriteImage(sitk.GetImageFromArray(values), path)
    return Made(Volumes(paths))


class OntoAtlas(Dataset[Any]):
    """Volumes on the grid of an atlas. Views of one image that other threads use end the interpreter."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.atlas = sitk.ReadImage(paths[0])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        moved = sitk.Resample(sitk.ReadImage(self.paths[index]), self.atlas)
        difference = sitk.GetArrayFromImage(moved) - sitk.GetArrayViewFromImage(self.atlas)
        return torch.from_numpy(difference), index


def held(folder: Path) -> Made:
    return Made(OntoAtlas(resampled(folder).dataset.paths))
