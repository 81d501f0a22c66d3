"""What each thread does over a few batches: spans of torch's profiler, from a short run in a new process.

Runs that are measured have no profiler, and this run is not measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

import fastload
from fastload.bench.loop import open_run, use_one_thread
from fastload.bench.plan import TRACED_STEPS, Run
from fastload.measure.fresh import answer

MOST_SPANS = 3000
"""Later spans are cut off. With more of them, a page is slow to draw, and spans are narrower than a pixel."""
_LOADER, _LOOP = "fastload.", "loop."


@dataclass(frozen=True, slots=True)
class Span:
    """One thread in one stage, in seconds since the start of the first step shown."""

    stage: str
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    """The spans of one thread, sorted by start. A span within another comes after it."""

    thread: str
    spans: list[Span]


@dataclass(frozen=True, slots=True)
class Asked:
    """State of the queue when the loop asked for a batch."""

    at_s: float
    ready_share: float
    """Share (0 to 1) of the batches in flight that were ready."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The last steps of a short run, thread by thread: the loop first, then those of the loader by name."""

    run: str
    steps: int
    seconds: float
    lanes: list[Lane]
    queue: list[Asked]
    """Empty without worker threads."""
    cut: bool
    """True if spans at the end were left out because there are more than MOST_SPANS."""


def record(run: Run) -> Timeline:
    """Run all steps of `run` under the profiler, and return the timeline of its last `TRACED_STEPS`."""
    loader, _ = open_run(run)
    assert isinstance(loader, fastload.DataLoader)
    asked: list[
        tuple[float, float]
    ] = []  # for each step: its start, and the sum of the ready shares up to it
    # Start it before the first batch: its start takes seconds, in which threads would read ahead.
    with profile(
        activities=[ProfilerActivity.CPU],
        experimental_config=fastload.profiler_config(),
        acc_events=True,
    ) as profiler:
        batches = iter(loader)
        for number in range(1, run.workload.steps + 1):
            began = perf_counter()
            with record_function(f"{_LOOP}wait"):
                _held = next(batches)  # held until the next one, as in any loop
            asked.append((began, loader.stats().occupancy * number))
            with record_function(f"{_LOOP}step"):
                if run.workload.step_ms:
                    sleep(run.workload.step_ms / 1000)
        names = {thread.native_id: _thread_name(thread) for thread in threading.enumerate()}
    loader.close()
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as scratch:
        path = Path(scratch, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return _timeline(run, events, names, asked)


def _record(content: Any, *_: object) -> dict[str, Any]:
    use_one_thread()
    return asdict(record(Run.from_json(content)))


def _thread_name(thread: threading.Thread) -> str:
    if thread is threading.main_thread():
        return "loop"
    return thread.name.removeprefix("fastload-").replace("-", " ")


def _timeline(
    run: Run,
    events: list[dict[str, Any]],
    names: dict[int | None, str],
    asked: list[tuple[float, float]],
) -> Timeline:
    """Return the last steps in a Chrome trace (times in microseconds), for the threads in `names`."""
    spans = [
        event
        for event in events
        if event.get("ph") == "X"
        and event["name"].startswith((_LOADER, _LOOP))
        and event["tid"] in names
    ]
    waits = sorted(event["ts"] for event in spans if event["name"] == f"{_LOOP}wait")
    ends = [event["ts"] + event["dur"] for event in spans if event["name"].startswith(_LOOP)]
    first, last = waits[-TRACED_STEPS], max(ends)
    shown = sorted(
        (event for event in spans if event["ts"] < last and event["ts"] + event["dur"] > first),
        key=lambda event: (event["ts"], -event["dur"]),
    )
    cut = len(shown) > MOST_SPANS
    if cut:
        last = shown[MOST_SPANS]["ts"]
    lanes: dict[str, list[Span]] = defaultdict(list)
    for event in shown[:MOST_SPANS]:
        begin, end = max(event["ts"], first), min(event["ts"] + event["dur"], last)
        stage = event["name"].removeprefix(_LOADER).removeprefix(_LOOP)
        lanes[names[event["tid"]]].append(Span(stage, (begin - first) / 1e6, (end - first) / 1e6))
    began_s = asked[-TRACED_STEPS][0]
    return Timeline(
        run=run.name,
        steps=TRACED_STEPS,
        seconds=(last - first) / 1e6,
        lanes=[Lane(name, lanes[name]) for name in sorted(lanes, key=_place)],
        queue=[
            Asked(at_s - began_s, sums - before)
            for (_, before), (at_s, sums) in zip(
                asked[-TRACED_STEPS - 1 :], asked[-TRACED_STEPS:], strict=False
            )
            if at_s - began_s < (last - first) / 1e6
        ]
        if run.workers
        else [],
        cut=cut,
    )


def _place(name: str) -> tuple[bool, str, int]:
    """Return the sort key of a lane: the loop first, then threads of a kind by their number."""
    kind, _, number = name.rpartition(" ")
    return name != "loop", kind or name, int(number) if number.isdecimal() else 0


if __name__ == "__main__":
    sys.exit(answer(_record))
