"""The dataset of a training run and its loader."""

from __future__ import annotations

import os
from collections.abc import Sequence
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

_LOOKED_AT = 64

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Images uint8[B, 3, H, W], class numbers int64[B], indices of the samples int64[B]."""


def open_dataset(recipe: Recipe) -> Source:
    """Open the dataset, which is the same on all ranks."""
    plan = _plan(recipe)
    if recipe.packed is not None:
        from fastload.datasets import PackedDataset  # needs pyarrow

        return PackedDataset(recipe.packed, transform=plan)
    file_list = find_list(recipe)
    return ImageFileList(file_list, base_dir=recipe.base_dir, transform=plan)


def _plan(recipe: Recipe) -> Plan:
    if recipe.transform == "resize":
        return Resize((recipe.size, recipe.size), channels_last=recipe.channels_last)
    return RandomResizedCrop(recipe.size, flip=0.5, channels_last=recipe.channels_last)


def open_loader(
    recipe: Recipe, dataset: Dataset[Any], *, rank: int, world_size: int, pin_memory: bool
) -> fastload.DataLoader[Batch]:
    """Return the loader of a rank, over its part of one global order. The order depends only on the seed."""
    sampler = fastload.RankSampler(
        dataset,  # type: ignore[arg-type]
        rank=rank,
        world_size=world_size,
        seed=recipe.seed,
    )
    theirs = recipe.loader == "torch"
    return fastload.DataLoader(
        dataset,
        recipe.batch_size,
        sampler=sampler,
        num_workers=recipe.workers,
        pin_memory=pin_memory,
        persistent_workers=recipe.workers > 0,
        worker_method=recipe.loader,
        prefetch_batches=recipe.prefetch_batches if recipe.workers and not theirs else None,
        prefetch_factor=recipe.prefetch_batches if theirs else None,
        seed=recipe.seed,
        memory_format=torch.channels_last if recipe.channels_last else torch.contiguous_format,
    )


def upcoming(loader: fastload.DataLoader[Batch], *, first: int, steps: int) -> list[int]:
    """Return up to 64 indices of samples that this rank reads after step `first` in this epoch, evenly spread."""
    sampler = loader.sampler
    assert isinstance(sampler, fastload.RankSampler)
    done = first % len(loader) if len(loader) else 0
    size = loader.batch_size or 1
    last = min((done + steps) * size, len(sampler))
    stride = max(1, (last - done * size) // _LOOKED_AT)
    places = range(done * size, last, stride)
    return [int(sampler.indices(place, place + 1)[0]) for place in places]


def cached(recipe: Recipe, dataset: Source, indices: Sequence[int]) -> float | None:
    """Return the share (0 to 1) of these samples' files in the page cache, or None if unknown. Read none of them.

    For files that the user neither owns nor may write, Linux reports every page as cached: mincore(2). They are left
    out.
    """
    if recipe.packed is not None:
        files = sorted(str(path) for path in Path(recipe.packed).glob("*.arrow"))
    else:
        files = sorted({dataset.locate(index) for index in indices})
    files = files[:: max(1, -(-len(files) // _LOOKED_AT))]
    try:
        return cached_share([path for path in files if _tells(path)])
    except OSError:  # The loader will report the missing file, and its position in the list.
        return None


def _tells(path: str) -> bool:
    return os.access(path, os.W_OK) or os.stat(path).st_uid == os.geteuid()
