"""Runs one case in a fresh process. The same module is that process: `python -m benchmarks._run BENCHMARK OPTIONS`."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from benchmarks._measure import NotMeasuredError
from benchmarks._report import Figures, Results, Row
from fastload.measure.processes import MemoryReader

DEADLINE_S = 600.0
"""No case takes a tenth of it. One that takes it hangs, and is ended."""

_READING_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration of a benchmark."""

    name: str
    options: dict[str, Any]
    """The arguments of the benchmark's `measure`; JSON values."""
    watch_memory: bool = False
    """Raise its figure "peak_mib" to what is seen from outside while it runs."""


class Benchmark(Protocol):
    """What a module of this package offers.

    It may offer `prepare(*, smoke)` too, to make what is loaded where that takes memory, and `PACKAGES`, the names of
    packages whose versions belong to the figures.
    """

    TITLE: str
    """Heads the benchmark's rows: what is loaded, and how."""
    REPEATS: int

    def cases(self, *, smoke: bool) -> list[Case]:
        """The configurations, each to be run in a process of its own; tiny ones for `smoke`."""

    def measure(self, **options: Any) -> Figures:
        """Measure one configuration, in this process. Raises where what was delivered is wrong."""

    def rows(self, results: Results) -> list[Row]:
        """What the repeats show."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of running a case: figures, or why there are none, and whether that is a fault."""

    figures: Figures | None
    error: str | None = None
    failed: bool = False


def load(name: str) -> Benchmark:
    """The benchmark of that name. Raises ImportError where it needs a package that is not installed."""
    return cast(Benchmark, importlib.import_module(f"benchmarks.{name}"))


def execute(name: str, case: Case) -> Outcome:
    """Run a case of benchmark `name` in a fresh process, and end that process, whatever ends this call."""
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as messages:
        # A session of its own: Ctrl-C in the terminal reaches us alone, and one signal ends the children too.
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._run", name, json.dumps(case.options)],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=messages,
            start_new_session=True,
        )
        try:
            peak_bytes = _wait(child, watch_memory=case.watch_memory)
        except subprocess.TimeoutExpired:
            return Outcome(None, f"hung: ended after {DEADLINE_S:g} s", failed=True)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        messages.seek(0)
        if child.returncode != 0:
            return Outcome(
                None,
                f"ended with {child.returncode}:\n{messages.read().decode(errors='replace').strip()}",
                failed=True,
            )
        answer = json.loads(output.read())
    if "not_measured" in answer:
        return Outcome(None, answer["not_measured"])
    figures: Figures = answer["figures"]
    if case.watch_memory:
        figures["peak_mib"] = max(peak_bytes / 2**20, figures["peak_mib"])
    return Outcome(figures)


def _wait(child: subprocess.Popen[bytes], *, watch_memory: bool) -> int:
    """Wait for the child's end; return the largest memory seen of it and its children, or 0."""
    deadline = time.monotonic() + DEADLINE_S
    memory = MemoryReader([child.pid], interval_s=_READING_INTERVAL_S)
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            child.wait(min(memory.due_in_s(), left_s) if watch_memory else left_s)
            return memory.peak.allocated
        except subprocess.TimeoutExpired:
            if time.monotonic() >= deadline:
                raise
        memory.read()


def main(arguments: Sequence[str]) -> None:
    """Measure one case in this process; standard output has the answer, whatever else is printed goes to the error."""
    name, options = arguments
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        try:
            result: dict[str, Any] = {"figures": load(name).measure(**json.loads(options))}
        except NotMeasuredError as reason:
            result = {"not_measured": str(reason)}
        json.dump(result, answer)


if __name__ == "__main__":
    main(sys.argv[1:])
