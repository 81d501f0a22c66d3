"""fastload's packed set, through its plan. Variants: the modes of `fastload set pack`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.recipes import PACKED_SIDE, QUALITY, Batch, Task
from benchmarks.recipes.fused import plan, planned
from fastload.datasets import PackedDataset


def opened(task: Task) -> Iterator[Iterable[Batch]]:
    with planned(task, PackedDataset(task.source / "set", transform=plan(task))) as loader:
        yield loader


def pack(root: Path, out: Path, variant: str) -> None:
    command = [sys.executable, "-m", "fastload", "set", "pack", root / "filelist.txt", out / "set"]
    options = ["--mode", variant]
    if variant != "encoded":
        options += ["--max-size", str(PACKED_SIDE)]
    if variant == "jpeg":
        options += ["--quality", str(QUALITY)]
    subprocess.run([*command, *options], check=True)
