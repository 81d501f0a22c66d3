"""Promises:
- fastload is measured beside other loaders, each by its own recipe: rates, first batch, CPU, memory, cold cache.
  `scripts/bench --peers` runs it.
- Every run of `peers` checks that each epoch had every image once. See also `tests/test_peers.py`.

The images, crops, flips and batches are the same for each, by the recipe of its own documents.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch

from benchmarks._measure import NotMeasuredError, rate, run_epochs
from benchmarks._report import Aim, Figures, Results, Row, best, row
from benchmarks._run import Case
from benchmarks.recipes import RECIPES, SIZE, Batch, Task, packed, tree
from fastload.bench.figures import BenchError
from fastload.measure.page_cache import cached_share, prepare_cache
from fastload.measure.processes import cpu_seconds, tree_memory

TITLE = (
    "peers: 2,048 JPEGs, RandomResizedCrop(224), flip, uint8, batches of 64, shuffled, 2 workers that persist; second "
    "and later epochs, files in the page cache unless the row says otherwise"
)
REPEATS = 5
PACKAGES = ("ffcv",)

COUNT, SMOKE_COUNT = 2048, 64
BATCH = 64
PASSES = {"files": 2, "jpeg": 5, "raw": 8}
"""Epochs that count. The first one does not."""
GROUPS = {
    "files": "JPEG files",
    "jpeg": "packed, JPEG of 256 px",
    "raw": "packed, pixels of 256 px",
}
HOW = {
    "planes": "fastload, a plan",
    "whole": "fastload, a plan of whole images",
    "auto-torchvision": "fastload, torchvision decoder + v2",
    "torch-torchvision": "torch, torchvision decoder + v2",
    "torch-pillow": "torch, Pillow + v1",
    "ffcv": "FFCV",
}
COLD = "; cold cache"


class Contender(NamedTuple):
    """One loader over one form of the images."""

    group: str
    recipe: str
    how: str
    workers: int = 2

    @property
    def title(self) -> str:
        workers = f", {self.workers} workers" * (self.workers != 2)
        return f"{GROUPS[self.group]}: {HOW[self.how]}{workers}"


FUSED, JPEG, RAW = (Contender(group, "plan", "planes") for group in GROUPS)
FFCV = {group: Contender(group, "ffcv", "ffcv") for group in ("jpeg", "raw")}
TORCH = [
    Contender("files", "loose", "torch-torchvision"),
    Contender("files", "loose", "torch-torchvision", 4),
    Contender("files", "loose", "torch-pillow"),
]
CONTENDERS = [
    FUSED,
    Contender("files", "plan", "whole"),
    Contender("files", "loose", "auto-torchvision"),
    *TORCH,
    *(JPEG, Contender("jpeg", "plan", "whole"), FFCV["jpeg"]),
    *(RAW, FFCV["raw"]),
]
COLD_ONES = (JPEG, FFCV["jpeg"], RAW, FFCV["raw"])


def cases(*, smoke: bool) -> list[Case]:
    size = {"count": SMOKE_COUNT, "batch": 4} if smoke else {"count": COUNT, "batch": BATCH}
    found = []
    for it in CONTENDERS:
        options = it._asdict() | size
        found.append(Case(it.title, options | {"cache": "warm"}, watch_memory=True))
        if it in COLD_ONES:
            found.append(Case(it.title + COLD, options | {"cache": "cold"}))
    return found


def prepare(*, smoke: bool) -> None:
    """Make images and packed sets, so that no measured process has to. Import nothing of a peer."""
    root = tree(SMOKE_COUNT if smoke else COUNT)
    for it in CONTENDERS:
        if it.group == "files" or (it.recipe == "ffcv" and not ffcv_is_there()):
            continue
        try:
            packed(it.recipe, it.group, root)
        except subprocess.CalledProcessError as error:  # The case will fail of it.
            print(f"peers: {it.title}: packing failed: {error}", file=sys.stderr)


def measure(
    *,
    group: str,
    recipe: str,
    how: str,
    workers: int,
    count: int,
    batch: int,
    cache: Literal["warm", "cold"],
) -> Figures:
    """Return rates and costs of one contender. Raise BenchError unless each epoch has all images once."""
    if recipe == "ffcv" and not ffcv_is_there():
        raise NotMeasuredError("ffcv is not installed")
    root = tree(count)
    source = root if group == "files" else packed(recipe, group, root)
    read = [str(path) for path in (source, *source.rglob("*")) if path.is_file()]
    prepare_cache(read, cache)
    cached = cached_share(read)
    if cache == "cold" and cached is None:
        raise NotMeasuredError("this system does not tell which files are cached")
    torch.manual_seed(0)
    began = perf_counter()
    with RECIPES[recipe](Task(source, group, how, batch, workers)) as batches:
        passes = partial(run_epochs, Numbers(batches, batch), indices=range(count))
        opened_s = perf_counter() - began
        [first] = passes(count=1)
        figures = {"first_batch_s": opened_s + first.first_batch_s}
        if cached is not None:
            figures["cached"] = cached
        if cache == "cold":
            # Not from the start: what is compiled or started before the first batch is in that batch's figure.
            return figures | {"rate": (count - batch) / (first.seconds - first.first_batch_s)}
        before_s = cpu_seconds() or 0.0
        later = passes(count=PASSES[group])
        cpu_s = (cpu_seconds() or 0.0) - before_s
        memory = tree_memory(os.getpid())
    return figures | {
        "rate": rate(later),
        "cpu_ms": 1000 * cpu_s / sum(epoch.samples for epoch in later),
        "peak_mib": (memory or 0) / 2**20,
    }


class Numbers:
    """Yields the numbers of the images in each batch. Raises BenchError for a batch of another dtype or shape."""

    def __init__(self, batches: Iterable[Batch], size: int) -> None:
        self.batches, self.shape = batches, (size, 3, SIZE, SIZE)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for images, numbers in self.batches:
            if (images.dtype, images.shape) != (torch.uint8, self.shape):
                raise BenchError(
                    f"expected a batch of uint8{[*self.shape]}, got {images.dtype}{[*images.shape]}"
                )
            yield numbers


def rows(results: Results) -> list[Row]:
    of = partial(row, results)
    found: list[Row] = []
    torchs = best(results, [it.title for it in TORCH], "rate")
    against = {FUSED: (torchs, "torch's best", 1.75)}
    against |= {JPEG: (FFCV["jpeg"].title, "FFCV", 1.8), RAW: (FFCV["raw"].title, "FFCV", 4.0)}
    for it in CONTENDERS:
        compared: dict[str, Any] = {}
        if it in against:
            other, reference, bound = against[it]
            compared = {"against": (other, "rate"), "reference": reference, "aim": Aim(">=", bound)}
        found.append(of(it.title, "rate", unit="img/s", **compared))
    units = {
        "first_batch_s": "s to the first batch",
        "cpu_ms": "CPU ms/img",
        "peak_mib": "MiB at most",
    }
    for key, unit in units.items():
        for it in CONTENDERS:
            soon = key == "first_batch_s" and it in (JPEG, RAW)
            aim = Aim("<=", 0.1, of="figure") if soon else None
            found.append(of(it.title, key, unit=unit, aim=aim))
    for it in COLD_ONES:
        found.append(of(it.title + COLD, "rate", unit="img/s"))
        found.append(of(it.title + COLD, "cached", unit="of it cached at start"))
    return found


def ffcv_is_there() -> bool:
    return importlib.util.find_spec("ffcv") is not None
