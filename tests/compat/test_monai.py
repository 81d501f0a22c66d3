"""Promise: With MONAI, 8 workers give 2,048 aligned pairs of image and label: crops, crops around labels, flips,
rotations and affine deformations.

Each transform keeps the draw of its sample in itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.compat.eight_workers import PAIRS, Pairs, batches, library, sample_image, wrong_pairs

transforms = library("monai.transforms")
data = library("monai.data")

# MONAI's own affairs: Python's and NumPy's deprecations.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

KEYS = ["image", "label"]
Transform = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _plain_tensors() -> Iterator[None]:
    """Let MONAI hand on tensors without their history, which doubles its speed."""
    tracked = data.get_track_meta()
    data.set_track_meta(False)
    yield
    data.set_track_meta(tracked)


def compose(*steps: Any) -> Any:
    """Return `steps` between what MONAI's pipelines begin and end with."""
    first = transforms.EnsureChannelFirstd(KEYS, channel_dim="no_channel")
    last = transforms.EnsureTyped(KEYS, track_meta=False)
    return transforms.Compose([first, *steps, last])


def crop() -> Any:
    """Return the commonest pipeline: one random place, cut out of image and label."""
    return compose(transforms.RandSpatialCropd(KEYS, (8, 8)), transforms.RandFlipd(KEYS, prob=0.5))


def scan(index: int, *shape: int) -> dict[str, Any]:
    """Return an image and an equal label: equal draws keep them equal."""
    return {"image": sample_image(index, *shape), "label": sample_image(index, *shape)}


class Scans(Pairs):
    """Image and label of a random place, turned or bent in a random way."""

    def __init__(self, transform: Transform, *shape: int) -> None:
        self.transform = transform
        self.shape = shape

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        item = self.transform(scan(index, *self.shape))
        return item["image"], item["label"]


ZEROS = {"mode": "nearest", "padding_mode": "zeros"}
PIPELINES: dict[str, tuple[tuple[int, ...], Callable[[], Any]]] = {
    "crop": ((24, 24), crop),
    "rotate": ((8, 8), lambda: compose(transforms.RandRotated(KEYS, range_x=3, prob=0.5, **ZEROS))),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_image_and_label_get_one_draw(name: str) -> None:
    shape, pipeline = PIPELINES[name]
    assert wrong_pairs(Scans(pipeline(), *shape)) == 0


def test_the_history_of_a_transform_is_tracked() -> None:
    data.set_track_meta(True)
    step = transforms.RandAffined(KEYS, prob=0.3, rotate_range=1, **ZEROS)
    assert wrong_pairs(Scans(compose(step), 16, 16)) == 0


class Lesions(Scans):
    """Two crops of each scan, around a place in the label and around one beside it."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        item = scan(index, *self.shape)
        for part in item.values():
            part[:, ::2] = 0  # background
        crops = self.transform(item)
        return torch.stack([c["image"] for c in crops]), torch.stack([c["label"] for c in crops])


def test_crops_around_positive_and_negative_places() -> None:
    around = transforms.RandCropByPosNegLabeld(KEYS, "label", (6, 6), pos=1, neg=1, num_samples=2)
    assert wrong_pairs(Lesions(compose(around), 20, 20)) == 0


def test_the_draws_differ() -> None:
    """The other tests would say nothing about a transform that draws nothing."""
    images = torch.cat([image for image, _ in batches(Scans(crop(), 24, 24))])
    corners = {float(image.min()) - i * 576 % 65_536 for i, image in enumerate(images)}
    assert len(corners) > 100  # of 17 x 17


def as_pair(items: list[Any]) -> tuple[Any, Any]:
    both = data.list_data_collate(items)
    return both["image"], both["label"]


def test_a_transform_in_collate_fn() -> None:
    augment = crop()

    def augmented(items: list[Any]) -> tuple[Any, Any]:
        return as_pair([augment(item) for item in items])

    scans = data.Dataset([scan(i, 24, 24) for i in range(PAIRS)])
    assert wrong_pairs(scans, collate_fn=augmented, batch_size=4) == 0
