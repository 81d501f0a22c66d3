"""Promises:
- A dataset of images fills rows with the pixels of its samples, by torch's kernels and by the compiled ones.
- Kernels write only into rows that fit the plan, and read no pixel that was not decoded.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

pytest.importorskip("PIL")
pytest.importorskip("pyarrow")
from PIL import Image

import fastload.image.kernels
import fastload.reading.failures
import fastload.reading.filling
import fastload.reading.rows
from fastload import DataLoader
from fastload.check.equality import same
from fastload.datasets import ImageFileList, ImageFolder, PackedDataset, PackedWriter
from fastload.errors import DecodeError, PackedDataError
from fastload.image import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    RandomResizedCrop,
    Resize,
    ResizeCenterCrop,
    kernels,
    plans,
    render,
)
from fastload.measure.samples import Numbered
from tests.contracts.filled_rows import (
    BATCH,
    FilledRows,
    Fills,
    Keeps,
    Source,
    alone,
    check_outcomes,
    outcomes,
)
from tests.image.photographs import encoded, photographs
from tests.promises.equal import check_same

COUNT, BAD = 12, 6
CROP = RandomResizedCrop(48, flip=0.5)
PLANS: dict[str, Any] = {
    "crop": CROP,
    "crop, float32": RandomResizedCrop((40, 56), flip=0.5, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    "crop, last": RandomResizedCrop(48, flip=0.5, channels_last=True),
    "crop, full scale": RandomResizedCrop(48, flip=0.5, scaled_decode=False),
    "crop, whole decode": RandomResizedCrop(48, flip=0.5, region_decode=False),
    "crop, upright": RandomResizedCrop(48, flip=0.5, upright=True),
    "resize": Resize((40, 56)),
    "resize, float32": Resize((56, 40), mean=IMAGENET_MEAN, std=IMAGENET_STD),
    "center crop": ResizeCenterCrop(64, 48),
    "center crop, float32, last": ResizeCenterCrop(
        64, 48, mean=IMAGENET_MEAN, std=IMAGENET_STD, channels_last=True
    ),
    "padded": ResizeCenterCrop(40, (72, 50)),
}


def pixels_of_images() -> Iterator[Any]:
    sources = list(photographs().values())
    for number in range(COUNT):
        yield sources[number % len(sources)][: 60 + 9 * number, 40 : 190 - 7 * number]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images in files of their own and packed, in three shards."""
    folder = tmp_path_factory.mktemp("images")
    for kind in ("jpeg", "png"):
        (folder / kind / "class").mkdir(parents=True)
    with (
        PackedWriter(folder / "packed raw", mode="raw", shard_bytes=200_000) as raw,
        PackedWriter(folder / "packed jpeg", mode="jpeg", shard_bytes=20_000) as packed,
    ):
        for number, pixels in enumerate(pixels_of_images()):
            height, width, _ = pixels.shape
            sides, jpeg = {"height": height, "width": width}, encoded(pixels, quality=90)
            raw.add(pixels.tobytes(), label=number, source=str(number), **sides)
            packed.add(jpeg, label=number, source=str(number))
            (folder / f"jpeg/class/{number:02}.jpeg").write_bytes(jpeg)
            Image.fromarray(pixels).save(folder / f"png/class/{number:02}.png", compress_level=1)
    for kind in ("jpeg", "png"):
        names = [f"class/{number:02}.{kind}\n" for number in range(COUNT)]
        (folder / kind / "list.txt").write_text("".join(names))
    return folder


def of_kind(kind: str, stored: Path, **options: Any) -> Any:
    if kind.startswith("packed"):
        return PackedDataset(stored / kind, **options)
    return ImageFileList(stored / kind.split()[0] / "list.txt", **options)


