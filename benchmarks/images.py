"""Promise: The rate of unmodified Pillow and torchvision datasets with two workers is measured against torch's best.

JPEG files through Pillow and torchvision's transforms (v1): the common recipe, a user's own dataset class.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms

from benchmarks._measure import Kind, open_loader, rate, run_epochs
from benchmarks._report import Aim, Figures, Results, Row, best, label, row
from benchmarks._run import Case
from fastload.measure.page_cache import prepare_cache

TITLE = "images: JPEG, Pillow + torchvision v1, float32, batches of 64, 2 workers; second epoch, files in page cache"
REPEATS = 5

BATCH = 64
AIMS = {"crop": 1.15, "resize": 1.25}
LOADERS: list[tuple[Kind, int]] = [("fastload", 2), ("torch", 0), ("torch", 2)]
NAMES = {
    "crop": "RandomResizedCrop, flip, ToTensor, Normalize",
    "resize": "Resize((256, 256)), ToTensor",
}


class Photos(Dataset[Any]):
    """As anyone writes it; the index takes the place of the label."""

    def __init__(self, paths: list[str], transform: Any) -> None:
        self.paths = paths
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB")), index


def transform(name: str) -> Any:
    """PIL image -> float32[3, H, W]."""
    if name == "resize":
        return transforms.Compose([transforms.Resize((256, 256)), transforms.ToTensor()])
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )


def sample_images(count: int) -> list[str]:
    """The paths of `count` generated images; kept between runs, in a folder of this user's in the temporary one."""
    folder = Path(tempfile.gettempdir(), f"fastload-benchmarks-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{folder} belongs to another user. Set TMPDIR to a folder of your own"
        )
    images = folder / f"images-{count}"
    # In a process of its own: painting leaves threads and memory behind that the loaders shall not find.
    command = [sys.executable, "-m", "fastload", "images", str(images), "--count", str(count)]
    if not (images / "filelist.txt").exists():
        subprocess.run(command, check=True)
    return [str(images / line) for line in (images / "filelist.txt").read_text().splitlines()]


def cases(*, smoke: bool) -> list[Case]:
    return [
        Case(
            _name(recipe, kind, workers),
            {"recipe": recipe, "kind": kind, "workers": workers, "count": 16 if smoke else 2048},
        )
        for recipe in AIMS
        for kind, workers in LOADERS
    ]


def measure(*, recipe: str, kind: Kind, workers: int, count: int) -> Figures:
    paths = sample_images(count)
    prepare_cache(paths, "warm")
    torch.manual_seed(0)
    photos = Photos(paths, transform(recipe))
    with open_loader(kind, photos, workers=workers, batch_size=BATCH, shuffle=True) as loader:
        epochs = run_epochs(loader, count=2, indices=range(count))
    return {"rate": rate(epochs[1:]), "first_batch_s": epochs[0].first_batch_s}


def rows(results: Results) -> list[Row]:
    found = []
    for recipe, least in AIMS.items():
        of = partial(row, results, key="rate", unit="img/s")
        ours, *theirs = (_name(recipe, kind, workers) for kind, workers in LOADERS)
        against, aim = (best(results, theirs, "rate"), "rate"), Aim(">=", least)
        found.append(of(ours, against=against, reference="torch's best", aim=aim))
        found += map(of, theirs)
    return found


def _name(recipe: str, kind: str, workers: int) -> str:
    return f"{NAMES[recipe]}: {label(kind, workers)}"
