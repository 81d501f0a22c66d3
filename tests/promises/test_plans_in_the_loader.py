"""Promises:
- A dataset of image files with a plan gives equal batches for 0, 1, 2 and 8 workers, and torchvision's crops under
  the same seed.
- A bad image file is an error in its place, or is skipped.
- The stages of a plan are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

pytest.importorskip("torchvision")
pytest.importorskip("PIL")
import torchvision
from PIL import Image
from torchvision.transforms import v2

import fastload
from fastload.datasets import ImageFileList, ImageFolder
from fastload.errors import DecodeError, TooManyErrorsError
from fastload.image import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    RandomResizedCrop,
    ResizeCenterCrop,
    normalize_on,
)
from tests.image.photographs import photographs
from tests.promises.equal import check_same

CLASSES = ("cat", "dog", "eel")
PLAN = RandomResizedCrop(224, flip=0.5)
BAD = 5


def save(folder: Path, kind: str) -> Path:
    """Twelve pieces of photographs of different sizes, in three classes; returns the list of them."""
    sources, lines = list(photographs().values()), []
    for number in range(12):
        pixels = sources[number % len(sources)][: 150 + 9 * number, 40 : 300 - 7 * number]
        path = folder / "train" / CLASSES[number % 3] / f"{number:02}.{kind.lower()}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, kind)
        lines.append(str(path.relative_to(folder)))
    (folder / "list.txt").write_text("\n".join(lines))
    return folder / "list.txt"


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("jpegs"), "JPEG")


@pytest.fixture(scope="module")
def pngs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("pngs"), "PNG")


@pytest.fixture
def with_a_bad_one(tmp_path: Path) -> Path:
    file_list = save(tmp_path, "PNG")
    path = tmp_path / file_list.read_text().splitlines()[BAD]
    path.write_bytes(path.read_bytes()[:5000])
    return file_list


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def load(dataset: Any, workers: int, **arguments: Any) -> Batches:
    arguments = {"batch_size": 5, "shuffle": True, "seed": 7} | arguments
    with fastload.DataLoader(dataset, num_workers=workers, **arguments) as loader:
        return [(images.clone(), labels.clone()) for _ in range(2) for images, labels in loader]


@pytest.mark.parametrize(
    "read", [ImageFileList, lambda p, **k: ImageFolder(p.parent / "train", **k)]
)
def test_a_sample_is_the_pixels_and_the_class(read: Callable[..., Any], jpegs: Path) -> None:
    dataset = read(jpegs, transform=PLAN)
    assert dataset.classes == list(CLASSES)
    for index in range(len(dataset)):
        image, label = dataset[index]
        assert (image.dtype, image.shape) == (torch.uint8, (3, 224, 224))
        assert image.is_contiguous()
        assert type(label) is int
        assert f"/{CLASSES[label]}/" in dataset.locate(index)


@pytest.mark.parametrize(
    "plan",
    [PLAN, RandomResizedCrop((40, 64), mean=IMAGENET_MEAN, std=IMAGENET_STD, channels_last=True)],
    ids=["uint8", "float32"],
)
def test_the_same_seed_gives_equal_batches_for_any_number_of_workers(
    plan: RandomResizedCrop, jpegs: Path
) -> None:
    dataset = ImageFileList(jpegs, transform=plan)
    serial = load(dataset, 0)
    for workers in (1, 2, 8):
        check_same(load(dataset, workers), serial)
    epochs = [
        torch.cat([images.float() for images, _ in serial[half]]).sum((1, 2, 3)).sort().values
        for half in (slice(0, 3), slice(3, 6))
    ]
    assert not torch.equal(*epochs)  # the second epoch draws otherwise
    assert not torch.equal(load(dataset, 2, seed=8)[0][0], serial[0][0])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("theirs", [torchvision.transforms, v2], ids=["v1", "v2"])
def test_crops_and_flips_are_those_of_torchvisions_transforms_under_the_same_seed(
    theirs: Any, workers: int, pngs: Path
) -> None:
    transform = theirs.Compose(
        [
            theirs.RandomResizedCrop(224),
            theirs.RandomHorizontalFlip(),
            torchvision.transforms.PILToTensor(),
        ]
    )
    expected = load(ImageFileList(pngs, transform=transform), workers)
    ours = load(ImageFileList(pngs, transform=PLAN), workers)
    for (images, labels), (other_images, other_labels) in zip(ours, expected, strict=True):
        assert torch.equal(labels, other_labels)
        difference = (images.int() - other_images.int()).abs()
        assert difference.max() <= 3
        assert difference.float().mean() < 0.5


def test_torchs_own_loader_takes_a_plan_too(jpegs: Path) -> None:
    """In worker processes: the dataset is pickled or forked with its plan, draws are torch's."""
    dataset = ImageFileList(jpegs, transform=PLAN)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        loader = TorchDataLoader(dataset, 5, num_workers=1)
        results.append([(images.clone(), labels.clone()) for images, labels in loader])
    check_same(*results)
    assert results[0][0][0].shape == (5, 3, 224, 224)


