"""Promises:
- A dataset of image files with a plan gives equal batches for 0, 1, 2 and 8 workers, and torchvision's crops under
  the same seed.
- The stages of a plan are measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("PIL")
import torchvision
from PIL import Image
from torchvision.transforms import v2

import fastload
from fastload.datasets import ImageFileList
from fastload.image import RandomResizedCrop, ResizeCenterCrop
from tests.image.photographs import photographs
from tests.promises.equal import check_same

SIDE = 96
PLAN = RandomResizedCrop(SIDE, flip=0.5)


@pytest.fixture(scope="module")
def pngs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the list of twelve pieces of photographs of different sizes, in three classes."""
    folder = tmp_path_factory.mktemp("pngs")
    sources, lines = list(photographs().values()), []
    for number in range(12):
        pixels = sources[number % len(sources)][: 150 + 9 * number, 40 : 300 - 7 * number]
        path = folder / ("cat", "dog", "eel")[number % 3] / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path, compress_level=1)
        lines.append(str(path.relative_to(folder)))
    (folder / "list.txt").write_text("\n".join(lines))
    return folder / "list.txt"


def load(dataset: Any, workers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    options: dict[str, Any] = {"shuffle": True, "seed": 7, "num_workers": workers}
    with fastload.DataLoader(dataset, 5, **options) as loader:
        return [(images.clone(), labels.clone()) for _ in range(2) for images, labels in loader]


@pytest.mark.parametrize("theirs", [torchvision.transforms, v2], ids=["v1", "v2"])
def test_crops_and_flips_are_those_of_torchvisions_transforms_under_the_same_seed(
    theirs: Any, pngs: Path
) -> None:
    transform = theirs.Compose(
        [
            theirs.RandomResizedCrop(SIDE),
            theirs.RandomHorizontalFlip(),
            torchvision.transforms.PILToTensor(),
        ]
    )
    expected, ours = (load(ImageFileList(pngs, transform=t), 0) for t in (transform, PLAN))
    for workers in (1, 2, 8):
        check_same(load(ImageFileList(pngs, transform=PLAN), workers), ours)
    for (images, labels), (other_images, other_labels) in zip(ours, expected, strict=True):
        assert torch.equal(labels, other_labels)
        difference = (images.int() - other_images.int()).abs()
        assert difference.max() <= 3
        assert difference.float().mean() < 0.5


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("plan", [PLAN, ResizeCenterCrop()])
def test_stats_show_the_stages(plan: Any, workers: int, pngs: Path) -> None:
    with fastload.DataLoader(ImageFileList(pngs, transform=plan), 6, num_workers=workers) as loader:
        for _ in loader:
            pass
        stages = loader.stats().stages
    for name in ("read", "decode", "transform"):
        assert stages[name].count == 12, name
        assert stages[name].seconds > 0