@pytest.fixture(params=["torch", "compiled"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """By torch's kernels, and by ours if they can be had here. A test may name one of them."""
    if request.param == "torch":
        monkeypatch.setattr(fastload.image.kernels, "kernels", lambda: None)
    elif fastload.image.kernels.kernels() is None:
        pytest.skip(fastload.image.kernels.state())
    return request.param


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> Fills:
    return Fills(monkeypatch)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [*zip(cycle(("jpeg list", "packed raw")), [*PLANS][1:])],
)
def test_runs_of_images_equal_the_images_alone(
    kind: str, plan: str, engine: str, stored: Path, fills: list[Any], cut: Callable[[int], None]
) -> None:
    dataset = of_kind(kind, stored, transform=PLANS[plan])
    expected = alone(dataset, range(COUNT))
    memories = (torch.contiguous_format, torch.channels_last)
    for workers, units, memory in ((0, 100, memories[0]), (2, 2, memories[1])):
        cut(units)
        fills.clear()
        options: dict[str, Any] = {"num_workers": workers, "memory_format": memory, "seed": 3}
        with DataLoader(of_kind(kind, stored, transform=PLANS[plan]), BATCH, **options) as loader:
            batches = list(loader)
        wanted = [[images.contiguous(memory_format=memory), labels] for images, labels in expected]
        check_same(batches, wanted)
        assert sorted(index for run in fills for index in run) == list(range(COUNT))


@pytest.mark.parametrize("engine", ["torch", "compiled"], indirect=True)
class TestImages(FilledRows):
    @pytest.fixture
    def source(self, engine: str, stored: Path) -> Source:
        kind = {"torch": "packed raw", "compiled": "packed jpeg"}[engine]
        return lambda: of_kind(kind, stored, transform=CROP)


class TestFolder(FilledRows):
    @pytest.fixture
    def source(self, stored: Path) -> Source:
        return lambda: ImageFolder(stored / "png", transform=PLANS["resize, float32"])


class TestNumberedImages(FilledRows):
    @pytest.fixture
    def source(self, stored: Path) -> Source:
        return lambda: Numbered(of_kind("jpeg list", stored, transform=CROP))


def flip(packed: Path, payload: bytes) -> None:
    """Flip a bit of a payload, in the file that may be mapped into memory."""
    for shard in packed.iterdir():
        at = shard.read_bytes().find(payload)
        if at >= 0:
            middle = len(payload) // 2
            with shard.open("r+b") as file:
                file.seek(at + middle)
                file.write(bytes([payload[middle] ^ 0x10]))
            return
    pytest.fail("the payload lies in no shard")


def damage(kind: str, stored: Path, folder: Path) -> Any:
    """A copy of a set in which sample `BAD` is cut off or flipped; returns how to open it."""
    shutil.copytree(stored, folder, dirs_exist_ok=True)
    if kind.startswith("packed"):
        whole = PackedDataset(folder / kind)
        payload = whole.read(BAD)
        whole.close()
        flip(folder / kind, payload)
    else:
        path = next((folder / kind.split()[0] / "class").glob(f"{BAD:02}.*"))
        path.write_bytes(path.read_bytes()[:1500])
    return lambda **options: of_kind(kind, folder, transform=CROP, **options)


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("torch", "png list"),
        ("torch", "packed raw"),
        ("compiled", "jpeg list"),
        ("compiled", "packed jpeg"),
    ],
    indirect=["engine"],
)
def test_a_damaged_image_in_the_middle_of_a_run(
    kind: str, engine: str, stored: Path, tmp_path: Path, fills: list[Any]
) -> None:
    """Its error, notes and all, is that of the sample alone; its neighbours in the run lose nothing."""
    opened = damage(kind, stored, tmp_path)

    black = torch.zeros(3, 48, 48, dtype=torch.uint8)
    ways: list[tuple[int, dict[str, Any]]] = [(2, {}), (0, {"on_error": "skip"})]
    for workers, how in [*ways, (2, {"on_error": lambda index, error: (black, -1)})]:
        options: dict[str, Any] = {"num_workers": workers, "seed": 3} | how
        fills.clear()
        found = outcomes(DataLoader(opened(), BATCH, **options))
        assert BAD - 1 in [index for run in fills for index in run]
        expected = outcomes(DataLoader(Keeps(opened()), BATCH, **options))
        assert len(found) == 3
        check_outcomes(found, expected)
        raised = PackedDataError if kind.startswith("packed") else DecodeError
        assert {one[0] for one in found if isinstance(one, tuple)} <= {raised.__name__}
        assert how or any(isinstance(one, tuple) for one in found)


@pytest.mark.parametrize("kind", ["packed raw", "packed jpeg"])
def test_checksums_are_compared_in_runs_as_in_samples(
    kind: str, engine: str, stored: Path, tmp_path: Path
) -> None:
    dataset = damage(kind, stored, tmp_path)()
    with DataLoader(dataset, COUNT, seed=3, on_error="skip") as loader:
        for _ in range(3):  # a damaged record is found again in each epoch
            ((_, labels),) = list(loader)
            assert labels.tolist() == [k for k in range(COUNT) if k != BAD]
    dataset.close()
    # What comes to be damaged after the first epoch is not looked at.
    path = shutil.copytree(stored / kind, tmp_path / "whole")
    whole = PackedDataset(path)
    payload = whole.read(BAD)
    whole.close()
    dataset = PackedDataset(path, transform=CROP)
    with DataLoader(dataset, COUNT, seed=3, on_error="skip") as loader:
        assert [len(labels) for _, labels in loader] == [COUNT]
        flip(path, payload)
        assert [len(labels) for _, labels in loader] == [COUNT]
    dataset.close()


