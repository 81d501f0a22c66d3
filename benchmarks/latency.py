"""Promises:
- Reads that wait run at 0.9 of workers / latency, for up to 64 workers.
- The first batch comes within 1.2 x ceil(batch / workers) reads + 10 ms.

Reads that wait 20 ms, as from a network file system: N workers are to have N reads under way, from the start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Literal

import torch

from benchmarks._measure import SlowDataset, open_loader, run_epochs
from benchmarks._report import Aim, Figures, Results, Row, label, row
from benchmarks._run import Case

TITLE = "latency: simulated reads of 20 ms, batches of 64; one epoch from iter(), starting the workers included"
REPEATS = 3

BATCH = 64
READ_S = 0.020
Kind = Literal["fastload", "torch", "bare"]
LOADERS: list[tuple[Kind, int]] = [
    *(("fastload", workers) for workers in (1, 2, 4, 8, 16, 32, 64)),
    ("torch", 2),
    ("torch", 8),
    ("bare", 32),
    ("bare", 64),
]


def bare_threads(reads: SlowDataset, workers: int) -> Iterator[torch.Tensor]:
    """What the machine itself can do: threads that read one after another, and nothing that bounds them."""
    with ThreadPoolExecutor(workers) as pool:
        done = pool.map(reads.__getitem__, range(len(reads)))
        while batch := list(islice(done, BATCH)):
            yield torch.tensor(batch)


def cases(*, smoke: bool) -> list[Case]:
    # As many samples as an ideal loader would read in 2.6 s, in each case.
    return [
        Case(
            _name(kind, workers),
            {
                "kind": kind,
                "workers": workers,
                "length": BATCH if smoke else 2 * BATCH * workers,
                "read_s": 0.001 if smoke else READ_S,
            },
        )
        for kind, workers in LOADERS
        if not smoke or workers in (1, 2, 32)
    ]


def measure(*, kind: Kind, workers: int, length: int, read_s: float) -> Figures:
    reads = SlowDataset(length, seconds=read_s)
    if kind == "bare":
        (epoch,) = run_epochs(bare_threads(reads, workers), count=1, indices=range(length))
    else:
        with open_loader(kind, reads, workers=workers, batch_size=BATCH) as loader:
            (epoch,) = run_epochs(loader, count=1, indices=range(length))
    return {
        "rate": epoch.samples / epoch.seconds,
        "ideal_rate": workers / read_s,
        "first_batch_s": epoch.first_batch_s,
        "allowed_s": 1.2 * math.ceil(BATCH / workers) * read_s + 0.010,
    }


def rows(results: Results) -> list[Row]:
    loaders = [(kind, workers) for kind, workers in LOADERS if _name(kind, workers) in results]
    first = "1.2 x ceil(64 / workers) reads + 10 ms"
    found = []
    for key, what, unit, against, reference, aim in (
        ("rate", "rate", "samples/s", "ideal_rate", "workers / latency", Aim(">=", 0.9)),
        ("first_batch_s", "first batch", "s", "allowed_s", first, Aim("<=", 1)),
    ):
        for kind, workers in loaders:
            found.append(
                row(
                    results,
                    _name(kind, workers),
                    key,
                    name=f"{what}: {_name(kind, workers)}",
                    unit=unit,
                    against=against,
                    reference=reference,
                    aim=aim if kind == "fastload" else None,
                )
            )
    return found


def _name(kind: Kind, workers: int) -> str:
    return f"{workers} bare threads" if kind == "bare" else label(kind, workers)
