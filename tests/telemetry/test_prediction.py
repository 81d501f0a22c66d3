"""Promises:
- From what one kind of workers measured, the best kind is named: the loop itself, threads, or as few processes as free
  the GIL.
- Another kind is named only if it is worth a change, and none if too little was measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastload.telemetry import Stage, Stats
from fastload.telemetry.prediction import best_kind

FAST_S, SLOW_S = 1e-6, 1e-3


def stats(sample_s: float = SLOW_S, **figures: Any) -> Stats:
    """Return figures of 8 worker processes that read batches of ten samples, on 16 cores."""
    stages = {
        "sample": Stage("sample", 1_000 * sample_s, 1_000, sample_s, sample_s, sample_s),
        "collate": Stage("collate", 100 * FAST_S, 100, FAST_S, FAST_S, FAST_S),
    }
    given = {"workers": 8, "workers_asked": 8, "processes": 8, "worker_method": "process"}
    given |= {"cores": 16, "batches": 100, "gil_probes": 400, "gil_held": 4.0}
    given |= {"elapsed_s": 10.0, "busy_s": 80.0}
    return Stats(stages=stages, **{**given, **figures})


LOOP = {"workers": 0, "processes": 0, "worker_method": "", "gil_probes": 0, "gil_held": 0.0}


THREADS = {"processes": 0, "worker_method": "thread", "gil_held": 0.0}


@pytest.mark.parametrize(
    ("measured", "kind", "processes"),
    [
        (stats(gil_held=6.0, busy_s=20.0), "process", 2),
        (stats(**THREADS, gil_pressure=0.1), "process", 8),
        (stats(gil_held=0.17 * 8), "process", 2),
        (stats(gil_held=0.85 * 8), "process", 8),
        (stats(gil_held=4.9), "process", 8),  # 7 are not worth a change
        (stats(gil_held=1.7, processes=2), "process", 3),
        (stats(gil_held=1.7, processes=2, cores=2), "process", 2),
        (stats(gil_held=0.9, processes=1, workers=1, workers_asked=1), "process", 1),
        (stats(gil_held=0.06), "process", 1),
        (stats(gil_held=0.04), "thread", 0),
        (stats(gil=False, gil_probes=0, gil_held=0.0), "thread", 0),
        (stats(FAST_S), "none", 0),
        (stats(24.5e-6), "none", 0),
        (stats(26e-6), "process", 6),
        (stats(26e-6, core_wait_s=0.02), "none", 0),
        (stats(core_wait_s=9.0, sample_cpu_s=0.9), "process", 6),  # waits outside of samples, too
        # The loop waits for batches.
        (stats(gil_held=1.2, consumer_wait_s=2.0), "process", 8),
        (stats(gil_held=1.2, consumer_wait_s=2.0, cores=2), "process", 2),
        (stats(gil_held=1.2, consumer_wait_s=2.0, processes=2), "process", 8),
        (stats(gil_held=0.04, consumer_wait_s=2.0), "thread", 0),
        (stats(FAST_S, **LOOP), "none", 0),
        (stats(30e-6, **LOOP), "none", 0),  # not worth a change
        (stats(40e-6, **LOOP), "process", 8),
        (stats(40e-6, **{**LOOP, "cores": 2}), "process", 2),
    ],
)
def test_the_best_kind(measured: Stats, kind: str, processes: int) -> None:
    best = best_kind(measured)
    assert best is not None
    assert best[:2] == (kind, processes), best


def test_what_is_collated_or_pinned_counts() -> None:
    measured = stats(FAST_S)
    slow = Stage("pin", 1.0, 100, 0.01, 0.01, 0.01)
    for name in ("collate", "pin"):
        best = best_kind(replace(measured, stages={**measured.stages, name: slow}))
        assert best is not None
        assert best.kind == "process"


@pytest.mark.parametrize(
    "figures",
    [
        {"batches": 9},
        {"gil_probes": 39},
        {"cores": 0},
        {"worker_method": "thread", "processes": 0, "gil_pressure": 0.05},
    ],
)
def test_too_little_was_measured(figures: dict[str, Any]) -> None:
    assert best_kind(stats(**figures)) is None


def test_the_report_names_another_kind() -> None:
    def row(measured: Stats) -> str:
        lines = str(replace(measured, epoch=0, elapsed_s=9.0)).split("\n")
        return next((line for line in lines if line.startswith("other kind")), "")

    assert row(stats(gil_held=1.2)) == (
        "other kind     2 processes  8 busy workers hold the GIL for 120 % of the time, if threads may run your code"
    )
    assert row(stats(gil_held=7.0)) == ""
    assert "0 workers  the loop would read a batch in" in row(stats(FAST_S))
    assert "GILs in use           1.20  of 8 processes; 400 probes" in str(
        replace(stats(gil_held=1.2), epoch=0)
    )
