"""Run one case in a fresh process, which runs this module."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from benchmarks._measure import NotMeasuredError
from benchmarks._report import Figures, Results, Row
from fastload.measure.fresh import answer, run_fresh

DEADLINE_S = 600.0
"""Seconds after which a case counts as hung, and is killed. No case takes a tenth of them."""


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration of a benchmark."""

    name: str
    options: dict[str, Any]
    """The arguments of the benchmark's `measure`; JSON values."""
    watch_memory: bool = False
    """Whether to measure its memory from outside too, for the figure "peak_mib"."""
    limit_s: float | None = None
    """Seconds after which it counts as hanging, and is killed. None: DEADLINE_S."""


class Benchmark(Protocol):
    """What each module of this package has.

    It may also have `prepare(*, smoke)`, which makes data before any case runs. `PACKAGES` and `machine()` name the
    packages and the values that stand beside the figures.
    """

    TITLE: str
    """Heading of the rows: what is loaded, and how."""
    REPEATS: int

    def cases(self, *, smoke: bool) -> list[Case]:
        """Return the configurations, tiny ones for `smoke`. Each runs in a process of its own."""

    def measure(self, **options: Any) -> Figures:
        """Measure one configuration in this process. Raise BenchError for wrong samples."""

    def rows(self, results: Results) -> list[Row]:
        """Return the rows of the table."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a case: figures, or why there are none, and whether that is a fault."""

    figures: Figures | None
    error: str | None = None
    failed: bool = False
    seconds: float = 0.0
    """What its process took as a whole."""


def load(name: str) -> Benchmark:
    """Return the benchmark of that name. Raise ImportError if it needs a package that is not installed."""
    own = Path(__file__).with_name(f"{name}.py").exists()
    module = importlib.import_module(f"benchmarks.{name if own else 'loaders'}")
    return cast(Benchmark, module if own else module.SECTIONS[name])


def execute(name: str, case: Case) -> Outcome:
    """Run a case of benchmark `name` in a fresh process, which ends with this call."""
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    try:
        ended = run_fresh(
            "benchmarks._run",
            {"name": name, "options": case.options},
            watch_memory=case.watch_memory,
            limit_s=case.limit_s or DEADLINE_S,
            environ=os.environ | {"PYTHONPATH": path},
        )
    except TimeoutError as hung:
        return Outcome(None, str(hung), failed=True)
    if ended.error is not None:
        message = f"ended with {ended.status}:\n{ended.messages or ended.error}"
        return Outcome(None, message, failed=True)
    if "not_measured" in ended.result:
        return Outcome(None, ended.result["not_measured"])
    figures: Figures = ended.result["figures"]
    if ended.peak_bytes is not None:
        figures["peak_mib"] = max(ended.peak_bytes / 2**20, figures["peak_mib"])
    return Outcome(figures)


def _measured(content: Any) -> dict[str, Any]:
    try:
        return {"figures": load(content["name"]).measure(**content["options"])}
    except NotMeasuredError as reason:
        return {"not_measured": str(reason)}


if __name__ == "__main__":
    sys.exit(answer(_measured))
