"""Promise: what a plan makes for the loader alone is made in the memory of its batch; no other samples share that.

A row is offered only to a type that declares the protocol of `fastload.rows`, and only for the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from traceback import walk_tb
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, default_collate

from fastload import DataLoader, random_stream
from fastload.datasets import ImageFileList, ImageFolder, PackedDataset, PackedWriter
from fastload.datasets.image_files import ImageFiles
from fastload.errors import DecodeError
from fastload.harness.samples import Numbered
from fastload.image import IMAGENET_MEAN, IMAGENET_STD, RandomResizedCrop, Resize
from fastload.rows import RowOffer
from fastload.slots import Layout, Slot, SlotPool
from tests.image.photographs import photographs

SIZE = 128  # 48 KiB a sample: a row of a slot
COUNT, BATCH, BAD = 12, 4, 5
PLAN = RandomResizedCrop(SIZE, flip=0.5)
LAST = RandomResizedCrop(SIZE, flip=0.5, channels_last=True)


def pictures() -> Iterator[Any]:
    sources = list(photographs().values())
    for number in range(COUNT):
        yield sources[number % len(sources)][: 100 + 9 * number, 40 : 260 - 7 * number]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files") / "class"
    folder.mkdir()
    for number, pixels in enumerate(pictures()):
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
    names = [f"class/{number:02}.png\n" for number in range(COUNT)]
    (folder.parent / "list.txt").write_text("".join(names))
    return folder.parent / "list.txt"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "set"
    with PackedWriter(path, mode="raw") as writer:
        for number, pixels in enumerate(pictures()):
            height, width, _ = pixels.shape
            writer.add(pixels.tobytes(), label=number, source="", height=height, width=width)
    return path


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The addresses of all rows that plans were given."""
    given: set[int] = set()
    take = RowOffer.take

    def watched(self: RowOffer, shape: tuple[int, ...], dtype: Any) -> Any:
        row = take(self, shape, dtype)
        if row is not None:
            given.add(row.ctypes.data)
        return row

    monkeypatch.setattr(RowOffer, "take", watched)
    return given


def addresses(batches: list[Any]) -> set[int]:
    return {images[k].data_ptr() for images, *_ in batches for k in range(len(images))}


class SaysWhere(ImageFileList):
    """A subclass that overrides none of the functions that a row stands for."""

    def locate(self, index: int) -> str:
        return super().locate(index)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("plan", [PLAN, LAST, Resize((SIZE, SIZE))], ids=["crop", "last", "resize"])
@pytest.mark.parametrize("kind", ["files", "packed", "subset", "heir", "numbered"])
def test_a_batch_is_made_where_it_lies_and_equals_the_samples_alone(
    kind: str, plan: Any, workers: int, rows: set[int], files: Path, packed: Path
) -> None:
    dataset: Any = ImageFileList(files, transform=plan)
    if kind == "packed":
        dataset = PackedDataset(packed, transform=plan)
    elif kind == "subset":
        dataset = Subset(dataset, range(COUNT))
    elif kind == "heir":
        dataset = SaysWhere(files, transform=plan)
    elif kind == "numbered":
        dataset = Numbered(PackedDataset(packed, transform=plan))
    memory = torch.channels_last if plan is LAST else torch.contiguous_format
    options: dict[str, Any] = {"seed": 3, "num_workers": workers, "memory_format": memory}
    with DataLoader(dataset, BATCH, **options) as loader:
        batches = list(loader)
    assert rows  # all but those that were begun before the layout was known
    assert rows <= addresses(batches)
    rows.clear()
    for number, (images, labels, *_) in enumerate(batches):
        alone = []
        for index in range(number * BATCH, number * BATCH + BATCH):
            with random_stream(seed=3, epoch=0, position=index, index=index):
                alone.append(dataset[index])
        expected = default_collate(alone)
        assert torch.equal(images, expected[0])
        assert torch.equal(labels, expected[1])
    assert not rows  # outside of a loader there are none


class Keeps(Dataset[Any]):
    """Around a data set of ours: gives each sample out again, as a cache does."""

    fastload_per_worker = ()  # one cache for all workers

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if index not in self.kept:
            self.kept[index] = self.dataset[index]
        return self.kept[index]


class KeepingList(ImageFileList):
    """A subclass that does."""

    def __getitem__(self, index: int) -> Any:
        self.kept = super().__getitem__(index)
        return self.kept


class KeepingPlan(RandomResizedCrop):
    """A plan of the user's that does."""

    kept: list[torch.Tensor] = []  # noqa: RUF012  a dataclass, which is frozen

    def decode(self, encoded: Any, *, name: str) -> torch.Tensor:
        self.kept.append(super().decode(encoded, name=name))
        return self.kept[-1]


