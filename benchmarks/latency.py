"""Reads that wait 20 ms, as from a network file system: N workers are to have N reads under way, from the start."""

from __future__ import annotations

import math

from benchmarks._measure import Kind, open_loader, run_epochs
from benchmarks._report import Aim, Figures, Results, Row, label, row
from benchmarks._run import Case
from fastload.testing import SlowDataset

TITLE = "latency: simulated reads of 20 ms, batches of 64; one epoch from iter(), starting the workers included"
REPEATS = 3

BATCH = 64
READ_S = 0.020
LOADERS: list[tuple[Kind, int]] = [
    *(("fastload", workers) for workers in (1, 2, 4, 8, 16, 32, 64)),
    ("torch", 2),
    ("torch", 8),
]


def cases(*, smoke: bool) -> list[Case]:
    # Of so many samples that an ideal loader would take 2.6 s for each case.
    return [
        Case(
            label(kind, workers),
            {
                "kind": kind,
                "workers": workers,
                "length": BATCH if smoke else 2 * BATCH * workers,
                "read_s": 0.001 if smoke else READ_S,
            },
        )
        for kind, workers in LOADERS
        if not smoke or workers <= 2
    ]


def measure(*, kind: Kind, workers: int, length: int, read_s: float) -> Figures:
    reads = SlowDataset(length, seconds=read_s)
    with open_loader(kind, reads, workers=workers, batch_size=BATCH) as loader:
        (epoch,) = run_epochs(loader, count=1, indices=range(length))
    return {
        "rate": epoch.samples / epoch.seconds,
        "ideal_rate": workers / read_s,
        "first_batch_s": epoch.first_batch_s,
        "allowed_s": 1.2 * math.ceil(BATCH / workers) * read_s + 0.010,
    }


def rows(results: Results) -> list[Row]:
    loaders = [(kind, workers) for kind, workers in LOADERS if label(kind, workers) in results]
    rates = [
        row(
            results,
            label(kind, workers),
            "rate",
            name=f"rate: {label(kind, workers)}",
            unit="samples/s",
            against=(label(kind, workers), "ideal_rate"),
            reference="workers / latency",
            aim=Aim(">=", 0.9) if kind == "fastload" else None,
        )
        for kind, workers in loaders
    ]
    first_batches = [
        row(
            results,
            label(kind, workers),
            "first_batch_s",
            name=f"first batch: {label(kind, workers)}",
            unit="s",
            against=(label(kind, workers), "allowed_s"),
            reference="1.2 x ceil(64 / workers) reads + 10 ms",
            aim=Aim("<=", 1) if kind == "fastload" else None,
        )
        for kind, workers in loaders
    ]
    return rates + first_batches
