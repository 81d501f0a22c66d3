"""Files through fastload's plan: header, box, scaled decode, resize and flip in one step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks._measure import open_readers
from benchmarks.recipes import SIZE, Batch, Task
from fastload.datasets import ImageFileList
from fastload.image import RandomResizedCrop


def opened(task: Task) -> Iterator[Iterable[Batch]]:
    dataset = ImageFileList(task.source / "filelist.txt", transform=plan(task))
    with planned(task, dataset) as loader:
        yield loader


def plan(task: Task) -> RandomResizedCrop:
    """The plan of a task."""
    memory, _, by = task.how.partition(" ")
    return RandomResizedCrop(
        SIZE, flip=0.5, channels_last=memory == "last", region_decode=by != "whole"
    )


@contextmanager
def planned(task: Task, dataset: Any) -> Iterator[Iterable[Batch]]:
    """A loader over images that a plan of `task` makes."""
    last = task.how.startswith("last")
    with open_readers(
        "thread",
        dataset,
        task.workers,
        batch_size=task.batch,
        shuffle=True,
        memory_format=torch.channels_last if last else torch.contiguous_format,
    ) as loader:
        yield loader
