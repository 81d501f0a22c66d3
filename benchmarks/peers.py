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
    "peers: 2,048 JPEGs, RandomResizedCrop(224), flip, uint8, batches of 64, shuffled; second and later epochs, files "
    "in the page cache unless the row says otherwise"
)
REPEATS = 5
PACKAGES = ("ffcv",)

COUNT, SMOKE_COUNT = 2048, 64
BATCH, PASSES = 64, 3
GROUPS = {
    "files": "JPEG files",
    "encoded": "packed, full-size JPEG",
    "jpeg": "packed, JPEG of 256 px",
    "raw": "packed, pixels of 256 px",
}
HOW = {
    "planes": "planes",
    "last": "channels-last",
    "whole": "planes, whole images decoded",
    "pillow": "Pillow + v1",
    "torchvision": "torchvision decoder + v2",
}
COLD = "; cold cache"


class Contender(NamedTuple):
    """One loader over one form of the images."""

    group: str
    recipe: str
    how: str = ""
    workers: int = 2
    cold: bool = False
    """Measured with a cold cache as well."""

    @property
    def title(self) -> str:
        loader, _, how = self.how.rpartition("-")
        name = f"fastload, a plan, {HOW.get(how)}"
        if self.recipe == "loose":
            name = f"{'torch' if loader == 'torch' else 'fastload'}, {HOW[how]}"
        elif self.recipe == "ffcv":
            name = "FFCV" + " (encoded anew)" * (self.group == "encoded")
        readers = f"{self.workers} {'processes' if loader == 'torch' else 'threads'}"
        return f"{GROUPS[self.group]}: {name}, {readers if self.workers else 'serial'}"


FUSED, *PACKED = (Contender(group, "plan", "planes", cold=True) for group in GROUPS)
ENCODED, JPEG, RAW = PACKED
FFCV = {
    group: Contender(group, "ffcv", cold=group != "encoded") for group in GROUPS if group != "files"
}
TORCH = [
    Contender(
        "files", "loose", f"torch-{decoder}", workers, (decoder, workers) == ("torchvision", 2)
    )
    for decoder in ("torchvision", "pillow")
    for workers in (0, 2, 4)
]
CONTENDERS = [
    FUSED,
    *(Contender("files", "plan", how) for how in ("last", "whole")),
    *(Contender("files", "loose", f"thread-{decoder}") for decoder in ("torchvision", "pillow")),
    *TORCH,
    *(ENCODED, FFCV["encoded"]),
    *(JPEG, *(Contender("jpeg", "plan", how) for how in ("last", "whole")), FFCV["jpeg"]),
    *(RAW, Contender("raw", "plan", "last"), FFCV["raw"]),
]


def cases(*, smoke: bool) -> list[Case]:
    size = {"count": SMOKE_COUNT, "batch": 4} if smoke else {"count": COUNT, "batch": BATCH}
    found = []
    for it in CONTENDERS:
        options = {key: value for key, value in it._asdict().items() if key != "cold"} | size
        found.append(Case(it.title, options | {"cache": "warm"}, watch_memory=True))
        if it.cold:
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
        later = passes(count=PASSES - 1)
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
    decoder = best(results, [it.title for it in TORCH if "torchvision" in it.how], "rate")
    against = {FUSED: (best(results, [it.title for it in TORCH], "rate"), "torch's best", 1.75)}
    # Against FFCV; where it is not installed, against torch on the files, of whose rate FFCV's is 3 and 6 times.
    for it, of_ffcv, of_torch in ((JPEG, 1.8, 5.4), (RAW, 4.0, 24.0)):
        against[it] = (decoder, "torch, torchvision decoder, on the files", of_torch)
        if ffcv_is_there():
            against[it] = (FFCV[it.group].title, "FFCV", of_ffcv)
    for it in CONTENDERS:
        compared: dict[str, Any] = {}
        if it in against:
            other, reference, bound = against[it]
            compared = {"against": (other, "rate"), "reference": reference, "aim": Aim(">=", bound)}
        found.append(of(it.title, "rate", unit="img/s", name=_named(it), **compared))
    soon = {"first_batch_s": dict.fromkeys((JPEG, RAW), Aim("<=", 0.1, of="figure"))}
    units = {
        "first_batch_s": "s to the first batch",
        "cpu_ms": "CPU ms/img",
        "peak_mib": "MiB at most",
    }
    for key, unit in units.items():
        for it in CONTENDERS:
            if it.workers == 2:
                aim = soon.get(key, {}).get(it)
                found.append(of(it.title, key, unit=unit, name=_named(it), aim=aim))
    for it in CONTENDERS:
        if it.cold:
            cold = partial(of, it.title + COLD, name=_named(it) + COLD)
            base = (
                {}
                if it is FUSED
                else {"against": (FUSED.title + COLD, "rate"), "reference": "fused plan on files"}
            )
            found.append(cold("rate", unit="img/s", **base))
            found.append(cold("first_batch_s", unit="s to the first batch"))
            found.append(cold("cached", unit="of it cached at start"))
    return found


def ffcv_is_there() -> bool:
    return importlib.util.find_spec("ffcv") is not None


def _named(it: Contender) -> str:
    missing = it.recipe == "ffcv" and not ffcv_is_there()
    return it.title + " (ffcv is not installed)" * missing
