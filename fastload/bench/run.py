"""Execute runs: prepare the page cache, start the process, and measure the load of other processes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from fastload._kit.cores import usable_cores
from fastload.bench.figures import BenchError, Outcome
from fastload.bench.plan import SweepRun, sample_order
from fastload.datasets import ImageFileList
from fastload.measure.figures import Figures
from fastload.measure.fresh import run_fresh
from fastload.measure.page_cache import cached_share, prepare_cache
from fastload.telemetry import cores_busy_s


def files_of(runs: Sequence[SweepRun]) -> tuple[int, list[str]]:
    """Return the number of samples in the file list, and the files that the longest run reads, each once.

    The order of a shorter run is a prefix of the longest one's, so these are the files of every run of the workload.
    """
    work = runs[0].workload
    listed = ImageFileList(str(work.file_list), base_dir=work.base_dir)
    longest = max(run.ordered_samples for run in runs)
    order = sample_order(len(listed), longest, seed=work.seed)
    files = [listed.locate(index) for index in dict.fromkeys(order)]
    for path in files:
        if not os.path.exists(path):
            raise BenchError(
                f"{path} is listed in {work.file_list}, but does not exist. Relative paths in the list start from "
                f"{os.path.abspath(listed.base_dir)}. To change that, give --base-dir"
            )
    return len(listed), files


def execute(run: SweepRun, *, files: Sequence[str], say: Callable[[str], None]) -> Outcome:
    """Measure one run in a new process. Call this in the main thread only.

    Args:
        run: the run to measure.
        files: the files that the run reads. They are first read into the page cache, or dropped from it.
        say: called on this thread with each line that the run prints.

    If an exception ends this call early, KeyboardInterrupt included, it first kills the process and its children.
    """
    prepare_cache(files, run.workload.cache)
    cached = cached_share(files)
    began = clocks()
    ended = run_fresh("fastload.bench.loop", asdict(run), say=say)
    return Outcome(
        run=run,
        figures=None if ended.error else Figures(**ended.result),
        error=ended.error,
        peak_bytes=ended.peak_bytes,
        cached_share=cached,
        others_share=others_share(began),
        messages=ended.messages,
    )


def clocks() -> tuple[float, float]:
    """Return the time, and the seconds in which others have used this process's cores. Its children are not others."""
    return time.perf_counter(), cores_busy_s() - sum(os.times()[:4])


def others_share(began: tuple[float, float]) -> float | None:
    """Return the share (0 to 1) of the cores' time that others have used since `began`, or None if it is unknown."""
    seconds, others_s = (now - then for now, then in zip(clocks(), began, strict=True))
    if math.isnan(others_s):
        return None
    return min(1.0, max(0.0, others_s) / (seconds * usable_cores()))
