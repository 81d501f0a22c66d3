"""timm's training transforms on a folder of images."""

from __future__ import annotations

from pathlib import Path

from timm.data import create_transform
from torchvision.datasets import ImageFolder

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import image_folder


def imagenet_recipe(folder: Path) -> Made:
    transform = create_transform(
        input_size=24,
        is_training=True,
        auto_augment="rand-m9-mstd0.5-inc1",
        interpolation="bicubic",
        re_prob=0.25,
    )
    return Made(ImageFolder(str(image_folder(folder)), transform=transform))
