"""Run a graph. Each task is a process with its descendants, a log and an exit code.

One thread waits for the output of all tasks. The output of a task ends when all its processes have ended. Each task
runs under a guard, which ends when this process ends (`fastload._kit.guard`).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from tempfile import TemporaryFile
from typing import IO

from fastload._kit.disk import locked_path, write_all
from fastload._kit.guard import PARENT_DIED, held, start_guarded
from fastload.errors import FlowError
from fastload.flow.check import check_commands
from fastload.flow.graph import PipelineGraph
from fastload.flow.record import (
    UNREADABLE,
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
"""Seconds for a task to end after SIGTERM, before the runner kills all its processes."""
_PIECE_BYTES = 2**16


@dataclass(frozen=True)
class Outcome:
    """The result of running a graph.

    Attributes:
        states: state of each task: "done", "fresh" (its last run is still valid), "failed", "blocked" (a task that it
            waits for failed), or, with `dry_run`, "waiting" (it would run).
        reasons: why each task ran, would run, or failed.
        logs: file with the output of each task that ran.
        seconds: run time of each task that ran.

    Examples:
        >>> graph = fastload.flow.PipelineGraph("greetings")
        >>> task = graph.add_task(fastload.flow.Task("hello", command=["true"]))
        >>> fastload.flow.run(graph, dry_run=True, say=lambda line: None).states
        {'hello': 'waiting'}
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
    only: Iterable[str] = (),
    say: Callable[[str], object] | None = None,
    check: bool = True,
) -> Outcome:
    """Run the tasks of a graph, each after the tasks that it waits for have succeeded.

    Args:
        resume: skip each task whose last run is still valid. That run succeeded, and its arguments, script, inputs and
            outputs have not changed since. A task also runs if one that it waits for runs.
        dry_run: only print what would run, and why.
        max_parallel: maximum number of tasks at the same time. None: no limit.
        only: run only these tasks, whatever the states of the tasks that they wait for.
        say: called with a line about each change of a task's state. None: print it on standard error.
        check: first check that the tasks can be started, as far as that is known before any has run.
        graph: the tasks.

    If a task fails, the tasks that wait for it do not run, and all others do. If the call is interrupted, the running
    tasks get SIGTERM, and are killed after 10 s. The log `.fastload-flow/GRAPH/TASK.log` in the graph's folder gets the
    output of a task at once. Standard output gets it after the task has ended.

    Returns:
        The state of each task.

    Raises:
        FlowError: a task failed (the message names its log), the graph has a cycle, or another process runs one of the
            tasks. If a task cannot be started, nothing runs.

    Examples:
        >>> graph = fastload.flow.PipelineGraph("greetings")
        >>> task = graph.add_task(fastload.flow.Task("hello", command=["true"]))
        >>> fastload.flow.run(graph, say=lambda line: None).states
        {'hello': 'done'}
    """
    if max_parallel is not None and max_parallel < 1:
        raise ValueError(f"max_parallel must be 1 or more, got {max_parallel}")
    chosen = set(only) or set(graph.tasks)
    if unknown := chosen - set(graph.tasks):
        raise FlowError(
            f"graph {graph.name} has no task {sorted(unknown)[0]!r}. The tasks are {', '.join(graph.tasks)}"
        )
    if check:
        check_commands(graph, chosen)
    outcome = Outcome({name: "waiting" for name in graph.tasks if name in chosen}, {}, {}, {})
    _Run(graph, resume, dry_run, max_parallel or len(graph), say or _print, outcome).run()
    if "failed" in outcome.states.values():
        raise FlowError(_failure(graph, outcome))
    return outcome


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(log: str) -> None:
    """Print a log byte for byte, or as text if standard output accepts only text, as in a notebook."""
    sys.stdout.flush()
    with open(log, "rb") as file:
        if (buffer := getattr(sys.stdout, "buffer", None)) is None:
            sys.stdout.write(file.read().decode(errors="replace"))
        else:
            shutil.copyfileobj(file, buffer)
    sys.stdout.flush()


def _failure(graph: PipelineGraph, outcome: Outcome) -> str:
    first, *others = (name for name, state in outcome.states.items() if state == "failed")
    blocked = [name for name, state in outcome.states.items() if state == "blocked"]
    text = f"graph {graph.name}: task {first} failed: {outcome.reasons[first]}"
    for what, names in (("also failed", others), ("not run", blocked)):
        text += f"; {what}: {', '.join(names)}" if names else ""
    if first in outcome.logs and os.path.getsize(outcome.logs[first]):
        text += f". Its log: {outcome.logs[first]}"
    return text


