"""Promise: what a plan makes for the loader alone is made in the memory of its batch; no other samples share that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, default_collate

from fastload import DataLoader, collate, random_stream
from fastload.datasets import ImageFileList, PackedDataset, PackedWriter
from fastload.errors import DecodeError
from fastload.image import RandomResizedCrop, Resize, plans
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

    def watched(shape: tuple[int, ...], dtype: Any) -> Any:
        row = collate.offered_row(shape, dtype)
        if row is not None:
            given.add(row.ctypes.data)
        return row

    monkeypatch.setattr(plans, "offered_row", watched)
    return given


def addresses(batches: list[Any]) -> set[int]:
    return {images[k].data_ptr() for images, _ in batches for k in range(len(images))}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("plan", [PLAN, LAST, Resize((SIZE, SIZE))], ids=["crop", "last", "resize"])
@pytest.mark.parametrize("kind", ["files", "packed", "subset"])
def test_a_batch_is_made_where_it_lies_and_equals_the_samples_alone(
    kind: str, plan: Any, workers: int, rows: set[int], files: Path, packed: Path
) -> None:
    dataset: Any = ImageFileList(files, transform=plan)
    if kind == "packed":
        dataset = PackedDataset(packed, transform=plan)
    elif kind == "subset":
        dataset = Subset(dataset, range(COUNT))
    memory = torch.channels_last if plan is LAST else torch.contiguous_format
    options: dict[str, Any] = {"seed": 3, "num_workers": workers, "memory_format": memory}
    with DataLoader(dataset, BATCH, **options) as loader:
        batches = list(loader)
    assert rows  # all but those that were begun before the layout was known
    assert rows <= addresses(batches)
    rows.clear()
    for number, (images, labels) in enumerate(batches):
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


@pytest.mark.parametrize("kind", ["around", "subclass", "plan", "callable"])
def test_samples_that_others_may_see_get_no_row(kind: str, rows: set[int], files: Path) -> None:
    plan = KeepingPlan(SIZE) if kind == "plan" else PLAN
    dataset: Any = ImageFileList(files, transform=plan)
    if kind == "around":
        dataset = Keeps(dataset)
    elif kind == "subclass":
        dataset = KeepingList(files, transform=plan)
    elif kind == "callable":
        dataset = ImageFileList(files, transform=transform_of_the_users)
    with DataLoader(dataset, BATCH, num_workers=2) as loader:
        for images, _ in loader:
            images.zero_()  # as a loop may
    assert not rows
    if kind == "around":
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