def transform_of_the_users(picture: Any) -> torch.Tensor:
    return PLAN(picture)


def target_of_the_users(label: int) -> torch.Tensor:
    return PLAN(next(pictures()))


class KeepingImages(ImageFileList):
    """A subclass of a subclass, which keeps in the other method."""

    def load_image(self, index: int) -> Any:
        self.kept = super().load_image(index)
        return self.kept


class Heir(KeepingImages):
    pass


class OwnSubset(Subset[Any]):
    pass


@pytest.mark.parametrize(
    "kind",
    ["around", "subclass", "heir", "own subset", "instance", "class", "plan", "callable", "target"],
)
def test_samples_that_others_may_see_get_no_row(
    kind: str, rows: set[int], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = KeepingPlan(SIZE) if kind == "plan" else PLAN
    dataset: Any = ImageFileList(files, transform=plan)
    if kind == "around":
        dataset = Keeps(dataset)
    elif kind == "subclass":
        dataset = KeepingList(files, transform=plan)
    elif kind == "heir":
        dataset = Heir(files, transform=plan)
    elif kind == "own subset":
        dataset = OwnSubset(dataset, range(COUNT))
    elif kind == "instance":
        dataset.load_image = lru_cache(None)(dataset.load_image)
    elif kind == "class":
        monkeypatch.setattr(ImageFiles, "load_image", lru_cache(None)(ImageFiles.load_image))
    elif kind == "callable":
        dataset = ImageFileList(files, transform=transform_of_the_users)
    elif kind == "target":
        plan = Resize((SIZE, SIZE), mean=IMAGENET_MEAN, std=IMAGENET_STD)  # float32: takes no row
        dataset = ImageFileList(files, transform=plan, target_transform=target_of_the_users)
    with DataLoader(dataset, BATCH, num_workers=2) as loader:
        for images, _ in loader:
            images.zero_()  # as a loop may
    assert not rows
    if kind == "around":
        assert len(dataset.kept) == COUNT
        assert all(sample.any() for sample, _ in dataset.kept.values())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_is_for_its_sample_alone(workers: int, rows: set[int], files: Path) -> None:
    """Not for what `on_error` makes after the sample failed, nor for the loop's own pictures between batches."""
    broken = files.parent / "broken.txt"
    lines = files.read_text().splitlines()
    lines[BAD] = "class/bad.png"
    (files.parent / "class/bad.png").write_bytes((files.parent / lines[0]).read_bytes()[:3000])
    broken.write_text("\n".join(lines))
    pixels = next(pictures())
    made: list[torch.Tensor] = []

    def replaced(index: int, error: Exception) -> Any:
        assert isinstance(error, DecodeError)
        made.append(PLAN(pixels))
        return made[-1], 0

    dataset = ImageFileList(broken, transform=PLAN)
    with DataLoader(dataset, BATCH, num_workers=workers, on_error=replaced) as loader:
        batches = []
        for images, labels in loader:
            before = images.clone()
            own = PLAN(pixels)
            own.zero_()
            assert torch.equal(images, before)
            batches.append((images, labels))
    (replacement,) = made
    assert replacement.data_ptr() not in addresses(batches) | rows
    assert torch.equal(batches[BAD // BATCH][0][BAD % BATCH], replacement)


class Around(Dataset[Any]):
    """A dataset around one of ours, as users write them: it caches, and delegates every other attribute."""

    fastload_per_worker = ()  # one cache for all workers

    def __init__(self, dataset: Any, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.dataset = dataset
        self.view = view
        self.kept: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if index not in self.kept:
            self.kept[index] = self.dataset[index]
        picture, label = self.kept[index]
        return self.view(picture), label


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda picture: picture,
    "flip": lambda picture: picture.flip(2),
    "transpose": lambda picture: picture.transpose(1, 2),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("inside", ["loader", "subset"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_wrapper_that_caches_and_delegates_is_read_as_by_torch(
    view: str, inside: str, workers: int, files: Path
) -> None:
    plan = Resize((SIZE, SIZE))
    expected = [VIEWS[view](picture) for picture, _ in ImageFileList(files, transform=plan)]
    dataset: Any = Around(ImageFileList(files, transform=plan), VIEWS[view])
    if inside == "subset":
        dataset = Subset(dataset, range(COUNT))
    with DataLoader(dataset, BATCH, num_workers=workers) as loader:
        for _ in range(2):
            images = [batch.clone() for batch, _ in scribbled(loader)]
            assert torch.equal(torch.cat(images), torch.stack(expected))


def scribbled(loader: Any) -> Iterator[Any]:
    """The batches of `loader`, each overwritten after its use, as a loop may do."""
    for images, labels in loader:
        yield images, labels
        images.fill_(77)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_patched_instance_is_read_as_by_torch(workers: int, files: Path) -> None:
    plan = Resize((SIZE, SIZE))
    expected = torch.stack([picture for picture, _ in ImageFileList(files, transform=plan)])
    dataset: Any = ImageFileList(files, transform=plan)
    dataset.load_image = lru_cache(None)(dataset.load_image)
    with DataLoader(dataset, BATCH, num_workers=workers) as loader:
        for _ in range(2):
            images = [batch.clone() for batch, _ in scribbled(loader)]
            assert torch.equal(torch.cat(images), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_of_the_target_is_not_given_to_the_picture(workers: int, tmp_path: Path) -> None:
    """Small pictures have no rows; in the next batch they are as large as the target, which has one."""
    sides = [(64, 64)] * BATCH + [(64, 192)] * 2 * BATCH  # 12 KiB, 36 KiB
    lines = []
    for number, (height, width) in enumerate(sides):
        pixels = np.full((height, width, 3), number, np.uint8)
        path = tmp_path / f"class/{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
        lines.append(f"class/{path.name}")
    (tmp_path / "list.txt").write_text("\n".join(lines))

    def mask(label: int) -> torch.Tensor:
        return torch.full((3, 64, 192), 200, dtype=torch.uint8)

    dataset = ImageFileList(tmp_path / "list.txt", transform=Resize(64), target_transform=mask)
    with DataLoader(dataset, BATCH, num_workers=workers) as loader:
        for number, (images, masks) in enumerate(loader):
            first = number * BATCH
            assert images.flatten(1).unique(dim=1).flatten().tolist() == [
                *range(first, first + BATCH)
            ]
            assert masks.unique().tolist() == [200]


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_another_view_of_a_row_is_written_into_it(memory: torch.memory_format) -> None:
    """A square row, transposed, has its address and shape."""
    picture = torch.arange(3 * SIZE * SIZE).to(torch.uint8).view(3, SIZE, SIZE)
    layout = Layout((picture, 0))
    slot = Slot(layout, 2, SlotPool(channels_last=memory is torch.channels_last))
    slot.arrays[0][1] = picture.numpy()
    layout.write(slot, 1, (slot.rows[0][1].transpose(1, 2), 0))
    assert torch.equal(slot.rows[0][1], picture.transpose(1, 2))


class Turned(ImageFileList):
    """A class of the user's that declares the protocol, and returns another view of the row."""

    def _load_offered(self, index: int, offer: RowOffer | None) -> Any:
        picture, label = super()._load_offered(index, offer)
        return picture.transpose(1, 2), label

    fastload_fills_row = (_load_offered, ImageFiles.load_image, ImageFiles.__getitem__)


def test_a_dataset_may_return_another_view_of_the_row(rows: set[int], files: Path) -> None:
    dataset = Turned(files, transform=Resize((SIZE, SIZE)))
    with DataLoader(dataset, BATCH) as loader:
        images = torch.cat([images for images, _ in loader])
    assert rows
    assert torch.equal(images, torch.stack([picture for picture, _ in dataset]))


def test_a_picture_gets_its_own_row_beside_that_of_a_target(rows: set[int], files: Path) -> None:
    def mask(label: int) -> torch.Tensor:
        return torch.full((3, SIZE, SIZE), 200, dtype=torch.uint8)

    dataset = ImageFileList(files, transform=Resize((SIZE, SIZE)), target_transform=mask)
    with DataLoader(dataset, BATCH) as loader:
        batches = list(loader)
    assert rows
    assert rows <= addresses(batches)
    for number, (images, masks) in enumerate(batches):
        alone = [dataset[number * BATCH + k][0] for k in range(BATCH)]
        assert torch.equal(images, torch.stack(alone))
        assert masks.unique().tolist() == [200]


def test_an_error_that_is_kept_holds_no_row(tmp_path: Path) -> None:
    for number, pixels in enumerate(pictures()):
        path = tmp_path / f"class/{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
    path.write_bytes(path.read_bytes()[:3000])
    kept: list[Exception] = []

    def replaced(index: int, error: Exception) -> Any:
        kept.append(error)
        return torch.zeros(3, SIZE, SIZE, dtype=torch.uint8), 0

    dataset = ImageFolder(tmp_path, transform=PLAN)
    with DataLoader(dataset, BATCH, on_error=replaced) as loader:
        list(loader)
    (error,) = kept
    held = [v for frame, _ in walk_tb(error.__traceback__) for v in frame.f_locals.values()]
    offers = [value for value in held if isinstance(value, RowOffer)]
    assert offers
    assert all(offer.row is None for offer in offers)
