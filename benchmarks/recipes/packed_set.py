"""fastload's packed set, through the fused plan. Variants: the modes of `fastload pack`.

Batches are channels-last in memory, as FFCV's and SPDL's; torch's and DALI's are planes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks._measure import open_loader
from benchmarks.recipes import PACKED_SIDE, QUALITY, SIZE, Batch, Task
from fastload.datasets import PackedDataset
from fastload.image import RandomResizedCrop


@contextmanager
def opened(task: Task) -> Iterator[Iterable[Batch]]:
    plan = RandomResizedCrop(SIZE, flip=0.5, channels_last=True)
    dataset = PackedDataset(task.source / "set", transform=plan)
    with open_loader(
        "fastload",
        dataset,
        workers=task.workers,
        batch_size=task.batch,
        shuffle=True,
        memory_format=torch.channels_last,
    ) as loader:
        yield loader


def pack(root: Path, out: Path, variant: str) -> None:
    command = [sys.executable, "-m", "fastload", "pack", root / "filelist.txt", out / "set"]
    options = ["--mode", variant]
    if variant != "encoded":
        options += ["--max-size", str(PACKED_SIDE)]
    if variant == "jpeg":
        options += ["--quality", str(QUALITY)]
    subprocess.run([*command, *options], check=True)
