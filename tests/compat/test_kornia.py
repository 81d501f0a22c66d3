"""Promise: With kornia, 8 workers give 2,048 aligned pairs of image and mask. This holds for sequences with several
keys and for the parameters of one call passed to the next.

A transform keeps its parameters in itself, and image and mask share them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.compat.eight_workers import Pairs, batches, library, sample_image, wrong_pairs

augmentation = library("kornia.augmentation")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

Transform = Callable[..., Any]


def image_and_mask(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    image = torch.from_numpy(sample_image(index, 1, 1, 9, 9))
    return image, image.clone()


def rotation() -> Any:
    """Return a turn of image and mask. Nearest pixels for both, so that equals stay equal."""
    return augmentation.AugmentationSequential(
        augmentation.RandomRotation(90.0, p=0.4, resample="nearest"), data_keys=["input", "mask"]
    )


class Together(Pairs):
    """Image and mask go through one call."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, mask = self.transform(*image_and_mask(index))
        return image[0], mask[0]


def test_a_sequence_with_two_keys() -> None:
    assert wrong_pairs(Together(rotation())) == 0


class OneAfterTheOther(Together):
    """The mask gets the parameters that the image drew."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, mask = image_and_mask(index)
        image = self.transform(image)
        mask = self.transform(mask, params=self.transform._params)
        return image[0], mask[0]


def test_the_parameters_of_a_call_given_to_the_next() -> None:
    flip = augmentation.RandomHorizontalFlip(p=0.5)
    assert wrong_pairs(OneAfterTheOther(flip)) == 0


def test_a_sequence_in_collate_fn() -> None:
    """kornia's own advice is to augment whole batches; the sequence is the collate function's."""
    augment = rotation()

    def collated(items: list[Any]) -> Any:
        images, masks = zip(*items, strict=True)
        return augment(torch.cat(images), torch.cat(masks))

    class Plain(Pairs):
        def __getitem__(self, index: int) -> Any:
            return image_and_mask(index)

    assert wrong_pairs(Plain(), collate_fn=collated, batch_size=4) == 0


def test_the_draws_differ() -> None:
    """The other tests would say nothing about a transform that draws nothing."""
    flipped = OneAfterTheOther(augmentation.RandomHorizontalFlip(p=0.5))
    images = torch.cat([image for image, _ in batches(flipped)])
    assert len({int(image.argmin()) for image in images}) == 2
