"""Promise: The cost of the loader itself per sample is measured, with samples that are ready in memory."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks._measure import Kind, open_loader, run_epochs
from benchmarks._report import Aim, Figures, Results, Row, label, row
from benchmarks._run import Case

TITLE = "engine: seconds per sample in the loader, less those of plain indexing; float32[16] in memory, batches of 64"
REPEATS = 5

BATCH = 64
KINDS: list[Kind] = ["fastload", "torch"]
WORKERS = (0, 1, 2)


class Ready(Dataset[Any]):
    """Samples that cost nothing: one tensor, made beforehand, and the index."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.row = torch.arange(16, dtype=torch.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.row, index


def cases(*, smoke: bool) -> list[Case]:
    return [
        Case(
            label(kind, workers),
            {"kind": kind, "workers": workers, "length": 640 if smoke else 64_000},
        )
        for workers in WORKERS
        for kind in KINDS
    ]


def measure(*, kind: Kind, workers: int, length: int) -> Figures:
    """The cost is (seconds per sample of the loader) - (seconds per sample of a loop that indexes in the same order).

    So sampler, hand-off between threads and collate are in it, and the call of `__getitem__` is not.
    """
    torch.manual_seed(0)
    ready = Ready(length)
    with open_loader(kind, ready, workers=workers, batch_size=BATCH, shuffle=True) as loader:
        warm_up, *epochs = run_epochs(loader, count=4, indices=range(length))
    in_loader_s = sum(epoch.seconds for epoch in epochs) / len(epochs)
    order = torch.randperm(length).tolist()
    began = perf_counter()
    for index in order:
        ready[index]
    plain_s = perf_counter() - began
    return {
        "cost_us": (in_loader_s - plain_s) / length * 1e6,
        "plain_us": plain_s / length * 1e6,
        "first_batch_s": warm_up.first_batch_s,
    }


def rows(results: Results) -> list[Row]:
    return [
        row(
            results,
            label("fastload", workers),
            "cost_us",
            unit="us/sample",
            against=(label("torch", workers), "cost_us"),
            aim=Aim("<=", 10, of="figure"),
        )
        for workers in WORKERS
    ]
