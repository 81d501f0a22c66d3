"""torch's profiler for some steps of a training loop: one trace, for TensorBoard and Perfetto."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from torch.profiler import profile, schedule

from fastload.telemetry import profiler_config

WAIT, WARMUP, ACTIVE = 5, 1, 10
"""The tutorial's schedule, in steps."""
_BEFORE = WAIT + WARMUP
STEPS = _BEFORE + ACTIVE
"""Number of steps that a profile needs."""


class StepProfiler:
    """Profiles this process for some of its training steps: the CPU, and a GPU if there is one.

        with StepProfiler(run_dir) as profiler:
            for batch in loader:
                ...
                profiler.step()

    WAIT steps are skipped, WARMUP steps are observed and discarded, then ACTIVE steps are recorded. The stages of
    the loader are spans `fastload.*`, with a row for each worker thread. The loop's wait for a batch is the span
    `fastload::wait`, which TensorBoard calls DataLoader.

    The trace is saved once, into `run_dir`, as `HOST_PID.TIME.pt.trace.json.gz`. TensorBoard's profiler plugin and
    Perfetto (ui.perfetto.dev) open it. `say` gets its path and size. Saving happens in the last recorded step. It takes
    a second or more.

    The last skipped step is recorded for TensorBoard's memory view, into `HOST_PID_memory.TIME.pt...`, because a
    profiler that sees worker threads sees no allocations.

    Attributes:
        path: path of the trace, after it has been saved.
    """

    def __init__(self, run_dir: Path, *, say: Callable[[str], None] = print) -> None:
        self.path: Path | None = None
        self._run_dir = run_dir
        self._say = say
        self._steps = 0
        memory: Any = profile(
            schedule=schedule(wait=WAIT - 2, warmup=1, active=1, repeat=1),
            on_trace_ready=self._save_memory,
            record_shapes=True,
            profile_memory=True,
        )
        memory.record_steps = False  # the other profiler marks the steps in both traces
        recorded: Any = profile(
            schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
            on_trace_ready=self._save,
            record_shapes=True,
            experimental_config=profiler_config(),
        )
        self._profiles = [memory, recorded]  # in the order in which they end

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
                f"No profile was recorded: the loop ended after step {self._steps}, and recording starts with "
                f"step {_BEFORE + 1}."
            )

    def _save_memory(self, finished: Any) -> None:
        if self._steps < WAIT:
            return  # the loop ended during the step
        path = self._export(finished, "_memory")
        self._say(f"Memory of step {self._steps}: {path} ({path.stat().st_size / 1e6:.2f} MB)")

    def _save(self, finished: Any) -> None:
        self.path = self._export(finished)
        last = min(self._steps, STEPS)
        short = "" if last == STEPS else f" (the loop ended before step {STEPS})"
        self._say(
            f"Profile of steps {_BEFORE + 1} to {last}{short}: {self.path} "
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
