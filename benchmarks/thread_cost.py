"""Promise: The time to start and to stop 64 threads is measured, with samples that cost nothing."""

from __future__ import annotations

import threading
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

import fastload
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from benchmarks.engine import Ready
from fastload.bench.figures import BenchError

TITLE = "thread_cost: from iter() to the first batch of 64, and closing with work in flight; samples ready in memory"
REPEATS = 5

BATCH = 64
KINDS = ["fastload", "torch", "bare threads"]


def cases(*, smoke: bool) -> list[Case]:
    workers = 2 if smoke else 64
    return [Case(kind, {"kind": kind, "workers": workers}) for kind in KINDS]


def measure(*, kind: str, workers: int) -> Figures:
    if kind == "bare threads":
        return _bare_threads(workers)
    cls = fastload.DataLoader if kind == "fastload" else TorchDataLoader
    loader: TorchDataLoader[Any] = cls(Ready(100 * BATCH), BATCH, num_workers=workers)
    began = perf_counter()
    batches = iter(loader)
    _, indices = next(batches)
    arrived = perf_counter()
    if isinstance(loader, fastload.DataLoader):
        loader.close()
    del batches  # The last reference: torch's iterator ends its processes here, and waits for them.
    closed = perf_counter()
    if not torch.equal(indices, torch.arange(BATCH)):
        raise BenchError(f"the first batch is not the first {BATCH} samples, but {indices}")
    return {"first_batch_ms": (arrived - began) * 1000, "close_ms": (closed - arrived) * 1000}


def _bare_threads(workers: int) -> Figures:
    """The least that it could cost: threads that wait for one event, and end."""
    end = threading.Event()
    began = perf_counter()
    threads = [threading.Thread(target=end.wait, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    started = perf_counter()
    end.set()
    for thread in threads:
        thread.join()
    return {
        "first_batch_ms": (started - began) * 1000,
        "close_ms": (perf_counter() - started) * 1000,
    }


def rows(results: Results) -> list[Row]:
    found = []
    for key, what, aim in (
        ("first_batch_ms", "first batch", None),
        ("close_ms", "close", Aim("<=", 500, of="figure")),
    ):
        of = partial(row, results, key=key, unit="ms")
        found.append(of("fastload", name=f"{what}: fastload", against=("torch", key), aim=aim))
        found += [of(kind, name=f"{what}: {kind}") for kind in KINDS[1:]]
    return found
