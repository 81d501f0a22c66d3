"""An epoch from stored features beside the making of them: what each further training saves."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from benchmarks._measure import open_loader, rate, run_epochs
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from benchmarks.images import sample_images
from fastload import store
from fastload.bench.figures import BenchError
from fastload.image import IMAGENET_MEAN, IMAGENET_STD, Resize, open_image
from fastload.image.decode import read_file
from fastload.measure.page_cache import prepare_cache

TITLE = (
    "features: 256 JPEGs, in the page cache, through ResNet-50 (random weights) at 224 pixels, float32, 2 threads, "
    "into a set in the temporary folder; then shuffled epochs of batches of 64 from it, 0 workers; second to sixth"
)
REPEATS = 3

COUNT, SMOKE_COUNT = 256, 16
BATCH = 64
EPOCHS = 6
FASTER = 20
WHAT = ("an epoch from features", "making them", "loading the images, without a network")
LAYOUTS: tuple[Literal["pooled", "flat"], ...] = ("pooled", "flat")


class Numbered(Dataset[Any]):
    """The images, each with its index in place of a label."""

    fastload_per_worker = ()

    def __init__(self, paths: list[str], plan: Resize) -> None:
        self.paths, self.transform = paths, plan

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path = self.paths[index]
        return open_image(read_file(path), self.transform, name=path), index


def cases(*, smoke: bool) -> list[Case]:
    size, count, model = (64, SMOKE_COUNT, "resnet18") if smoke else (224, COUNT, "resnet50")
    return [
        Case(_name(layout), {"layout": layout, "count": count, "size": size, "model": model})
        for layout in LAYOUTS
    ]


def measure(*, layout: Literal["pooled", "flat"], count: int, size: int, model: str) -> Figures:
    """Images per second of both. Raises BenchError unless an epoch has the features that the network returns."""
    paths = sample_images(count)
    prepare_cache(paths, "warm")
    dataset = Numbered(paths, Resize((size, size), mean=IMAGENET_MEAN, std=IMAGENET_STD))
    network = store.backbone(model, weights="random", layout=layout)
    with torch.inference_mode():
        first = network(dataset[0][0][None])[0]  # which warms up, too
    loader = {"batch_size": BATCH, "num_workers": 2}
    with open_loader("fastload", dataset, workers=2, batch_size=BATCH) as batches:
        loading = rate(run_epochs(batches, count=2, indices=range(count))[1:])
    with tempfile.TemporaryDirectory(prefix="fastload-features-") as folder:
        began = perf_counter()
        features = store.features(
            Path(folder, "set"), dataset=dataset, model=network, loader=loader
        )
        made = perf_counter() - began
        found, number = features[0]
        if int(number) or not torch.allclose(found, first, rtol=1e-3, atol=1e-3):
            raise BenchError("the first row does not have the features of the first image")
        with open_loader(
            "fastload", features, workers=0, batch_size=BATCH, shuffle=True
        ) as batches:
            epochs = run_epochs(batches, count=EPOCHS, indices=range(count))
    return {"making": count / made, "loading": loading, "epoch": rate(epochs[1:])}


def rows(results: Results) -> list[Row]:
    found = []
    for layout in LAYOUTS:
        of = partial(row, results, _name(layout), unit="img/s")
        epoch, making, loading = (f"{layout}: {what}" for what in WHAT)
        found += [
            of("epoch", name=epoch, against="making", reference=making, aim=Aim(">=", FASTER)),
            # With an accelerator the making comes near to this rate, and cannot be faster.
            of("epoch", name=epoch, against="loading", reference=loading),
            of("making", name=making),
            of("loading", name=loading),
        ]
    return found


def _name(layout: str) -> str:
    return f"{layout}, {'2,048' if layout == 'pooled' else '100,352'} numbers an image"
