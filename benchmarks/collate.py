"""Promise: A slow `collate_fn` is no bottleneck: several batches are read and collated at once.

The `collate_fn` takes as long as reading its batch.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from benchmarks._measure import Kind, SlowDataset, open_loader, run_epochs
from benchmarks._report import Aim, Figures, Results, Row, label, row
from benchmarks._run import Case

TITLE = "collate: simulated reads of 5 ms, a collate_fn that waits as long as the batch's; 4 workers, batches of 16"
REPEATS = 3

BATCH = 16
WORKERS = 4
READ_S = 0.005
IDEAL = "workers / (read + collate)"
KINDS: list[Kind] = ["fastload", "torch"]


class SlowCollate:
    """int64[B] of the indices, after a simulated `seconds` per sample in which others can run."""

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        time.sleep(self.seconds * len(samples))
        return torch.tensor(samples)


def cases(*, smoke: bool) -> list[Case]:
    options = {"batches": 8, "read_s": 0.0005} if smoke else {"batches": 64, "read_s": READ_S}
    return [Case(label(kind, WORKERS), {"kind": kind, **options}) for kind in KINDS]


def measure(*, kind: Kind, batches: int, read_s: float) -> Figures:
    length = batches * BATCH
    with open_loader(
        kind,
        SlowDataset(length, seconds=read_s),
        workers=WORKERS,
        batch_size=BATCH,
        collate_fn=SlowCollate(seconds=read_s),
    ) as loader:
        (epoch,) = run_epochs(loader, count=1, indices=range(length))
    return {"rate": epoch.samples / epoch.seconds, "ideal_rate": WORKERS / (2 * read_s)}


def rows(results: Results) -> list[Row]:
    rate = partial(
        row, results, key="rate", unit="samples/s", against="ideal_rate", reference=IDEAL
    )
    ours, theirs = (label(kind, WORKERS) for kind in KINDS)
    return [rate(ours, aim=Aim(">=", 0.9)), rate(theirs)]
