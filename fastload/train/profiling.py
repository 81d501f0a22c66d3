"""torch's profiler around some steps of a training loop: one trace, for TensorBoard and for Perfetto."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from fastload.sampler import integer
from fastload.telemetry import profiler_config

WAIT, WARMUP, ACTIVE = 5, 1, 10
"""The tutorial's schedule, in steps."""


def profile_steps(
    run_dir: Path,
    *,
    steps: int,
    wait: int = WAIT,
    warmup: int = WARMUP,
    active: int = ACTIVE,
    stacks: bool = False,
    say: Callable[[str], None] = print,
) -> StepProfiler:
    """Profile this process for `active` of its `steps` training steps: the CPU, and a GPU where there is one.

        with profile_steps(run_dir, steps=100) as profiler:
            for batch in loader:
                ...
                profiler.step()

    `wait` steps pass unobserved, `warmup` steps are observed and thrown away, then `active` are recorded. The
    loader's stages are spans `fastload.*`, those of the worker threads in rows of their own. The loop's wait for a
    batch is the span `fastload::wait`, and what TensorBoard calls DataLoader. The trace is saved once, into `run_dir`,
    in the form and under a name (`HOST_PID.TIME.pt.trace.json.gz`) that TensorBoard's profiler plugin and Perfetto
    (ui.perfetto.dev) open; `say` gets its path and size. Saving takes place in the last step recorded, and a second
    or more.

    The last waiting step is recorded for TensorBoard's memory view, into `HOST_PID_memory.TIME.pt...`: a
    profiler that sees the worker threads sees no allocations. If fewer than 2 steps wait there is none.

    Args:
        steps: how many steps the loop will make.
        stacks: record the Python stack of every operation too: many times the size.

    Raises ValueError where `steps` are too few for that, with what would do.
    """
    check_schedule(steps=steps, wait=wait, warmup=warmup, active=active)
    return StepProfiler(run_dir, wait, warmup, active, stacks=stacks, say=say)


def check_schedule(
    *, steps: int, wait: int = WAIT, warmup: int = WARMUP, active: int = ACTIVE
) -> None:
    """Raise ValueError where `steps` are too few for a profile by `profile_steps`, with what would do."""
    for name, value, least in (("wait", wait, 0), ("warmup", warmup, 1), ("active", active, 1)):
        if integer(name, value) < least:
            raise ValueError(f"{name} must be {least} or more, got {value}")
    needed = wait + warmup + active
    if integer("steps", steps) < needed:
        raise ValueError(
            f"a profile of {active} steps behind {wait} that wait and {warmup} to warm up takes {needed} steps, and "
            f"{steps} were asked for: {_what_would_do(steps, wait, warmup, needed)}"
        )


def _what_would_do(steps: int, wait: int, warmup: int, needed: int) -> str:
    if steps > wait + warmup:
        return f"ask for {needed} or more, or record {steps - wait - warmup}"
    if steps > 1:
        return f"ask for {needed} or more, or wait for 0, warm up for 1 and record {steps - 1}"
    return f"ask for {needed} or more"


class StepProfiler:
    """What `profile_steps` returns, and its `with` gives: call `step()` at the end of each training step."""

    def __init__(
        self,
        run_dir: Path,
        wait: int,
        warmup: int,
        active: int,
        *,
        stacks: bool,
        say: Callable[[str], None],
    ) -> None:
        self.path: Path | None = None
        """The trace, once it is saved."""
        self._run_dir = run_dir
        self._wait = wait
        self._first = wait + warmup  # steps before those that are recorded
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
            memory.record_steps = False  # the other one marks the steps, in both traces
            self._profiles.append(memory)  # first: it ends where the other begins
        steps: Any = profile(
            activities=_activities(),
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._save,
            record_shapes=True,
            with_stack=stacks,
            experimental_config=profiler_config(),
        )
        self._profiles.append(steps)

    def __enter__(self) -> Self:
        for each in self._profiles:
            each.__enter__()
        return self

    def step(self) -> None:
        """One more training step is over."""
        self._steps += 1
        for each in self._profiles:
            each.step()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for each in self._profiles:
            each.__exit__(kind, exc, tb)
        if self.path is None:
            self._say(
                f"There is no profile: the loop made {self._steps} steps, and the first one to be recorded was "
                f"step {self._first + 1}."
            )

    def _save_memory(self, finished: Any) -> None:
        if self._steps < self._wait:
            return  # the loop ended before the step did
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
        """Write the trace, which torch exports once; return its path."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        worker = f"{socket.gethostname()}_{os.getpid()}{kind}"
        name = f"{worker}.{time.time_ns() // 1_000_000}.pt.trace.json.gz"
        unfinished = (
            self._run_dir / f"unfinished-{os.getpid()}.json.gz"
        )  # TensorBoard looks for others
        finished.export_chrome_trace(str(unfinished))
        return unfinished.rename(self._run_dir / name)


def _activities() -> list[ProfilerActivity]:
    found = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        found.append(ProfilerActivity.CUDA)
    if torch.xpu.is_available():
        found.append(ProfilerActivity.XPU)
    return found
