"""Promise: With timm and webdataset, 8 workers give 2,048 right samples. Open archives are each worker's own."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.compat.eight_workers import (
    PAIRS,
    Pairs,
    batches,
    count_different,
    filled,
    library,
    wrong_pairs,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]


def color(index: int, side: int = 16) -> np.ndarray[Any, Any]:
    """Return an image whose columns and rows say where they are."""
    image = np.full((side, side, 3), index % 256, np.uint8)
    image[..., 1] = np.arange(side)
    image[..., 2] = np.arange(side)[:, None]
    return image


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an archive of 256 images in four folders; image i says i in its first pixel."""
    image_module = library("PIL.Image")
    path: Path = tmp_path_factory.mktemp("archive") / "images.tar"
    with tarfile.open(path, "w") as tar:
        for i in range(256):
            file = io.BytesIO()
            image_module.fromarray(color(i)).save(file, format="PNG")
            member = tarfile.TarInfo(f"class{i // 64}/{i:04d}.png")
            member.size = file.tell()
            file.seek(0)
            tar.addfile(member, file)
    return path


class Archived(Pairs):
    """Images of timm's dataset over an archive, eight times."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, label = self.images[index % 256]
        found = np.array(image)[0, 0, 0]
        return torch.tensor([int(found), label]), torch.tensor([index % 256, index % 256 // 64])


@pytest.mark.parametrize(
    ("reader", "early"),
    [("ReaderImageTar", False), ("ReaderImageTar", True), ("ReaderImageInTar", True)],
)
def test_an_archive_of_timm(archive: Path, reader: str, early: bool) -> None:
    timm = library("timm.data")
    if reader == "ReaderImageTar":
        made = library("timm.data.readers.reader_image_tar").ReaderImageTar(str(archive))
    else:
        made = library("timm.data.readers.reader_image_in_tar").ReaderImageInTar(str(archive))
    images = timm.ImageDataset(str(archive), reader=made, input_img_mode="RGB")
    options: dict[str, Any] = {}
    if early:  # the archive is open, and threads would share it
        images[3]
        options = {"worker_method": "process", "num_workers": 2}
    assert wrong_pairs(Archived(images), **options) == 0


def test_shards_of_webdataset(tmp_path: Path) -> None:
    """An iterable dataset splits its shards among the workers: each sample comes once."""
    wds = library("webdataset")
    for shard in range(16):
        with wds.TarWriter(str(tmp_path / f"{shard:02d}.tar")) as writer:
            for i in range(shard * 128, shard * 128 + 128):
                writer.write({"__key__": f"{i:05d}", "x.npy": filled(i).numpy(), "y.cls": i})
    pipeline = wds.WebDataset(
        sorted(map(str, tmp_path.glob("*.tar"))),
        shardshuffle=False,
        workersplitter=wds.split_by_worker,
    )
    pairs = pipeline.shuffle(100).decode().to_tuple("x.npy", "y.cls")
    seen = []
    for arrays, indices in batches(pairs):
        assert count_different(arrays, torch.stack([filled(int(i)) for i in indices])) == 0
        seen += indices.tolist()
    assert sorted(seen) == list(range(PAIRS))