@pytest.mark.parametrize(
    ("engine", "kind"), [("torch", "jpeg list"), ("compiled", "packed raw")], indirect=["engine"]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_that_is_replaced_between_epochs(
    workers: int, kind: str, engine: str, stored: Path
) -> None:
    """By another plan of the same size, another size, another dtype, a function, and back."""

    transforms = [
        CROP,
        Resize((48, 48)),
        Resize((32, 32)),
        RandomResizedCrop(48, mean=IMAGENET_MEAN, std=IMAGENET_STD),
        transform_of_the_users,
        RandomResizedCrop(48, flip=1.0),
        CROP,
    ]
    dataset = of_kind(kind, stored, transform=CROP)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    options["copy_dataset"] = "state"  # else workers see another transform within an epoch
    twin = of_kind(kind, stored, transform=CROP)
    with DataLoader(dataset, BATCH, seed=3, **options) as loader:
        for epoch, transform in enumerate(transforms):
            dataset.transform = twin.transform = transform
            batches = list(loader)
            if same(batches, alone(twin, range(COUNT), epoch=epoch)):
                continue
            assert workers  # whose copies of the transform are those of the beginning
            first = of_kind(kind, stored, transform=CROP)
            assert same(batches, alone(first, range(COUNT), epoch=epoch))


# ---- samples that others may see ----


def transform_of_the_users(image: Any) -> torch.Tensor:
    return Resize((48, 48))(image)


class OwnPlan(RandomResizedCrop):
    decode = RandomResizedCrop.decode


READ_ALONE: dict[str, Callable[[Path], Any]] = {
    "plan": lambda path: ImageFileList(path, transform=OwnPlan(48)),
    "function": lambda path: ImageFileList(path, transform=transform_of_the_users),
    "target": lambda path: ImageFileList(path, transform=CROP, target_transform=lambda k: -k),
    "varying": lambda path: Subset(ImageFileList(path, transform=Resize(48)), [0]),
}


@pytest.mark.parametrize("name", READ_ALONE)
def test_images_whose_reading_is_overridden_are_read_alone(
    name: str, stored: Path, fills: list[Any]
) -> None:
    dataset = READ_ALONE[name](stored / "jpeg" / "list.txt")
    with DataLoader(dataset, BATCH, num_workers=2, seed=3) as loader:
        batches = list(loader)
    check_same(batches, alone(dataset, range(len(dataset))))
    assert not fills


PLAN = RandomResizedCrop(8, scale=(0.08, 0.2))
KEYS = np.arange(3, dtype=np.uint64)


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        (Resize((9, 8)), torch.zeros(3, 3, 8, 8, dtype=torch.uint8)),
        (Resize((8, 8)), torch.zeros(3, 3, 8, 8)),
        (Resize((8, 8)), torch.zeros(2, 3, 8, 8, dtype=torch.uint8)),
        (Resize((8, 8)), torch.zeros(3, 3, 8, 8, dtype=torch.uint8, device="meta")),
    ],
    ids=["larger", "floats", "fewer", "another device"],
)
def test_a_plan_writes_only_into_rows_that_it_fits(plan: Any, rows: torch.Tensor) -> None:
    assert render.make_render(plan, rows, KEYS) is None


@pytest.mark.skipif(kernels.kernels() is None, reason=kernels.state())
def test_an_image_with_fewer_pixels_than_its_header_says_is_not_read_beyond_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = io.BytesIO()
    Image.fromarray(np.full((512, 512, 3), 200, np.uint8)).save(file, "JPEG")
    encoded = file.getvalue()
    monkeypatch.setattr(
        plans, "pixels_at_least", lambda *_, **__: np.full((1, 1, 3), 200, np.uint8)
    )
    keys = np.arange(64, dtype=np.uint64)
    rows = torch.full((64, 3, 8, 8), 77, dtype=torch.uint8)
    made = render.make_render(PLAN, rows, keys)
    assert made is not None
    missing = made.encoded(lambda _: encoded, lambda _: None)
    done = sorted(set(range(64)) - set(missing))
    assert missing
    assert (rows[done] == 200).all()
