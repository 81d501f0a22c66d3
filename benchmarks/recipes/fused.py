"""Files through fastload's fused plan: header, box, scaled decode, resize and flip in one step.

Batches are channels-last in memory, as FFCV's and SPDL's; torch's and DALI's are planes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from benchmarks._measure import open_loader
from benchmarks.recipes import SIZE, Batch, Task
from fastload.datasets import ImageFileList
from fastload.image import RandomResizedCrop


@contextmanager
def opened(task: Task) -> Iterator[Iterable[Batch]]:
    plan = RandomResizedCrop(SIZE, flip=0.5, channels_last=True)
    dataset = ImageFileList(task.source / "filelist.txt", transform=plan)
    with open_loader(
        "fastload",
        dataset,
        workers=task.workers,
        batch_size=task.batch,
        shuffle=True,
        memory_format=torch.channels_last,
    ) as loader:
        yield loader