@pytest.mark.parametrize("workers", [0, 1, 8])
def test_a_bad_file_is_an_error_in_its_place_with_path_and_index(
    workers: int, with_a_bad_one: Path
) -> None:
    dataset = ImageFileList(with_a_bad_one, transform=PLAN)
    with fastload.DataLoader(dataset, 2, num_workers=workers, seed=7) as loader:
        batches = iter(loader)
        labels = [next(batches)[1].tolist() for _ in range(BAD // 2)]
        with pytest.raises(DecodeError, match="cannot be decoded: ") as caught:
            next(batches)
        labels += [rest[1].tolist() for rest in batches]
    assert labels == [[0, 1], [2, 0], [0, 1], [2, 0], [1, 2]]
    assert caught.value.path == dataset.locate(BAD)
    notes = "\n".join(caught.value.__notes__)
    assert dataset.locate(BAD) in notes + str(caught.value)
    assert f"index {BAD}" in notes


def test_a_missing_file_is_an_error_with_path_and_index(with_a_bad_one: Path) -> None:
    dataset = ImageFileList(with_a_bad_one, transform=PLAN)
    Path(dataset.locate(BAD)).unlink()
    with (
        fastload.DataLoader(dataset, 12, num_workers=2) as loader,
        pytest.raises(FileNotFoundError) as caught,
    ):
        next(iter(loader))
    assert caught.value.filename == dataset.locate(BAD)
    assert f"index {BAD}" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("workers", [0, 1, 8])
def test_a_bad_file_can_be_skipped_and_changes_no_other_sample(
    workers: int, with_a_bad_one: Path, pngs: Path
) -> None:
    arguments: dict[str, Any] = {"batch_size": 12, "seed": 7, "shuffle": False}
    whole = load(ImageFileList(pngs, transform=PLAN), 0, **arguments)
    dataset = ImageFileList(with_a_bad_one, transform=PLAN)
    skipped = load(dataset, workers, on_error="skip", **arguments)
    others = [index for index in range(12) if index != BAD]
    check_same(skipped, [(images[others], labels[others]) for images, labels in whole])
    with pytest.raises(TooManyErrorsError):
        load(dataset, workers, on_error="skip", max_errors=0, **arguments)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("plan", [PLAN, ResizeCenterCrop()])
def test_stats_show_the_stages(plan: Any, workers: int, jpegs: Path) -> None:
    with fastload.DataLoader(
        ImageFileList(jpegs, transform=plan), 6, num_workers=workers
    ) as loader:
        for _ in loader:
            pass
        stages = loader.stats().stages
    for name in ("read", "decode", "transform"):
        assert stages[name].count == 12, name
        assert stages[name].seconds > 0


def test_a_batch_is_normalized_as_by_torchvision(jpegs: Path) -> None:
    plan = RandomResizedCrop(64)
    (images, _), *_ = load(ImageFileList(jpegs, transform=plan), 2)
    recipe = RandomResizedCrop(64, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    (expected, _), *_ = load(ImageFileList(jpegs, transform=recipe), 2)
    assert (normalize_on("cpu")(images) - expected).abs().max() <= 1e-6
    by_torchvision = torchvision.transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)(images / 255)
    assert np.abs((expected - by_torchvision).numpy()).max() <= 1e-6
