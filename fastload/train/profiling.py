"""torch's profiler for some steps of a training loop: one trace, for TensorBoard and Perfetto."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from fastload._kit.integers import integer
from fastload.telemetry import profiler_config

WAIT, WARMUP, ACTIVE = 5, 1, 10
"""The tutorial's schedule, in steps."""


def check_schedule(*, steps: int, wait: int, warmup: int, active: int) -> None:
    """Raise ValueError if `steps` is too small for a profile by `StepProfiler`, with the numbers that would fit."""
    for name, value, least in (("wait", wait, 0), ("warmup", warmup, 1), ("active", active, 1)):
        if integer(name, value) < least:
            raise ValueError(f"{name} must be {least} or more, got {value}")
    needed = wait + warmup + active
    if integer("steps", steps) < needed:
        raise ValueError(
            f"{steps} steps are too few for this profile. It needs {needed}: {wait} to skip, {warmup} to warm up and "
            f"{active} to record. {_what_would_do(steps, wait, warmup, needed)}"
        )


def _what_would_do(steps: int, wait: int, warmup: int, needed: int) -> str:
    if steps > wait + warmup:
        return f"Give {needed} or more, or record {steps - wait - warmup}"
    if steps > 1:
        return f"Give {needed} or more, or skip 0, warm up 1 and record {steps - 1}"
    return f"Give {needed} or more"


class StepProfiler:
    """Profiles this process for `active` of its `steps` training steps: the CPU, and a GPU if there is one.

        with StepProfiler(run_dir, steps=100) as profiler:
            for batch in loader:
                ...
                profiler.step()

    `wait` steps are skipped, `warmup` steps are observed and discarded, then `active` steps are recorded. The stages of
    the loader are spans `fastload.*`, with a row for each worker thread. The loop's wait for a batch is the span
    `fastload::wait`, which TensorBoard calls DataLoader.

    The trace is saved once, into `run_dir`, as `HOST_PID.TIME.pt.trace.json.gz`. TensorBoard's profiler plugin and
    Perfetto (ui.perfetto.dev) open it. `say` gets its path and size. Saving happens in the last recorded step. It takes
    a second or more.

    The last skipped step is recorded for TensorBoard's memory view, into `HOST_PID_memory.TIME.pt...`, because a
    profiler that sees worker threads sees no allocations. If `wait` is less than 2, this file is not written.

    Args:
        steps: number of steps of the loop.
        stacks: record the Python stack of every operation too. The trace becomes many times larger.

    Raises ValueError if `steps` is too small, with the numbers that would fit.

    Attributes:
        path: path of the trace, after it has been saved.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        steps: int,
        wait: int = WAIT,
        warmup: int = WARMUP,
        active: int = ACTIVE,
        stacks: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        check_schedule(steps=steps, wait=wait, warmup=warmup, active=active)
        self.path: Path | None = None
        self._run_dir = run_dir
        self._wait = wait
        self._first = wait + warmup  # number of steps before the recorded ones
        self._last = self._first + active
        self._say = say
        self._steps = 0
        self._profiles: list[Any] = []
        if wait >= 2:
            memory: Any = profile(
                activities=_activities(),
                schedule=schedule(wait=wait - 2, warmup=1, active=1, repeat=1),
                on_trace_ready=self._save_memory,
                record_shapes=True,
                profile_memory=True,
                with_stack=stacks,
            )
            memory.record_steps = False  # the other profiler marks the steps in both traces
            self._profiles.append(memory)  # first, because it ends before the other one begins
        recorded: Any = profile(
            activities=_activities(),
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._save,
            record_shapes=True,
            with_stack=stacks,
            experimental_config=profiler_config(),
        )
        self._profiles.append(recorded)

    def __enter__(self) -> Self:
        for each in self._profiles:
            each.__enter__()
        return self

    def step(self) -> None:
        """Count a finished training step."""
        self._steps += 1
        for each in self._profiles:
            each.step()

    def __exit__(self, *raised: Any) -> None:
        for each in self._profiles:
            each.__exit__(*raised)
        if self.path is None:
            self._say(
                f"No profile was recorded: the loop ended after {self._steps} steps, and recording starts with "
                f"step {self._first + 1}."
            )

    def _save_memory(self, finished: Any) -> None:
        if self._steps < self._wait:
            return  # the loop ended during the step
        path = self._export(finished, "_memory")
        self._say(f"Memory of step {self._steps}: {path} ({path.stat().st_size / 1e6:.2f} MB)")

    def _save(self, finished: Any) -> None:
        self.path = self._export(finished)
        last = min(self._steps, self._last)
        short = "" if last == self._last else f" (the loop ended before step {self._last})"
        self._say(
            f"Profile of steps {self._first + 1} to {last}{short}: {self.path} "
            f"({self.path.stat().st_size / 1e6:.2f} MB)"
        )

    def _export(self, finished: Any, kind: str = "") -> Path:
        """Write the trace, which torch can export only once, and return its path."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        worker = f"{socket.gethostname()}_{os.getpid()}{kind}"
        name = f"{worker}.{time.time_ns() // 1_000_000}.pt.trace.json.gz"
        # TensorBoard looks for other names.
        unfinished = self._run_dir / f"unfinished-{os.getpid()}.json.gz"
        finished.export_chrome_trace(str(unfinished))
        return unfinished.rename(self._run_dir / name)


def _activities() -> list[ProfilerActivity]:
    found = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        found.append(ProfilerActivity.CUDA)
    if torch.xpu.is_available():
        found.append(ProfilerActivity.XPU)
    return found
