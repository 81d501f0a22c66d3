"""Promise: The hand-over of samples that are ready in memory is measured beside torch's persistent processes, as is
pure Python under the GIL.

Two threads stand beside two processes of torch, with the same arguments. A process sends each batch through shared
memory, which a thread need not. Pure Python is the case that threads lose: only one of them can run it at a time.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from benchmarks._measure import Kind, open_loader, rate, run_epochs
from benchmarks._report import Figures, Results, Row, label, row
from benchmarks._run import Case
from fastload.bench.figures import BenchError

TITLE = "handover: samples in memory, 2 workers, batches of 64, shuffled; second to fourth epoch"
REPEATS = 5

BATCH = 64
WORKERS = 2
KINDS: list[Kind] = ["fastload", "torch"]
Samples = Literal["float32[3, 224, 224]", "uint8[784]", "pure Python"]
LENGTHS: dict[Samples, int] = {
    "float32[3, 224, 224]": 1_280,
    "uint8[784]": 60_032,
    "pure Python": 12_800,
}
"""Samples of an epoch: whole batches, for about a second or two."""
KEPT_IMAGES = 64
"""Different images in memory, 37 MiB. Their samples are taken from them in turn."""
TURNS = 1_000
"""Passes of the loop in pure Python, about 50 us."""


class Rows(Dataset[Any]):
    """Samples that are there: a row of a tensor, and the index."""

    def __init__(self, rows: torch.Tensor, length: int) -> None:
        self.rows, self.length = rows, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index % len(self.rows)], index


class PurePython(Dataset[Any]):
    """Samples that a loop in Python computes, which holds the GIL: a number, and the index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        value = index
        for turn in range(TURNS):
            value = (value + turn) % 65_521
        return value, index


def cases(*, smoke: bool) -> list[Case]:
    return [
        Case(
            _name(samples, kind),
            {"samples": samples, "kind": kind, "length": 2 * BATCH if smoke else length},
        )
        for samples, length in LENGTHS.items()
        for kind in KINDS
    ]


def measure(*, samples: Samples, kind: Kind, length: int) -> Figures:
    torch.manual_seed(0)
    dataset = _dataset(samples, length)
    with open_loader(kind, dataset, workers=WORKERS, batch_size=BATCH, shuffle=True) as loader:
        for values, indices in loader:  # the first epoch, which starts the workers
            expected = torch.stack([torch.as_tensor(dataset[i][0]) for i in indices.tolist()])
            if not torch.equal(values, expected):
                raise BenchError("a batch has samples that are not those of its indices")
        return {"rate": rate(run_epochs(loader, count=3, indices=range(length)))}


def _dataset(samples: Samples, length: int) -> Dataset[Any]:
    if samples == "pure Python":
        return PurePython(length)
    if samples == "uint8[784]":
        return Rows(torch.randint(256, (length, 784), dtype=torch.uint8), length)
    return Rows(torch.rand(KEPT_IMAGES, 3, 224, 224), length)


def rows(results: Results) -> list[Row]:
    return [
        row(
            results,
            _name(samples, kind),
            "rate",
            unit="samples/s",
            against=(_name(samples, "torch"), "rate") if kind == "fastload" else None,
            reference=label("torch", WORKERS) if kind == "fastload" else None,
        )
        for samples in LENGTHS
        for kind in KINDS
    ]


def _name(samples: Samples, kind: Kind) -> str:
    return f"{samples}: {label(kind, WORKERS)}"
