"""Executes runs: prepares the page cache, has the ranks run, and says what else went on meanwhile."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastload.bench.figures import BenchError, Figures, Outcome, Part, together
from fastload.bench.plan import Run, sample_order, traced
from fastload.datasets import ImageFileList
from fastload.measure.fresh import run_fresh
from fastload.measure.page_cache import cached_share, prepare_cache
from fastload.measure.processes import machine_cpu_seconds


def files_of(runs: Sequence[Run]) -> tuple[int, list[str]]:
    """How many samples the runs' file list has, and the files that the longest of the runs reads, each once.

    The order of a shorter run is a prefix of the longest one's, so these files serve every run of one workload.
    """
    work = runs[0].workload
    listed = ImageFileList(work.file_list, base_dir=work.base_dir)
    longest = max(run.ordered_samples * run.ranks for run in runs)
    order = sample_order(len(listed), longest, seed=work.seed)
    files = [listed.locate(index) for index in dict.fromkeys(order)]
    for path in files:
        if not os.path.exists(path):
            raise BenchError(
                f"{path}: no such file; it is listed in {work.file_list}, whose relative paths start from "
                f"{listed.base_dir or '.'} (--base-dir names another folder)"
            )
    return len(listed), files


def execute(run: Run, *, files: Sequence[str], say: Callable[[str], None]) -> Outcome:
    """Measure one run in fresh processes; `say` gets the lines that it prints, as they come. In the main thread alone.

    Args:
        run: what to measure.
        files: the files that the run reads, to be brought into or out of the page cache first.
        say: called on this thread with each line.

    Whatever ends this call early, KeyboardInterrupt included, ends the processes and their children first.
    """
    prepare_cache(files, run.workload.cache)
    cached = cached_share(files)
    others = _Others()
    ended = run_fresh("fastload.bench.loop", run.to_json(), ranks=run.ranks, say=say)
    parts = [
        Part(**{**result, "figures": Figures(**result["figures"])}) for result in ended.results
    ]
    return Outcome(
        run=run,
        figures=None if ended.error else together(parts),
        error=ended.error,
        memory=ended.memory,
        cached_share=cached,
        others_share=others.share(),
        messages=ended.messages,
    )


def trace(run: Run, *, files: Sequence[str]) -> dict[str, Any]:
    """The timeline of a short run like `run` (see `timeline.Timeline`) as JSON values; BenchError if it fails.

    In the main thread alone; what ends this call early ends the process first.
    """
    prepare_cache(files, run.workload.cache)
    ended = run_fresh("fastload.bench.timeline", traced(run).to_json())
    if ended.error:
        raise BenchError(f"no timeline of {run.name}: {ended.error}")
    return ended.results[0]


class _Others:
    """What processes other than this one and its children take of the machine's cores, from now on."""

    def __init__(self) -> None:
        self._began = self._now()

    def share(self) -> float | None:
        """Share (0 to 1) of all cores' time since the beginning; None where the machine does not tell."""
        at, busy_s, ours_s = (
            now - then for now, then in zip(self._now(), self._began, strict=True)
        )
        if math.isnan(busy_s):
            return None
        return min(1.0, max(0.0, busy_s - ours_s) / (at * (os.cpu_count() or 1)))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        busy_s = machine_cpu_seconds()
        return time.perf_counter(), math.nan if busy_s is None else busy_s, sum(os.times()[:4])
