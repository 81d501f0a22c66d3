"""Runs a graph: each task is a process with its descendants, a log and an exit code that counts.

One thread waits for the output of all tasks, and for the next time limit. The output of a task ends when all its
processes have ended: each runs under a guard, which ends with this process, too (`fastload.distributed.guard`).
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fastload.disk import locked_path
from fastload.distributed.execute import start_guarded
from fastload.distributed.guard import PARENT_DIED
from fastload.errors import FlowError
from fastload.flow.graph import PipelineGraph
from fastload.flow.record import (
    Record,
    State,
    before_run,
    folder_of,
    read,
    stamps,
    why_stale,
    write,
)
from fastload.flow.tasks import Task

GRACE_S = 10.0
"""Time for a task to end after SIGTERM, before the runner kills all its processes."""
_TAIL_LINES = 20
_STOPPED = "it was interrupted"


@dataclass(frozen=True)
class Outcome:
    """What became of the tasks of a graph.

    Attributes:
        states: of each task: "done", "fresh" (its last run holds), "failed", "blocked" (a task before it failed), or,
            with `dry_run`, "waiting" (it would run).
        reasons: why a task ran, would run, or failed.
        logs: the file with the output of each task that ran.
        seconds: of each task that ran.
    """

    states: dict[str, State]
    reasons: dict[str, str]
    logs: dict[str, str]
    seconds: dict[str, float]


def run(
    graph: PipelineGraph,
    *,
    resume: bool = False,
    dry_run: bool = False,
    max_parallel: int | None = None,
    echo: bool = True,
    only: Iterable[str] = (),
    say: Callable[[str], object] | None = None,
) -> Outcome:
    """Run the tasks of a graph, each once those before it have succeeded.

    Args:
        resume: leave out each task whose last run still holds: it succeeded, and neither arguments, script, inputs nor
            outputs have changed since, and no task before it runs.
        dry_run: only say what would run, and why.
        max_parallel: how many tasks may run at once; None: all that can.
        echo: print the tasks' output as it comes. It is in their logs in any case.
        only: run these tasks alone, whatever became of those before them.
        say: called with a line about each change of a task's state. None: printed on standard error.

    If a task fails, those that wait for it do not run, and all others do. If the call is interrupted, the tasks that
    run get SIGTERM, and are killed after 10 s. Logs lie in `.fastload-flow/GRAPH/TASK.log` in the graph's folder.

    Raises FlowError if a task failed, with its log; if the graph has a cycle; or if another process
    runs one of the tasks.
    """
    if max_parallel is not None and max_parallel < 1:
        raise ValueError(f"max_parallel must be 1 or more, got {max_parallel}")
    chosen = set(only) or set(graph.tasks)
    if unknown := chosen - set(graph.tasks):
        raise FlowError(
            f"graph {graph.name}: no task {sorted(unknown)[0]!r}; the tasks are {', '.join(graph.tasks)}"
        )
    one = _Run(graph, resume, dry_run, max_parallel or len(graph), echo, chosen, say or _print)
    one.run()
    outcome = one.outcome()
    if failed := [name for name, state in outcome.states.items() if state == "failed"]:
        raise FlowError(_failure(graph, outcome, failed))
    return outcome


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _failure(graph: PipelineGraph, outcome: Outcome, failed: list[str]) -> str:
    first = failed[0]
    blocked = [name for name, state in outcome.states.items() if state == "blocked"]
    text = f"graph {graph.name}: task {first} failed: {outcome.reasons[first]}"
    if len(failed) > 1:
        text += f"; so did {', '.join(failed[1:])}"
    if blocked:
        text += f"; not run: {', '.join(blocked)}"
    if first in outcome.logs:
        text += f". Its log: {outcome.logs[first]}"
    return text


@dataclass
class _Running:
    """A task under way, which holds its lock and its log open."""

    task: Task
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    record: Record
    held: ExitStack
    attempt: int = 0
    deadline: float | None = None
    """When it is to get `next_signal`, by the monotonic clock."""
    next_signal: int = signal.SIGTERM
    ended_for: str = ""
    """Why the runner ends it; "" if it does not."""

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout


@dataclass
class _Run:
    graph: PipelineGraph
    resume: bool
    dry_run: bool
    max_parallel: int
    echo: bool
    chosen: set[str]
    say: Callable[[str], object]
    base: Path = field(init=False)
    states: dict[str, State] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    running: dict[str, _Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base, self.folder = self.graph.base, folder_of(self.graph)
        self.states = dict.fromkeys((n for n in self.graph.tasks if n in self.chosen), "waiting")

    def outcome(self) -> Outcome:
        return Outcome(self.states, self.reasons, self.logs, self.seconds)

    def run(self) -> None:
        """Run all tasks. Nothing runs any more afterwards, however it ends."""
        sorter = self.graph.sorter()
        ready: list[str] = []
        with selectors.DefaultSelector() as self.selector:
            try:
                while sorter.is_active():
                    ready += sorter.get_ready()
                    ready.sort(key=list(self.graph.tasks).index)
                    while ready and len(self.running) < self.max_parallel:
                        name = ready.pop(0)
                        if not self.begin(name):
                            sorter.done(name)
                            break  # what waited for it may be ready now
                    else:
                        for name in self.wait():
                            sorter.done(name)
            except BaseException:
                self.stop()
                raise

    def begin(self, name: str) -> bool:
        """Start a task; return False if there is nothing to wait for."""
        if name not in self.chosen:
            return False
        task, before = self.graph.tasks[name], self.graph.after(name)
        states = {one: self.states[one] for one in before if one in self.chosen}
        if {"failed", "blocked"} & set(states.values()):
            self.change(name, "blocked", "a task before it failed")
            return False
        reason = ""
        if self.resume:
            runs = [one for one, state in states.items() if state in ("done", "waiting")]
            reason = (
                f"{runs[0]} {'would run' if self.dry_run else 'ran'}"
                if runs
                else why_stale(task, self.base, read(self.folder, name))
            )
            if not reason:
                self.change(name, "fresh")
                return False
        self.reasons[name] = reason
        if self.dry_run:
            shown = str(task).partition("Name: ")[2]
            self.say(f"{name}: would run{reason and f', as {reason}'}: {shown}")
            return False
        try:
            self.start(task)
        except (OSError, ValueError, FlowError) as error:
            self.fail(name, before_run(task, self.base), str(error))
            return False
        return True

    def start(self, task: Task) -> None:
        """Start a task for the first time in this run."""
        name = task.name
        with ExitStack() as stack:
            try:
                stack.enter_context(
                    locked_path(self.folder / f"{name}.lock", wait=False, needed=False)
                )
            except BlockingIOError:
                raise FlowError("another process runs it") from None
            record = before_run(task, self.base)
            record.state, record.began = "running", time.time()
            log = stack.enter_context((self.folder / f"{name}.log").open("wb"))
            self.logs[name] = log.name
            process = self.launch(task)
            write(self.folder, name, record)
            self.running[name] = _Running(task, process, log, record, stack.pop_all())
        self.watch(self.running[name])
        self.change(name, "running", self.reasons[name] and f"as {self.reasons[name]}")

    def launch(self, task: Task) -> subprocess.Popen[bytes]:
        """Start the processes of a task."""
        return start_guarded(
            task.argv(self.base),
            cwd=task.folder(self.base),
            env={**os.environ, "PYTHONUNBUFFERED": "1", **task.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def watch(self, one: _Running) -> None:
        """Wait for a task's output from now on, and for its time limit."""
        limit = one.task.time_limit_s
        one.deadline = None if limit is None else time.monotonic() + limit
        os.set_blocking(one.output.fileno(), False)
        self.selector.register(one.output, selectors.EVENT_READ, one)

    def wait(self) -> list[str]:
        """Wait until something happens; return the names of the tasks that have ended."""
        now = time.monotonic()
        deadlines = [one.deadline for one in self.running.values() if one.deadline is not None]
        timeout = max(0.0, min(deadlines) - now) if deadlines else None
        ended = []
        for key, _ in self.selector.select(timeout):
            one: _Running = key.data
            if content := one.output.read(2**16):
                one.log.write(content)
                one.log.flush()
                if self.echo:
                    self.show(content)
            elif content is not None and self.end(one):
                ended.append(one.task.name)
        for one in self.running.values():
            if one.deadline is not None and time.monotonic() >= one.deadline:
                self.tell_to_end(one, f"it ran for more than {one.task.time_limit_s:g} s")
        return ended

    def show(self, content: bytes) -> None:
        sys.stdout.write(content.decode(errors="replace"))
        sys.stdout.flush()

    def tell_to_end(self, one: _Running, reason: str) -> None:
        """Ask a task to end; if it was asked before, kill it."""
        one.process.send_signal(one.next_signal)
        one.deadline = time.monotonic() + GRACE_S if one.next_signal == signal.SIGTERM else None
        one.next_signal, one.ended_for = PARENT_DIED, one.ended_for or reason

    def end(self, one: _Running) -> bool:
        """Take note that a task's processes have ended; return False if it was started again."""
        self.selector.unregister(one.output)
        one.output.close()
        status = one.process.wait()
        name, task = one.task.name, one.task
        reason = one.ended_for or self.why_failed(task, status)
        if reason and not one.ended_for and one.attempt < task.retries:
            one.attempt += 1
            self.change(
                name, "running", f"{reason}; attempt {one.attempt + 1} of {task.retries + 1}"
            )
            one.process = self.launch(task)
            self.watch(one)
            return False
        one.held.close()
        del self.running[name]
        self.seconds[name] = time.time() - one.record.began
        if reason:
            self.fail(
                name, one.record, reason, "stopped" if one.ended_for == _STOPPED else "failed"
            )
            return True
        one.record.outputs = stamps(task.folder(self.base), task.outputs)
        one.record.state, one.record.ended = "done", time.time()
        write(self.folder, name, one.record)
        self.change(name, "done", f"in {self.seconds[name]:.1f} s")
        return True

    def why_failed(self, task: Task, status: int) -> str:
        """Return why a run with this exit code failed, or ""."""
        if status > 128 and (number := status - 128) in signal.valid_signals():
            return f"signal {signal.Signals(number).name} ended it"
        if status:
            return f"exit code {status}"
        made = stamps(task.folder(self.base), task.outputs)
        absent = [path for path, stamp in made.items() if stamp == "absent"]
        return f"it ended well, but did not make {absent[0]}" if absent else ""

    def fail(self, name: str, record: Record, reason: str, state: State = "failed") -> None:
        record.state, record.reason, record.ended = state, reason, time.time()
        write(self.folder, name, record)
        self.reasons[name] = reason
        if name in self.logs and not self.echo:
            lines = Path(self.logs[name]).read_text(errors="replace").splitlines()[-_TAIL_LINES:]
            self.say("\n".join(f"    {line}" for line in lines))
        self.change(name, state, reason)

    def stop(self) -> None:
        """End all tasks that run."""
        for one in self.running.values():
            self.tell_to_end(one, _STOPPED)
        while self.running:
            try:
                self.wait()
            except KeyboardInterrupt:  # once more: now
                for one in self.running.values():
                    self.tell_to_end(one, "")

    def change(self, name: str, state: State, about: str = "") -> None:
        """Note and tell the state of a task."""
        self.states[name] = state
        over = sum(found not in ("waiting", "running") for found in self.states.values())
        self.say(f"{name}: {state}{f', {about}' if about else ''} ({over} of {len(self.states)})")
