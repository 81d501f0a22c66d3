"""MONAI's dictionary transforms on volumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from monai.data import Dataset, list_data_collate
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    RandFlipd,
    RandRotate90d,
    RandSpatialCropd,
    ScaleIntensityd,
    ToTensord,
)

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT


def dictionaries(folder: Path) -> Made:
    rng = np.random.default_rng(0)
    volumes = [rng.random((12, 12, 8), np.float32) for _ in range(COUNT)]
    data = [{"image": volume, "label": (volume > 0.5).astype(np.uint8)} for volume in volumes]
    keys = ["image", "label"]
    transform = Compose(
        [
            EnsureChannelFirstd(keys=keys, channel_dim="no_channel"),
            ScaleIntensityd(keys="image"),
            RandSpatialCropd(keys=keys, roi_size=(8, 8, 8), random_size=False),
            RandFlipd(keys=keys, prob=0.5, spatial_axis=0),
            RandRotate90d(keys=keys, prob=0.5),
            ToTensord(keys=keys),
        ]
    )
    return Made(Dataset(data=data, transform=transform), list_data_collate)
