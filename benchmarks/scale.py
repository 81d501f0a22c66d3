"""Promise: With a simulated share of the GIL, the number of workers at which threads stop growing is measured.

Simulated: a sample holds the GIL for its share of 2.3 ms, in 14 pieces, and sleeps for the rest, in place of code in C.
Processes need real cores for the pieces: on a machine with few cores, their rows say what these cores give.
"""

from __future__ import annotations

from time import perf_counter, process_time, sleep
from typing import Any

from torch.utils.data import Dataset

import fastload
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from fastload._kit.cores import usable_cores
from fastload.bench.figures import BenchError

TITLE = "scale: simulated GIL shares, samples of 2.3 ms, batches of 8, threads and worker processes"
REPEATS = 3

SAMPLE_S, PIECES, BATCH = 2.3e-3, 14, 8
SHARES = (5, 17, 50, 85)
WORKERS = (1, 2, 4, 8, 16, 32, 64)
MESSAGES = "a message"


class Shares(Dataset[int]):
    """Samples that hold the GIL for a share of their time, in percent."""

    def __init__(self, length: int, share: int) -> None:
        self.length = length
        self.held_s = SAMPLE_S * share / 100 / PIECES
        self.free_s = SAMPLE_S / PIECES - self.held_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        for _ in range(PIECES):
            ends = perf_counter() + self.held_s
            while perf_counter() < ends:
                pass
            sleep(self.free_s)
        return index


class Numbers(Dataset[int]):
    """Samples that cost nothing."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> int:
        return index


def cases(*, smoke: bool) -> list[Case]:
    counts = (1, 2) if smoke else WORKERS
    shares = SHARES[:1] if smoke else SHARES
    messages = {"method": "process", "share": 0, "workers": counts[-1], "seconds": 0.0}
    return [Case(MESSAGES, messages)] + [
        Case(
            _name(method, share, workers),
            {
                "method": method,
                "share": share,
                "workers": workers,
                "seconds": 0.1 if smoke else 1.5,
            },
        )
        for share in shares
        for method in ("thread", "process")
        for workers in counts
    ]


def measure(*, method: Any, share: int, workers: int, seconds: float) -> Figures:
    if not share:
        return _message(workers)
    cores = 1 if method == "thread" else usable_cores()
    # Samples at a time, at most. More of them would only make a run longer.
    expected = min(workers, cores * 100 / share)
    length = BATCH * max(4 * workers, int(seconds * expected / SAMPLE_S / BATCH))
    loader = fastload.DataLoader(
        Shares(length, share),
        BATCH,
        num_workers=workers,
        worker_method=method,
        persistent_workers=True,
        prefetch_batches=3 * workers,
    )
    with loader:
        iterator = iter(loader)
        for _ in range(workers):
            next(iterator)
        began = perf_counter()
        seen = sum(len(batch) for batch in iterator)
        return {"rate": seen / (perf_counter() - began)}


def _message(workers: int) -> Figures:
    """Return the CPU time of the loop's process for a ticket and its answer, less that of a loop without workers."""
    figures = []
    for number in (workers, 0):
        with fastload.DataLoader(
            Numbers(), 1, num_workers=number, worker_method="process", persistent_workers=number > 0
        ) as loader:
            list(loader)
            began = process_time()
            for expected, batch in enumerate(loader):
                if int(batch) != expected:
                    raise BenchError("the batches are not the samples in their order")
            figures.append((process_time() - began) / len(Numbers()))
    return {"message_us": 1e6 * (figures[0] - figures[1]), "loop_us": 1e6 * figures[1]}


def rows(results: Results) -> list[Row]:
    found = [
        row(results, MESSAGES, "message_us", unit="us", aim=Aim("<=", 20, of="figure")),
    ]
    for share in SHARES:
        for method in ("thread", "process"):
            for workers in WORKERS:
                name, one = _name(method, share, workers), _name(method, share, 1)
                if name in results:
                    found.append(
                        row(results, name, "rate", unit="samples/s", against=(one, "rate"))
                    )
    return found


def _name(method: str, share: int, workers: int) -> str:
    kind = {"thread": "threads", "process": "processes"}[method]
    return f"share {share} %, {workers} {kind} (simulated)"
