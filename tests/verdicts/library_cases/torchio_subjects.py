"""Subjects of torchio with random transforms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torchio as tio

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT


def collate(subjects: list[Any]) -> Any:
    return torch.stack([subject["mri"].data for subject in subjects])


def subjects(folder: Path) -> Made:
    found = [
        tio.Subject(
            mri=tio.ScalarImage(tensor=torch.rand(1, 12, 12, 8)),
            mask=tio.LabelMap(tensor=torch.ones(1, 12, 12, 8)),
        )
        for _ in range(COUNT)
    ]
    transform = tio.Compose(
        [tio.RescaleIntensity((0, 1)), tio.RandomFlip(axes=(0,)), tio.RandomNoise(std=0.1)]
    )
    return Made(tio.SubjectsDataset(found, transform=transform), collate)
