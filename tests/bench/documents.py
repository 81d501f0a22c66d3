"""Documents of benchmarks that were not run, for tests of what is made of them: every figure is made up."""

from __future__ import annotations

import json
from typing import Any

from fastload.bench import report
from fastload.bench.figures import Outcome
from fastload.bench.plan import LoaderKind, SweepRun, Workload
from fastload.measure.figures import Figures
from fastload.measure.provenance import provenance

HOSTILE = "/data/<b>bold</b>&amp;\"double\" 'single'/list.txt"


def outcome(
    loader: LoaderKind, workers: int, rate: float, *, repeat: int = 0, **work: Any
) -> Outcome:
    options = {"file_list": HOSTILE, "batch_size": 10, "steps": 15, **work}
    run = SweepRun(workload=Workload(**options), loader=loader, workers=workers, repeat=repeat)
    stats = {"elapsed_s": 2.0, "occupancy": 0.375}
    figures = Figures(
        rate=rate,
        rank_rates=[rate],
        window_rates=[rate],
        first_batch_s=0.25,
        steady_s=2.0,
        wait_shares=[0.5],
        cpu_s_per_1000=3.0 if loader != "torch" else None,
        total_s=3.0,
        samples=150,
        unique_samples=140,
        loader_stats=None if loader == "torch" else stats,
        finding=None if loader == "torch" else f"The moon bounds {run.name} <at night> & by day.",
        cause=None if loader == "torch" else "moon",
    )
    return Outcome(
        run=run,
        figures=figures,
        error=None,
        peak_bytes=300 * 2**20,
        cached_share=1.0,
        others_share=0.01,
        messages="",
    )


def failure(loader: LoaderKind, workers: int, error: str = "no luck") -> Outcome:
    return Outcome(
        run=SweepRun(workload=Workload(file_list=HOSTILE), loader=loader, workers=workers),
        figures=None,
        error=error,
        peak_bytes=None,
        cached_share=None,
        others_share=None,
        messages="",
    )


def document(outcomes: list[Outcome], *, planned: int | None = None) -> dict[str, Any]:
    """What the JSON file holds."""
    origin = provenance(["fastload", "bench", "--file-list", HOSTILE])
    rows = report.summarise(outcomes)
    planned = len(outcomes) if planned is None else planned
    content = report.document(outcomes, rows, origin, planned=planned)
    read: dict[str, Any] = json.loads(json.dumps(content))
    return read


RACE = [
    *(outcome("serial", 0, 100.0 + repeat, repeat=repeat) for repeat in range(3)),
    *(outcome("thread", 1, 110.0 + repeat, repeat=repeat) for repeat in range(3)),
    *(outcome("thread", 2, 205.0 + repeat, repeat=repeat) for repeat in range(3)),
    *(outcome("torch", 2, 150.0 + repeat, repeat=repeat) for repeat in range(3)),
    *(outcome("plan", 2, 260.0 + repeat, repeat=repeat) for repeat in range(3)),
]
