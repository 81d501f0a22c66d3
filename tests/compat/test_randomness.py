"""Promises:
- Random transforms of MONAI, albumentations, kornia, torchio, audiomentations, timm and SciPy give bit-equal batches
  for 0, 1, 2 and 8 workers.
- Random transforms of these libraries give 2,048 distinct samples in two epochs.
- 8 workers give 2,048 right pairs to code that seeds twice.

The images are all the same noise, so only draws make samples differ.
"""

from __future__ import annotations

import os
import random
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fastload import DataLoader
from tests.compat.eight_workers import Pairs, batches, library, sample_image, wrong_pairs
from tests.fakes import Numbers

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # it asks the network for its newest version

# The libraries' own affairs: Python's and NumPy's deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SEED = 7
FEW = 48  # samples of an epoch that is compared
Transform = Callable[[Any], Any]  # of an image: float32[12, 12, 3]


# ---- transforms: each draws from continuous distributions ----


def monai(seed: int | None) -> Transform:
    transforms = library("monai.transforms")
    steps = [
        transforms.RandGaussianNoise(prob=1.0, std=0.5),
        transforms.RandScaleIntensity(0.5, prob=1.0),
        transforms.RandRotate90(prob=0.5),
    ]
    composed = transforms.Compose(steps)
    return composed if seed is None else composed.set_random_state(seed)  # type: ignore[no-any-return]


def monai_dictionaries() -> Transform:
    transforms = library("monai.transforms")
    both = transforms.Compose(
        [
            transforms.RandGaussianNoised(["image"], prob=1.0, std=0.5),
            transforms.RandSpatialCropd(["image", "label"], (6, 6), random_size=False),
        ]
    )

    def transform(image: Any) -> Any:
        image = image.transpose(2, 0, 1)
        found = both({"image": image, "label": image.copy()})
        return np.concatenate([found["image"], found["label"]])

    return transform


def albumentations(seed: int | None) -> Transform:
    a = library("albumentations")
    bright = a.OneOf([a.RandomBrightnessContrast(p=1), a.RandomGamma(p=1)], p=1)
    made = a.Compose([bright, a.GaussNoise(p=1), a.RandomCrop(8, 8)], seed=seed)
    return lambda image: made(image=image)["image"]


def kornia() -> Transform:
    k = library("kornia.augmentation")
    steps = [k.RandomAffine(90.0, p=1.0), k.ColorJiggle(0.3, 0.3, p=1.0)]
    made = k.AugmentationSequential(*steps, random_apply=(1, 2))
    return lambda image: made(torch.from_numpy(image).permute(2, 0, 1)[None])


def torchio() -> Transform:
    tio = library("torchio")
    one_of = tio.OneOf([tio.RandomGamma(), tio.RandomBiasField()])
    made = tio.Compose([one_of, tio.RandomFlip(), tio.RandomNoise()])
    return lambda image: made(torch.from_numpy(image)[None])


def audiomentations() -> Transform:
    audio = library("audiomentations")
    made = audio.Compose([audio.Gain(-20, 20, p=1), audio.Shift(p=0.5)], shuffle=True)
    return lambda image: made(image.reshape(-1), sample_rate=8_000)


def timm() -> Transform:
    data, image = library("timm.data"), library("PIL.Image")
    augment = library("timm.data.auto_augment")
    erase = data.random_erasing.RandomErasing(1.0, mode="pixel", device="cpu")
    crop = data.transforms.RandomResizedCropAndInterpolation(12, interpolation="random")
    policy = augment.rand_augment_transform("rand-m7-mstd0.5-inc1", {})

    def transform(given: Any) -> Any:
        pixels = np.asarray(policy(crop(image.fromarray((given * 255).astype(np.uint8)))))
        return erase(torch.from_numpy(pixels.copy()).permute(2, 0, 1).float())

    return transform


def scipy() -> Transform:
    stats = library("scipy.stats")
    frozen = stats.norm(0, 1)
    return lambda _: [*frozen.rvs(size=3), *stats.truncnorm.rvs(-1, 1, size=3)]


def scikit_learn() -> Transform:
    utils = library("sklearn.utils")
    held = utils.check_random_state(None)
    return lambda _: [*utils.check_random_state(None).rand(3), *held.rand(3)]


CASES: dict[str, Callable[[], Transform]] = {
    "monai": lambda: monai(None),
    "monai, seeded": lambda: monai(3),
    "monai, dictionaries": monai_dictionaries,
    "albumentations": lambda: albumentations(None),
    "albumentations, seeded": lambda: albumentations(3),
    "kornia": kornia,
    "torchio": torchio,
    "audiomentations": audiomentations,
    "timm": timm,
    "scipy": scipy,
    "scikit-learn": scikit_learn,
}
EACH = pytest.mark.parametrize("case", CASES)


