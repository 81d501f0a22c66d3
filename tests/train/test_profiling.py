"""Promises:
- A run writes one trace of the steps asked for. It has the stages of the worker threads and the loop's wait
  (`fastload::wait`).
- The trace lies in a file that TensorBoard's plugin looks for and that Perfetto reads. Another trace is for torch's
  memory view.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload import DataLoader
from fastload.train.profiling import StepProfiler


class Staged:
    """Samples with a stage of their own."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        with fastload.stage("decode"):
            return torch.full((16,), float(index))


def profiled(run_dir: Path, steps: int) -> tuple[Path | None, list[str]]:
    """Where the trace of a loop of so many steps is, and what was said."""
    said: list[str] = []
    # Each batch is claimed only when the one before is taken: the workers are busy while it is recorded.
    with (
        DataLoader(Staged(), 4, num_workers=2, prefetch_batches=1) as loader,
        StepProfiler(run_dir, say=said.append) as profiler,
    ):
        for _, batch in zip(range(steps), loader, strict=False):
            with torch.profiler.record_function("the step"):
                batch.sum()
            profiler.step()
    return profiler.path, said


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    # What Perfetto's reader of this form needs.
    assert isinstance(trace["traceEvents"], list)
    for event in trace["traceEvents"]:
        assert event["ph"] in "XiMsfCbe"
        assert event["ph"] != "X" or {"name", "ts", "dur", "pid", "tid"} <= event.keys()
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def named(trace: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in trace if event["name"] == name]


def test_the_steps_asked_for_are_there_and_the_stages_of_the_workers(tmp_path: Path) -> None:
    path, said = profiled(tmp_path / "new", 30)
    assert path
    memory = next(path.parent.glob("*_memory.*"))
    assert sorted([path, memory]) == sorted(path.parent.iterdir()), "and nothing unfinished"
    # What torch_tb_profiler's WORKER_PATTERN takes for a worker and the number of a span.
    assert re.fullmatch(r".+_\d+\.\d{13}\.pt\.trace\.json\.gz", path.name)
    assert path.stat().st_size < 200_000
    assert said[0].startswith(f"Memory of step 5: {memory} (")
    with gzip.open(memory, "rt") as file:
        events_of_memory = json.load(file)["traceEvents"]
    names = [event["name"] for event in events_of_memory]
    assert [name for name in names if "ProfilerStep" in name][:1] == ["ProfilerStep#4"]
    allocated = [event for event in events_of_memory if event["name"] == "[memory]"]
    assert allocated
    assert all({"Bytes", "Total Allocated"} <= event["args"].keys() for event in allocated)
    _, line = said
    assert line.startswith(f"Profile of steps 7 to 16: {path} (")
    assert float(line.rpartition("(")[2].split()[0]) == pytest.approx(
        path.stat().st_size / 1e6, abs=0.005
    )

    trace = events(path)
    assert len(named(trace, "the step")) == 10
    assert {e["name"] for e in trace if e["name"].startswith("ProfilerStep")} == {
        f"ProfilerStep#{k}" for k in range(6, 16)
    }, "numbered from 0 by torch"
    (loop,) = {event["tid"] for event in named(trace, "the step")}
    decoded = named(trace, "fastload.decode")
    assert decoded
    assert loop not in {event["tid"] for event in decoded}
    waits = named(trace, "enumerate(DataLoader)#fastload.DataLoader.__next__")
    assert len(waits) == 10
    assert {event["tid"] for event in waits} == {loop}
    inner = named(trace, "fastload::wait")
    assert len(inner) == 10
    assert {event["tid"] for event in inner} == {loop}
    assert not any("Call stack" in event.get("args", {}) for event in trace)


def test_a_loop_that_ends_early_is_said_to(tmp_path: Path) -> None:
    path, said = profiled(tmp_path, 9)
    assert path
    assert "steps 7 to 9 (the loop ended before step 16): " in said[-1]
    assert len(named(events(path), "the step")) == 3
    path, said = profiled(tmp_path / "none", 4)
    assert path is None
    assert said == [
        "No profile was recorded: the loop ended after step 4, and recording starts with step 7."
    ]


def test_an_error_of_the_loop_comes_out(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        StepProfiler(tmp_path, say=lambda line: None) as profiler,
    ):
        for _ in range(8):
            profiler.step()
        _ = 1 / 0
    assert not torch.autograd.profiler._is_profiler_enabled