@dataclass
class _Running:
    """A running task, which holds its lock and keeps its log open."""

    task: Task
    record: Record
    log: IO[bytes]
    held: ExitStack
    process: subprocess.Popen[bytes] = field(init=False)

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
    say: Callable[[str], object]
    outcome: Outcome
    running: dict[str, _Running] = field(default_factory=dict)
    """Tasks that have not ended."""
    stopped_for: str = ""
    """Why the tasks got SIGTERM, or ""."""

    def __post_init__(self) -> None:
        self.base, self.folder = self.graph.base, folder_of(self.graph)

    def run(self) -> None:
        """Run all tasks. When this returns or raises, no task is running."""
        left = dict.fromkeys(self.graph.order())
        with ExitStack() as self.opened:
            try:
                while left or self.running:
                    for name in [*left]:
                        before = self.graph.after(name)
                        waits = any(one in left or one in self.running for one in before)
                        if not waits and len(self.running) < self.max_parallel:
                            del left[name]
                            self.begin(name)
                    if self.running:
                        self.wait()
            except BaseException as error:
                interrupted = isinstance(error, KeyboardInterrupt)
                self.stop("it was interrupted" if interrupted else f"the runner failed: {error}")
                if isinstance(error, BrokenPipeError):
                    raise FlowError(
                        f"graph {self.graph.name}: the program that reads the output has ended. Send it to a file"
                    ) from error
                raise

    def begin(self, name: str) -> None:
        """Start a task, if it was chosen, need run and can run."""
        task, found = self.graph.tasks[name], self.outcome.states
        if name not in found:
            return
        states = {one: found[one] for one in self.graph.after(name) if one in found}
        if {"failed", "blocked"} & set(states.values()):
            self.change(name, "blocked", "a task before it failed")
            return
        reason = ""
        if self.resume:
            runs = [one for one, state in states.items() if state in ("done", "waiting")]
            reason = (
                f"{runs[0]} {'would run' if self.dry_run else 'ran'}"
                if runs
                else why_stale(self.graph, task, read(self.folder, name))
            )
            if not reason:
                self.change(name, "fresh")
                return
        self.outcome.reasons[name] = reason
        if self.dry_run:
            shown = str(task).partition("Name: ")[2]
            self.say(f"{name}: would run{reason and f', as {reason}'}: {shown}")
        else:
            self.start(task)

    def start(self, task: Task) -> None:
        """Start the processes of a task, and record it as failed if that fails."""
        name = task.name
        # Closed at the end of the run if not by `close`.
        kept = self.opened.enter_context(ExitStack())
        try:
            kept.enter_context(locked_path(self.folder / f"{name}.lock", wait=False, needed=False))
        except BlockingIOError:  # so the other process writes the record
            self.outcome.reasons[name] = reason = "another process runs it"
            self.change(name, "failed", reason)
            return
        record = before_run(self.graph, task)
        record.state, record.began = "running", time.time()
        write(self.folder, name, record)
        log = kept.enter_context((self.folder / f"{name}.log").open("wb", buffering=0))
        self.outcome.logs[name] = log.name
        one = _Running(task, record, log, kept)
        try:
            with TemporaryFile() as stdin, held():  # Ctrl-C waits until `stop` knows the process
                stdin.write(task.stdin())
                stdin.seek(0)
                one.process = start_guarded(
                    task.argv(self.base),
                    cwd=str(task.folder(self.base)),
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **task.env},
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
                self.running[name] = one
        except (OSError, ValueError, FlowError) as error:
            self.close(one, "failed", str(error))
            return
        self.change(
            name, "running", self.outcome.reasons[name] and f"as {self.outcome.reasons[name]}"
        )

    def wait(self, timeout: float | None = None) -> None:
        """Wait for output, and write it to the logs. Handle the end of the tasks that have ended."""
        outputs = {one.output.fileno(): one for one in self.running.values()}
        for number in wait(outputs, timeout):
            one = outputs[number]  # type: ignore[index]
            content = os.read(one.output.fileno(), _PIECE_BYTES)
            if not content:
                self.end(one)
                continue
            try:
                write_all(one.log.fileno(), one.log.name, content)
            except OSError:  # such as a full disk
                if not self.stopped_for:
                    raise

    def end(self, one: _Running) -> None:
        """Handle the end of a task's processes."""
        # First, so that a later exception leaves nothing to wait for.
        del self.running[one.task.name]
        one.output.close()
        status = one.process.wait()
        if self.stopped_for:
            with suppress(OSError):  # of the disk or standard error
                self.close(one, "stopped", self.stopped_for)
        else:
            reason = self.why_failed(one, status)
            self.close(one, "failed" if reason else "done", reason)

    def why_failed(self, one: _Running, status: int) -> str:
        """Return why a task that ended has failed, or "", and record its outputs."""
        if status > 128 and (number := status - 128) in signal.valid_signals():
            return f"signal {signal.Signals(number).name} ended it"
        if status:
            return f"exit code {status}"
        one.record.outputs = stamps(one.task.folder(self.base), one.task.outputs)
        wrong = [
            f"{path} {UNREADABLE[s]}" for path, s in one.record.outputs.items() if s in UNREADABLE
        ]
        return f"exit code 0, but its output {wrong[0]}" if wrong else ""

    def close(self, one: _Running, state: State, reason: str) -> None:
        """Record the result of a task, release its lock, then report it."""
        name, record = one.task.name, one.record
        record.state, record.reason, record.ended = state, reason, time.time()
        write(self.folder, name, record)
        one.held.close()
        seconds = self.outcome.seconds[name] = record.ended - record.began
        self.outcome.reasons[name] = reason or self.outcome.reasons[name]
        _show(one.log.name)
        self.change(name, state, reason or f"in {seconds:.1f} s")

    def stop(self, reason: str) -> None:
        """Send SIGTERM to all running tasks. Kill those that do not end in time, or at once after a later Ctrl-C."""
        self.stopped_for, deadline = reason, time.monotonic() + GRACE_S
        try:
            for one in self.running.values():
                one.process.send_signal(signal.SIGTERM)
            while self.running and (left := deadline - time.monotonic()) > 0:
                self.wait(left)
        finally:
            for one in self.running.values():
                one.process.send_signal(PARENT_DIED)
            for one in [*self.running.values()]:
                self.end(one)

    def change(self, name: str, state: State, about: str = "") -> None:
        """Record and report the state of a task."""
        states = self.outcome.states
        states[name] = state
        over = sum(found not in ("waiting", "running") for found in states.values())
        self.say(f"{name}: {state}{f', {about}' if about else ''} ({over} of {len(states)})")
