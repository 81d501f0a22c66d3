"""Promise: The dataset is not copied for threads. Memory and threads are measured for 1, 8 and 32 workers on a
million objects, beside fork and spawn.

A file list of a million strings is given to threads, to forked and to spawned processes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from benchmarks._measure import NotMeasuredError, open_loader, run_epochs
from benchmarks._report import Figures, Results, Row, label, row
from benchmarks._run import Case
from fastload.measure.processes import descendants, tree_memory

TITLE = (
    "memory: a dataset of a million strings, a quarter of them read in random order, batches of 64"
)
REPEATS = 3

BATCH = 64
WORKERS = (1, 8, 32)
Start = Literal["threads", "fork", "spawn"]
STARTS: list[Start] = ["threads", "fork", "spawn"]
SPAWNED_BYTES = 2**29
"""What to have free for each spawned process: an interpreter with torch, the strings, and those once more, pickled."""


class FileNames(Dataset[Any]):
    """Names as a dataset of image files keeps them: Python objects, whose pages are written when they are read."""

    def __init__(self, length: int) -> None:
        self.names = [f"train/n{k % 1000:08d}/n{k % 1000:08d}_{k}.JPEG" for k in range(length)]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[int, int]:
        name = self.names[index]
        return len(name), index


def cases(*, smoke: bool) -> list[Case]:
    return [
        Case(
            _name(start, workers),
            {"start": start, "workers": workers, "length": 1000 if smoke else 1_000_000},
            watch_memory=True,
        )
        for workers in WORKERS
        for start in STARTS
        if not smoke or workers == 1
    ]


def measure(*, start: Start, workers: int, length: int) -> Figures:
    if start == "spawn" and (free := available_bytes()) < workers * SPAWNED_BYTES:
        raise NotMeasuredError(
            f"{workers} spawned processes may take {workers * SPAWNED_BYTES / 2**30:.0f} GiB, "
            f"of which {free / 2**30:.0f} are free"
        )
    torch.manual_seed(0)
    indices = torch.randperm(length)[: length // 4].tolist()
    with open_loader(
        "fastload" if start == "threads" else "torch",
        FileNames(length),
        workers=workers,
        batch_size=BATCH,
        sampler=indices,
        multiprocessing_context=None if start == "threads" else start,
    ) as loader:
        (epoch,) = run_epochs(loader, count=1, indices=indices)
        # The workers are still there, and all of them have read.
        memory = tree_memory(os.getpid())
        tree = [os.getpid(), *descendants(os.getpid())]
        threads = sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in tree)
    if memory is None:
        raise NotMeasuredError(
            "memory is read from /proc/PID/smaps_rollup, which this system does not have"
        )
    return {
        "first_batch_s": epoch.first_batch_s,
        "peak_mib": memory / 2**20,
        "processes": len(tree),
        "threads": threads,
    }


def available_bytes() -> int:
    """The memory that this machine could give without swapping, or the container as far as it is limited."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    machine = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    if not limit.exists() or limit.read_text().strip() == "max":
        return machine
    return min(machine, int(limit.read_text()) - int(used.read_text()))


def rows(results: Results) -> list[Row]:
    found = []
    counts = [workers for workers in WORKERS if _name("threads", workers) in results]
    for key, what, unit in (("first_batch_s", "first batch", "s"), ("peak_mib", "peak", "MiB")):
        for workers in counts:
            ours, *theirs = (_name(start, workers) for start in STARTS)
            found += [
                row(results, ours, key, name=f"{what}: {ours}", unit=unit, against=(other, key))
                for other in theirs
            ]
            found += [
                row(results, other, key, name=f"{what}: {other}", unit=unit) for other in theirs
            ]
    for name in (_name(start, workers) for workers in counts for start in STARTS):
        processes = row(results, name, "processes", unit="").figure
        unit = f"in {processes.median:.0f} process(es)" if processes else ""
        found.append(row(results, name, "threads", name=f"threads: {name}", unit=unit))
    return found


def _name(start: Start, workers: int) -> str:
    return (
        label("fastload", workers) if start == "threads" else f"{label('torch', workers)}, {start}"
    )