# ---- bit-equal and distinct ----


class Augmented(Numbers):
    """(index, one image of noise after a transform)."""

    def __init__(self, case: str, length: int = FEW) -> None:
        super().__init__(length)
        self.transform = CASES[case]()
        self.image = np.random.RandomState(0).rand(12, 12, 3).astype(np.float32)

    def __getitem__(self, index: int) -> Any:
        found = self.transform(self.image.copy())
        return index, torch.as_tensor(np.asarray(found)).reshape(-1).contiguous()


def rows(loader: Any) -> dict[int, bytes]:
    """Return the bytes of each sample of an epoch by its index."""
    return {
        int(i): row.numpy().tobytes()
        for indices, found in loader
        for i, row in zip(indices, found, strict=True)
    }


def two_epochs(case: str, workers: int, length: int = FEW) -> list[dict[int, bytes]]:
    dataset = Augmented(case, length)
    with DataLoader(dataset, 16, shuffle=True, num_workers=workers, seed=SEED) as loader:
        return [rows(loader) for _ in range(2)]


@EACH
def test_equal_for_any_number_of_workers(case: str) -> None:
    alone = two_epochs(case, 0)
    assert [len(epoch) for epoch in alone] == [FEW, FEW]
    for workers in (1, 2, 8):
        different = [
            sum(epoch[i] != wanted[i] for i in wanted)
            for epoch, wanted in zip(two_epochs(case, workers), alone, strict=True)
        ]
        assert different == [0, 0], f"{workers} workers"


@EACH
def test_all_samples_are_distinct(case: str) -> None:
    found = [row for epoch in two_epochs(case, 8, 1_024) for row in epoch.values()]
    assert (len(found), len(set(found))) == (2_048, 2_048)


# ---- pairs: 2,048 of them, read by eight workers ----


class Twice(Pairs):
    """Apply one transform to image and mask, with its random state reset in between."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = torch.from_numpy(sample_image(index, 16, 16))
        return self.pair(image, image.clone())

    @abstractmethod
    def pair(self, image: Any, mask: Any) -> tuple[Any, Any]:
        """Return image and mask, transformed alike."""


class Seeds(Twice):
    def pair(self, image: Any, mask: Any) -> tuple[Any, Any]:
        seed = int(torch.randint(2**31, ()))
        pair = []
        for part in (image, mask):
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            pair.append(self.transform(part))
        return pair[0], pair[1]


class Restores(Twice):
    def pair(self, image: Any, mask: Any) -> tuple[Any, Any]:
        python, numpy = random.getstate(), np.random.get_state()
        image = self.transform(image)
        random.setstate(python)
        np.random.set_state(numpy)
        return image, self.transform(mask)


def with_random_and_numpy(image: torch.Tensor) -> torch.Tensor:
    """Crop, flip and add noise, as transforms do that draw from Python's `random` and from NumPy."""
    top, left = random.randint(0, 8), int(np.random.randint(0, 9))
    image = image[top : top + 8, left : left + 8]
    if np.random.rand() < 0.5:
        image = image.flip(0)
    turned = torch.rot90(image, random.choice([0, 1, 2, 3]))
    return turned * random.uniform(0.5, 2) + float(np.random.randn())


def with_torchvision() -> Transform:
    """Return transforms that draw from Python's `random` and from torch."""
    t = library("torchvision.transforms")
    flips = [t.RandomHorizontalFlip(1.0), t.RandomVerticalFlip(1.0)]
    steps = [t.RandomChoice(flips), t.RandomOrder([*flips, t.RandomAffine(0, scale=(0.3, 2.0))])]
    made = t.Compose(steps)
    return lambda image: made(image[None])


STRESS: dict[str, Callable[[], Twice]] = {
    "seeds": lambda: Seeds(with_random_and_numpy),
    "restores": lambda: Restores(with_random_and_numpy),
    "torchvision": lambda: Seeds(with_torchvision()),
}


@pytest.mark.parametrize(
    ("case", "loader_seed"),
    [("seeds", None), ("restores", None), *((case, SEED) for case in STRESS)],
)
def test_pairs(case: str, loader_seed: int | None) -> None:
    python, numpy = random.getstate(), np.random.get_state()
    assert wrong_pairs(STRESS[case](), seed=loader_seed) == 0
    assert random.getstate() == python
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy, strict=True))


@pytest.mark.parametrize("case", STRESS)
def test_the_draws_of_pairs_differ(case: str) -> None:
    """`test_pairs` would say nothing about a transform that draws nothing."""

    class SameImage(Numbers):
        pairs = STRESS[case]()

        def __getitem__(self, index: int) -> Any:
            return self.pairs[0][0]

    found = {row.numpy().tobytes() for batch in batches(SameImage(256), seed=SEED) for row in batch}
    assert len(found) > 16
