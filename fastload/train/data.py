"""The dataset of a training run and the loader over it: the only thing in which two runs of a recipe may differ."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import fastload
from fastload.datasets import ImageFileList
from fastload.image import Plan, RandomResizedCrop, Resize
from fastload.measure.page_cache import cached_share
from fastload.measure.samples import Source, find_list
from fastload.train.recipe import Recipe

CACHED_BATCHES = 4
"""How many batches `--loader cached` keeps: enough that none of them stays in a processor's cache."""
_LOOKED_AT = 64

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Pictures uint8[B, 3, H, W], class numbers int64[B], the samples' indices int64[B]."""


def open_dataset(recipe: Recipe) -> Source:
    """Open the whole dataset, the same on all ranks."""
    plan = _plan(recipe)
    if recipe.packed is not None:
        from fastload.datasets import PackedDataset  # which needs pyarrow

        return PackedDataset(recipe.packed, transform=plan)
    file_list = find_list(recipe.file_list, recipe.base_dir)
    return ImageFileList(file_list, base_dir=recipe.base_dir, transform=plan)


def _plan(recipe: Recipe) -> Plan:
    if recipe.transform == "resize":
        return Resize((recipe.size, recipe.size), channels_last=recipe.channels_last)
    return RandomResizedCrop(recipe.size, flip=0.5, channels_last=recipe.channels_last)


def open_loader(
    recipe: Recipe, dataset: Dataset[Any], *, rank: int, world_size: int, pin_memory: bool
) -> fastload.DataLoader[Batch]:
    """The loader of a rank: its part of one global order, which is a function of the seed."""
    processes = recipe.loader == "process"
    sampler = fastload.RankSampler(
        dataset,  # type: ignore[arg-type]
        rank=rank,
        world_size=world_size,
        seed=recipe.seed,
    )
    threads: dict[str, Any] = {
        "prefetch_batches": recipe.prefetch_batches if recipe.workers else None,
        "seed": recipe.seed,
        "memory_format": torch.channels_last if recipe.channels_last else torch.contiguous_format,
    }
    return fastload.DataLoader(
        dataset,
        recipe.batch_size,
        sampler=sampler,
        num_workers=recipe.workers,
        pin_memory=pin_memory,
        persistent_workers=recipe.workers > 0,
        worker_method="process" if processes else "thread",
        **({} if processes else threads),
    )


class Replayed:
    """The first batches of a loader, again and again: training without loading. As long as the loader, for `len()`."""

    def __init__(self, loader: fastload.DataLoader[Batch]) -> None:
        self.dataset = loader.dataset
        self._length = len(loader)
        with loader:
            self._batches = list(islice(loader, CACHED_BATCHES))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        return islice(cycle(self._batches), self._length)


def upcoming(loader: fastload.DataLoader[Batch], *, steps: int) -> list[int]:
    """Some of the samples that this rank reads in the next steps of this epoch: up to 64 indices, evenly spread."""
    sampler = loader.sampler
    assert isinstance(sampler, fastload.RankSampler)
    done = loader.state_dict()["batches"] if loader.worker_method == "thread" else 0
    size = loader.batch_size or 1
    last = min((done + steps) * size, len(sampler))
    stride = max(1, (last - done * size) // _LOOKED_AT)
    places = range(done * size, last, stride)
    return [int(sampler.indices(place, place + 1)[0]) for place in places]


@dataclass(frozen=True, slots=True)
class Cached:
    """How much of the files that a rank begins with was in the page cache as the run began."""

    share: float | None
    """0 to 1; None where it is not known."""
    files: int
    """How many were looked at."""

    def __str__(self) -> str:
        if self.share is None:
            return "not known"
        return f"{self.share:.0%} of {self.files} files of rank 0 were in it as the run began"


def cached(recipe: Recipe, dataset: Source, indices: Sequence[int]) -> Cached:
    """How much of what holds these samples is in the page cache. Looks at up to 64 files, reads none.

    Of files that one neither owns nor may write, Linux says that all is in it: mincore(2). Those are left out.
    """
    if recipe.packed is not None:
        files = sorted(str(path) for path in Path(recipe.packed).glob("*.arrow"))
    else:
        files = sorted({dataset.locate(index) for index in indices})
    files = files[:: max(1, -(-len(files) // _LOOKED_AT))]
    try:
        files = [path for path in files if _tells(path)]
        return Cached(cached_share(files), len(files))
    except OSError:  # The loader will say which file is missing, and where it is listed.
        return Cached(None, 0)


def _tells(path: str) -> bool:
    return os.access(path, os.W_OK) or os.stat(path).st_uid == os.geteuid()
