"""torchvision's datasets, and a user's own after their model."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torchvision import transforms
from torchvision.datasets import FakeData, ImageFolder, VisionDataset

from tests.verdicts.library_cases import Made, files
from tests.verdicts.library_cases.files import COUNT, pixels

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

train_transform = transforms.Compose(
    [
        transforms.RandomResizedCrop(24),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
)


class TwoViews:
    """Applies a transform twice, as SimCLR does."""

    def __init__(self, base_transform: Any, n_views: int = 2) -> None:
        self.base_transform = base_transform
        self.n_views = n_views

    def __call__(self, x: Any) -> list[Any]:
        return [self.base_transform(x) for _ in range(self.n_views)]


def two_views(folder: Path) -> Made:
    jitter = transforms.ColorJitter(0.8, 0.8, 0.8, 0.2)
    pipeline = transforms.Compose(
        [
            transforms.RandomResizedCrop(size=24),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([jitter], p=0.8),
            transforms.RandomGrayscale(p=0.2),
            transforms.GaussianBlur(kernel_size=3),
            transforms.ToTensor(),
        ]
    )
    return Made(ImageFolder(str(files.image_folder(folder)), transform=TwoViews(pipeline)))


def fake_data(folder: Path) -> Made:
    return Made(FakeData(COUNT, (3, 32, 32), 10, transform=train_transform))


def is_jpeg(path: str) -> bool:
    return path.endswith(".jpg")


def image_folder(folder: Path) -> Made:
    root = str(files.image_folder(folder))
    return Made(ImageFolder(root, transform=train_transform, is_valid_file=is_jpeg))


class Batches(VisionDataset):
    """Images in pickled arrays, as CIFAR has them."""

    base_folder = "batches"
    train_list = ("data_batch_1", "data_batch_2")

    def __init__(self, root: str, transform: Any = None, target_transform: Any = None) -> None:
        super().__init__(root, transform=transform, target_transform=target_transform)
        self.data: Any = []
        self.targets: list[int] = []
        for name in self.train_list:
            with open(Path(root) / self.base_folder / name, "rb") as f:
                entry = pickle.load(f)
            self.data.append(entry["data"])
            self.targets.extend(entry["labels"])
        self.data = np.vstack(self.data)

    def __getitem__(self, index: int) -> Any:
        img, target = self.data[index], self.targets[index]
        img = Image.fromarray(img)
        if self.transform is not None:
            img = self.transform(img)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return img, target

    def __len__(self) -> int:
        return len(self.data)


def cifar_like(folder: Path) -> Made:
    (folder / Batches.base_folder).mkdir()
    for name in Batches.train_list:
        data = np.stack([pixels(index) for index in range(COUNT)])
        labels = [index % 2 for index in range(COUNT)]
        content = pickle.dumps({"data": data, "labels": labels})
        (folder / Batches.base_folder / name).write_bytes(content)
    return Made(Batches(str(folder), transform=train_transform))
