"""Promise: With a simulated share of the GIL, the rate of 1 to 64 readers of each kind is measured on any machine.

Cores are SIMULATED. A sample takes 20 ms, in 8 pieces. In each it holds the GIL for its share, in calls of C that do
not release it, and sleeps for the rest in place of code in C. What it holds begins with a spin. All readers together
may spin on a fifth of the real cores. Beyond that they sleep with the GIL held, as if each had a core of its own. What
the loaders cost is real: the CPU of all processes is measured, and a cell that the real cores bound is marked.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections import deque
from itertools import repeat
from time import perf_counter, sleep

import numpy as np
from torch.utils.data import Dataset, get_worker_info

from benchmarks._measure import READERS, in_turns, open_readers, steady
from benchmarks._report import Figures, Results, Row, row, spread
from benchmarks._run import Case
from fastload import threads_ok
from fastload._kit.cores import usable_cores
from fastload.bench.figures import BenchError
from fastload.measure.processes import cpu_seconds

TITLE = "scale: SIMULATED cores and shares of the GIL; samples of 20 ms, batches of 8, steady rate"
REPEATS = 3

SAMPLE_S, PIECES, BATCH = 0.020, 8, 8
SHARES, COUNTS = (5, 17, 50, 85), (1, 2, 4, 8, 16, 32, 64)
KINDS = ("none", "thread", "process", "spread", "torch")
SPUN, BUSY = 0.2, 0.6
"""Shares of the real cores: on which samples spin at most, and above which a cell is marked."""
TURNS = 10_000
TIMER_SLACK = 29  # prctl(PR_SET_TIMERSLACK), for all threads and processes that start later

_hold = ctypes.PyDLL(None).usleep  # sleeps, and keeps the GIL
_spin = deque[None](maxlen=0).extend
_read = np.frombuffer(mmap.mmap(-1, 8 * max(COUNTS)), np.int64)
"""How many samples each reader has read. Forked processes share it. Batches come in bursts, and samples do not."""


class Shares(Dataset[int]):
    """Samples that hold the GIL for a share of their time, and spin for a part of that."""

    def __init__(self, share: float, spun: float) -> None:
        ways = {"spin": lambda: _spin(repeat(None, TURNS)), "hold": lambda: _hold(100)}
        took, held_s = in_turns(ways, 30), share * SAMPLE_S / PIECES
        late_s = took["hold"] - 100e-6
        self.turns = round(TURNS * held_s * spun / took["spin"])
        self.hold_us = max(0, round(1e6 * (held_s * (1 - spun) - late_s)))
        self.free_s = max(0.0, SAMPLE_S / PIECES - held_s - late_s)

    def __len__(self) -> int:
        return 1 << 18

    def __getitem__(self, index: int) -> int:
        self.read()
        worker = get_worker_info()
        _read[worker.id if worker else 0] += 1
        return index

    def read(self) -> float:
        """Read a sample. Return for how many seconds it held the GIL."""
        held_s = 0.0
        for _ in range(PIECES):
            began = perf_counter()
            _spin(repeat(None, self.turns))
            if self.hold_us:
                _hold(self.hold_us)
            held_s += perf_counter() - began
            sleep(self.free_s)
        return held_s


threads_ok(Shares)  # each reader counts in its own place


def cases(*, smoke: bool) -> list[Case]:
    shares, counts, seconds = (SHARES[1:2], COUNTS[:2], 0.05) if smoke else (SHARES, COUNTS, 1.0)
    return [
        Case(
            f"{share} % GIL, {readers} reader{'s' * (readers > 1)}",
            {"share": share, "readers": readers, "seconds": seconds},
        )
        for share in shares
        for readers in counts
    ]


def measure(*, share: int, readers: int, seconds: float) -> Figures:
    ctypes.CDLL(None).prctl(TIMER_SLACK, 1)
    held = readers * share / 100
    dataset = Shares(share / 100, min(1.0, SPUN * usable_cores() / held))
    began = perf_counter()
    held_s = sum(dataset.read() for _ in range(10))
    figures = {"held": 100 * held_s / (perf_counter() - began), "ideal": readers / SAMPLE_S}
    processes = min(readers, math.ceil(1.3 * held))
    for kind in KINDS:
        if (kind != "none" or readers == 1) and (kind != "spread" or processes < readers):
            figures |= _steady(kind, dataset, readers, processes, seconds)
    return figures


def _steady(kind: str, dataset: Shares, readers: int, processes: int, seconds: float) -> Figures:
    firsts: list[int] = []
    marks: list[tuple[float, float]] = []

    def count() -> int:
        marks.append((perf_counter(), cpu_seconds() or 0.0))
        return int(_read.sum())

    options = {} if kind in ("none", "thread") else {"multiprocessing_context": "fork"}
    options |= {"processes": processes, "batch_size": BATCH}
    with open_readers(kind, dataset, readers, **options) as loader:
        rate, _ = steady(
            loader,
            warm_s=seconds / 3,
            seconds=seconds,
            step=lambda batch: firsts.append(int(batch[0])),
            count=count,
        )
    if firsts != list(range(0, BATCH * len(firsts), BATCH)):
        raise BenchError(f"{kind}: the batches are not the samples in their order")
    (began, before), (ended, after) = marks
    return {kind: rate, f"{kind} cores": (after - before) / (ended - began) / usable_cores()}


def rows(results: Results) -> list[Row]:
    found = []
    for case, repeats in results.items():
        measured = next(filter(None, repeats), None)
        if case.endswith("reader"):
            found.append(row(results, case, "held", unit="%", name=f"{case}: GIL held (simulated)"))
        for kind in KINDS if measured is None else filter(measured.__contains__, KINDS):
            used = spread(results, case, f"{kind} cores")
            bound = ", BOUND BY REAL CORES" if used and used.median > BUSY else ""
            name, ideal = f"{case}: {READERS[kind]} (simulated{bound})", "readers / 20 ms"
            of = {"unit": "samples/s", "against": "ideal", "reference": ideal}
            found.append(row(results, case, kind, name=name, **of))
    return found
