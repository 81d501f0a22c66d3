"""Promises:
- The time to start and to stop 64 threads is measured, with samples that cost nothing.
- The first batch of 2 workers is measured for threads, forks and a fork server, beside torch's default, and the import.
"""

from __future__ import annotations

import subprocess
import sys
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
PROCESSES = {"kind": "fastload", "worker_method": "process"}
STARTS = {
    "2 threads": {"kind": "fastload"},
    "2 processes": PROCESSES,
    "2 processes of a fork server": PROCESSES | {"multiprocessing_context": "forkserver"},
    "torch's 2 processes": {"kind": "torch"},
}
IMPORT = "from time import perf_counter; t = perf_counter(); import NAME; print(perf_counter() - t)"


def cases(*, smoke: bool) -> list[Case]:
    workers = 2 if smoke else 64
    starts = [Case(name, {"workers": 2, "second": True, **way}) for name, way in STARTS.items()]
    return [*(Case(kind, {"kind": kind, "workers": workers}) for kind in KINDS), *starts]


def measure(*, kind: str, workers: int, second: bool = False, **options: Any) -> Figures:
    if kind == "bare threads":
        return _bare_threads(workers)
    if second:
        ways = "first loader", "second loader"
        found = {way: measure(kind=kind, workers=2, **options)["first_batch_ms"] for way in ways}
        python = [sys.executable, "-c", IMPORT.replace("NAME", kind)]
        return {**found, f"import {kind}": 1000 * float(subprocess.check_output(python))}
    cls = fastload.DataLoader if kind == "fastload" else TorchDataLoader
    loader: TorchDataLoader[Any] = cls(Ready(100 * BATCH), BATCH, num_workers=workers, **options)
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
    of = partial(row, results, unit="ms")
    for key in ("first loader", "second loader"):
        found += [of(name, key, name=f"{key}: {name}") for name in STARTS]
    keys = {"2 threads": "import fastload", "torch's 2 processes": "import torch"}
    found += [of(name, key, name=key) for name, key in keys.items()]
    return found
