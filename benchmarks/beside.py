"""Promise: What a loader costs a launch-bound training step beside it is measured, with and without loader threads.

Each step is bound by its own Python and asks for a batch of one image, which a worker makes in less time than the
step takes: the step bounds the run, as on a busy GPU, and one core is free. The control is a bare thread that decodes
as many images: what a loader in threads cannot be better than.
"""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks._measure import open_loader
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from benchmarks.images import Photos, sample_images, transform
from fastload.datasets import ImageFileList
from fastload.image import RandomResizedCrop

TITLE = (
    "beside: a step of 2,000 tiny in-place adds with an image each from 1 loader thread, "
    "against the same step on cached data"
)
REPEATS = 5

ADDS = 2_000
ALONE = "cached data"
BARE = "bare thread, simplejpeg, centre crop"
LEAN = "fastload, simplejpeg, centre crop"
PLAN = "fastload, ImageFileList with a plan"
PILLOW = "fastload, Pillow + torchvision v1"


class Lean(Dataset[Any]):
    """Decoded by simplejpeg, which releases the GIL; a crop that copies and nothing else."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from simplejpeg import decode_jpeg

        pixels = decode_jpeg(Path(self.paths[index]).read_bytes())
        top, left = (pixels.shape[0] - 224) // 2, (pixels.shape[1] - 224) // 2
        return torch.from_numpy(pixels[top : top + 224, left : left + 224].copy()), index


def cases(*, smoke: bool) -> list[Case]:
    options = {"images": 64 if smoke else 1024, "steps": 5 if smoke else 500}
    return [Case(name, {"name": name, **options}) for name in (ALONE, BARE, LEAN, PLAN, PILLOW)]


def measure(*, name: str, images: int, steps: int) -> Figures:
    """The median step, without the wait for its batch: that is the loader's own matter."""
    paths = sample_images(images)
    if name == ALONE:
        return {"step_ms": _median_step_ms(lambda: None, steps)}
    if name == BARE:
        read, indices = Lean(paths).__getitem__, cycle(range(len(paths)))
        with ThreadPoolExecutor(1) as pool:
            return {"step_ms": _median_step_ms(lambda: pool.submit(read, next(indices)), steps)}
    with open_loader(
        "fastload", _dataset(name, paths), workers=1, batch_size=1, shuffle=True
    ) as loader:
        batches = iter(loader)

        def following() -> None:
            nonlocal batches
            try:
                next(batches)
            except StopIteration:
                batches = iter(loader)

        return {"step_ms": _median_step_ms(following, steps)}


def _dataset(name: str, paths: list[str]) -> Dataset[Any]:
    if name == LEAN:
        return Lean(paths)
    if name == PLAN:
        file_list = Path(paths[0]).parents[2] / "filelist.txt"
        return ImageFileList(file_list, transform=RandomResizedCrop(224, flip=0.5))
    return Photos(paths, transform("crop"))


def _median_step_ms(following: Any, steps: int) -> float:
    tensor = torch.zeros(1)
    seconds = []
    for _ in range(steps):
        following()
        began = perf_counter()
        for _ in range(ADDS):
            tensor.add_(1)
        seconds.append(perf_counter() - began)
    return statistics.median(seconds) * 1000


def rows(results: Results) -> list[Row]:
    def against(name: str, other: str, aim: Aim | None = None) -> Row:
        return row(results, name, "step_ms", unit="ms/step", against=(other, "step_ms"), aim=aim)

    return [
        against(BARE, ALONE),
        against(LEAN, ALONE, Aim("<=", 1.1)),
        against(PLAN, ALONE),
        against(PILLOW, ALONE),
        against(LEAN, BARE),
        row(results, ALONE, "step_ms", unit="ms/step"),
    ]
