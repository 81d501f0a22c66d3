"""What a loader costs the training loop beside it: a step bound by its own Python, with and without loader threads."""

from __future__ import annotations

import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks._measure import open_loader
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from benchmarks.images import Photos, sample_images, transform

TITLE = "beside: a step of 2,000 tiny in-place adds beside 1 loader thread, against the same step on cached data"
REPEATS = 5

ADDS = 2_000
ALONE = "cached data"
LEAN = "simplejpeg, centre crop, uint8"
PILLOW = "Pillow + torchvision v1"


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
    options = {"images": 64 if smoke else 1024, "steps": 5 if smoke else 300}
    return [Case(name, {"name": name, **options}) for name in (ALONE, LEAN, PILLOW)]


def measure(*, name: str, images: int, steps: int) -> Figures:
    """The median step, without the wait for its batch: that is the loader's own matter."""
    tensor = torch.zeros(1)
    paths = sample_images(images)
    if name == ALONE:
        return {"step_ms": _median_step_ms(tensor, lambda: None, steps)}
    dataset: Dataset[Any] = Lean(paths) if name == LEAN else Photos(paths, transform("crop"))
    with open_loader("fastload", dataset, workers=1, batch_size=4, shuffle=True) as loader:
        batches = iter(loader)

        def following() -> None:
            nonlocal batches
            try:
                next(batches)
            except StopIteration:
                batches = iter(loader)

        return {"step_ms": _median_step_ms(tensor, following, steps)}


def _median_step_ms(tensor: torch.Tensor, following: Any, steps: int) -> float:
    seconds = []
    for _ in range(steps):
        following()
        began = perf_counter()
        for _ in range(ADDS):
            tensor.add_(1)
        seconds.append(perf_counter() - began)
    return statistics.median(seconds) * 1000


def rows(results: Results) -> list[Row]:
    aims = {LEAN: Aim("<=", 1.1)}
    return [
        row(
            results, name, "step_ms", unit="ms/step", against=(ALONE, "step_ms"), aim=aims.get(name)
        )
        for name in (LEAN, PILLOW)
    ] + [row(results, ALONE, "step_ms", unit="ms/step")]
