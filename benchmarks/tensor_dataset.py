"""Promise: The rate of a TensorDataset is measured against plain indexing, and is never below torch's best.

A TensorDataset has the smallest samples there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset

from benchmarks._measure import Kind, open_loader, rate, run_epochs
from benchmarks._report import Aim, Figures, Results, Row, best, label, row
from benchmarks._run import Case
from fastload.bench.figures import BenchError

TITLE = "tensor_dataset: 60,000 x uint8[784] and labels, batches of 128, shuffled; second to sixth epoch"
REPEATS = 5

BATCH = 128
WIDTH = 784
PLAIN = "plain indexing"
OURS: list[tuple[Kind, int, bool]] = [
    ("fastload", 0, False),
    ("fastload", 1, False),
    ("fastload", 2, False),
    ("fastload", 0, True),
]
THEIRS: list[tuple[Kind, int, bool]] = [
    ("torch", 0, False),
    ("torch", 2, False),
    ("torch", 0, True),
]


class Plain:
    """The loop that needs no loader: a permuted index, and the tensors indexed with pieces of it."""

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor) -> None:
        self.pixels, self.labels = pixels, labels

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(len(self.labels))
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            yield self.pixels[rows], self.labels[rows]


def cases(*, smoke: bool) -> list[Case]:
    length = 600 if smoke else 60_000
    return [
        Case(PLAIN, {"kind": "plain", "workers": 0, "batch_sampler": False, "length": length}),
        *(
            Case(
                _name(*loader),
                dict(zip(("kind", "workers", "batch_sampler"), loader, strict=True), length=length),
            )
            for loader in OURS + THEIRS
        ),
    ]


def measure(*, kind: str, workers: int, batch_sampler: bool, length: int) -> Figures:
    torch.manual_seed(0)
    labels = torch.arange(length)
    pixels = (labels[:, None] * 31 + torch.arange(WIDTH)).to(torch.uint8)
    if kind == "plain":
        return _figures(Plain(pixels, labels), length)
    dataset = TensorDataset(pixels, labels)
    arguments: dict[str, Any] = {"batch_size": BATCH, "shuffle": True}
    if batch_sampler:
        # torch indexes the tensors once with all indices of a batch, where the "sample" is a whole batch.
        sampler = BatchSampler(RandomSampler(dataset), BATCH, drop_last=False)
        arguments = {"batch_size": None, "sampler": sampler}
    loader_kind: Kind = "fastload" if kind == "fastload" else "torch"
    with open_loader(loader_kind, dataset, workers=workers, **arguments) as loader:
        return _figures(loader, length)


def _figures(batches: Any, length: int) -> Figures:
    for pixels, labels in batches:
        # The pixels are a function of the label: no row may have come apart from its label.
        if not torch.equal(pixels[:, 0], (labels * 31).to(torch.uint8)):
            raise BenchError("a batch has pixels that are not those of its labels")
    return {"rate": rate(run_epochs(batches, count=5, indices=range(length)))}


def rows(results: Results) -> list[Row]:
    of = partial(row, results, key="rate", unit="samples/s")
    ours, theirs = ([_name(*loader) for loader in loaders] for loaders in (OURS, THEIRS))
    base = best(results, theirs, "rate")
    return [
        *(of(name, against=(PLAIN, "rate"), aim=Aim(">=", 0.8)) for name in ours),
        *(
            of(name, against=(base, "rate"), reference="torch's best", aim=Aim(">=", 1))
            for name in ours
        ),
        *map(of, (PLAIN, *theirs)),
    ]


def _name(kind: str, workers: int, batch_sampler: bool) -> str:
    return label(kind, workers) + (", BatchSampler as sampler" if batch_sampler else "")
