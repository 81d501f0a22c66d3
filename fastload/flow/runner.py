"""Run a graph. Each task is a process with its descendants, a log and an exit code.

One thread waits for the output of all tasks, and for the next time limit. The output of a task ends when all its
processes have ended. Each task runs under a guard, which ends when this process ends (`fastload.distributed.guard`).
"""

from __future__ import annotations

import codecs
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fastload._kit.disk import locked_path, write_all
from fastload.distributed.execute import start_guarded
from fastload.distributed.guard import PARENT_DIED
from fastload.errors import FlowError
from fastload.flow.check import check_commands
from fastload.flow.graph import PipelineGraph
from fastload.flow.pipes import show, stdin_of
from fastload.flow.record import (
    Record,
    State,
    before_run,
    folder_of,
    read,
    stamps,
    why_stale,
    write,
    wrong_with,
)
from fastload.flow.tasks import Task

GRACE_S = 10.0
"""Seconds for a task to end after SIGTERM, before the runner kills all its processes."""
_TAIL_LINES = 20
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
    check: bool = True,
) -> Outcome:
    """Run the tasks of a graph, each after the tasks that it waits for have succeeded.

    Args:
        resume: skip each task whose last run is still valid. That run succeeded, and its arguments, script, inputs and
            outputs have not changed since. A task also runs if one that it waits for runs.
        dry_run: only print what would run, and why.
        max_parallel: maximum number of tasks at the same time. None: no limit.
        echo: print the output of the tasks at once. Their logs have it in any case.
        only: run only these tasks, whatever the states of the tasks that they wait for.
        say: called with a line about each change of a task's state. None: print it on standard error.
        check: first check that the tasks can be started, as far as that is known before any has run.

    If a task fails, the tasks that wait for it do not run, and all others do. If the call is interrupted, the running
    tasks get SIGTERM, and are killed after 10 s. Logs are in `.fastload-flow/GRAPH/TASK.log` in the graph's folder.

    Raise FlowError if a task failed, and name its log. Raise it also if the graph has a cycle or another process runs
    one of the tasks. If a task cannot be started, raise it before anything runs.
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
    one = _Run(graph, resume, dry_run, max_parallel or len(graph), echo, chosen, say or _print)
    one.run()
    outcome = one.outcome()
    if failed := [name for name, state in outcome.states.items() if state == "failed"]:
        raise FlowError(_failure(graph, outcome, failed))
    return outcome


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _why_stopped(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    if isinstance(error, BrokenPipeError):
        return "the program that reads its output has ended"
    return f"the runner failed: {error}"


def _failure(graph: PipelineGraph, outcome: Outcome, failed: list[str]) -> str:
    first = failed[0]
    blocked = [name for name, state in outcome.states.items() if state == "blocked"]
    text = f"graph {graph.name}: task {first} failed: {outcome.reasons[first]}"
    if len(failed) > 1:
        text += f"; also failed: {', '.join(failed[1:])}"
    if blocked:
        text += f"; not run: {', '.join(blocked)}"
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
    attempt: int = 1
    deadline: float | None = None
    """Time of the monotonic clock at which it gets SIGTERM or, after that, is killed."""
    ended_for: str = ""
    """Why it got SIGTERM in this attempt, or ""."""
    text: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

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
    reasons: dict[str, str] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    running: dict[str, _Running] = field(default_factory=dict)
    """Tasks that have not ended."""

    def __post_init__(self) -> None:
        self.base, self.folder = self.graph.base, folder_of(self.graph)
        self.states: dict[str, State] = {n: "waiting" for n in self.graph.tasks if n in self.chosen}

    def outcome(self) -> Outcome:
        return Outcome(self.states, self.reasons, self.logs, self.seconds)

    def run(self) -> None:
        """Run all tasks. When this returns or raises, no task is running."""
        sorter = self.graph.sorter()
        ready: list[str] = []
        with selectors.DefaultSelector() as self.selector, ExitStack() as self.opened:
            try:
                while sorter.is_active():
                    ready += sorter.get_ready()
                    ready.sort(key=list(self.graph.tasks).index)
                    while ready and len(self.running) < self.max_parallel:
                        name = ready.pop(0)
                        if not self.begin(name):
                            sorter.done(name)
                            break  # tasks that waited for it may be ready now
                    else:
                        for name in self.wait():
                            sorter.done(name)
            except BaseException as error:
                self.stop(_why_stopped(error))
                raise

    def begin(self, name: str) -> bool:
        """Start a task. Return False if it need not run or cannot run, so that nothing waits for it."""
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
                else why_stale(self.graph, task, read(self.folder, name))
            )
            if not reason:
                self.change(name, "fresh")
                return False
        self.reasons[name] = reason
        if self.dry_run:
            shown = str(task).partition("Name: ")[2]
            self.say(f"{name}: would run{reason and f', as {reason}'}: {shown}")
            return False
        return self.start(task)

    def start(self, task: Task) -> bool:
        """Start a task for the first time in this run. Return False if that failed."""
        name = task.name
        # Closed at the end of the run if not by `close`.
        held = self.opened.enter_context(ExitStack())
        try:
            held.enter_context(locked_path(self.folder / f"{name}.lock", wait=False, needed=False))
        except BlockingIOError:  # so the other process writes the record
            self.reasons[name] = "another process runs it"
            self.change(name, "failed", self.reasons[name])
            return False
        record = before_run(self.graph, task)
        record.state, record.began = "running", time.time()
        write(self.folder, name, record)
        log = held.enter_context((self.folder / f"{name}.log").open("wb", buffering=0))
        self.logs[name] = log.name
        if not self.launch(_Running(task, record, log, held)):
            return False
        self.change(name, "running", self.reasons[name] and f"as {self.reasons[name]}")
        return True

    def launch(self, one: _Running) -> bool:
        """Start the processes of a task, and wait for their output from now on. Return False if that failed."""
        task = one.task
        try:
            with stdin_of(task.stdin()) as stdin:
                one.process = start_guarded(
                    task.argv(self.base),
                    cwd=str(task.folder(self.base)),
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **task.env},
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
        except (OSError, ValueError, FlowError) as error:
            self.close(one, "failed", str(error))
            return False
        limit = task.time_limit_s
        one.deadline, one.ended_for = None if limit is None else time.monotonic() + limit, ""
        os.set_blocking(one.output.fileno(), False)
        self.selector.register(one.output, selectors.EVENT_READ, one)
        self.running[task.name] = one
        return True

    def wait(self) -> list[str]:
        """Wait for output or a time limit, and return the names of the tasks that have ended."""
        now = time.monotonic()
        deadlines = [one.deadline for one in self.running.values() if one.deadline is not None]
        timeout = max(0.0, min(deadlines) - now) if deadlines else None
        ended = []
        for key, _ in self.selector.select(timeout):
            one: _Running = key.data
            if content := one.output.read(_PIECE_BYTES):
                write_all(one.log.fileno(), one.log.name, content)
                if self.echo:
                    show(content, one.text)
            elif content is not None and self.end(one):
                ended.append(one.task.name)
        for one in self.running.values():
            if one.deadline is not None and time.monotonic() >= one.deadline:
                self.end_late(one)
        return ended

    def end_late(self, one: _Running) -> None:
        """Send SIGTERM to a task that ran too long. If it got one before, kill it."""
        if one.ended_for:
            one.process.send_signal(PARENT_DIED)
            one.deadline = None
        else:
            one.process.send_signal(signal.SIGTERM)
            one.deadline = time.monotonic() + GRACE_S
            one.ended_for = f"it ran for more than {one.task.time_limit_s:g} s"

    def end(self, one: _Running) -> bool:
        """Handle the end of a task's processes. Return False if the task was started again."""
        self.forget(one)
        name, tries = one.task.name, one.task.retries + 1
        reason = self.why_failed(one)
        if reason and one.attempt < tries:
            one.attempt += 1
            self.change(name, "running", f"{reason}; attempt {one.attempt} of {tries}")
            return not self.launch(one)
        self.close(one, "failed" if reason else "done", reason)
        return True

    def forget(self, one: _Running) -> None:
        """Stop waiting for a task's output. Do this first, so that a later exception leaves nothing to wait for."""
        del self.running[one.task.name]
        self.selector.unregister(one.output)
        one.output.close()

    def why_failed(self, one: _Running) -> str:
        """Return why a task that ended has failed, or "", and record its outputs."""
        status = one.process.wait()
        if one.ended_for:
            return one.ended_for
        if status > 128 and (number := status - 128) in signal.valid_signals():
            return f"signal {signal.Signals(number).name} ended it"
        if status:
            return f"exit code {status}"
        one.record.outputs = stamps(one.task.folder(self.base), one.task.outputs)
        wrong = wrong_with(one.record.outputs)
        return f"exit code 0, but its output {wrong}" if wrong else ""

    def close(self, one: _Running, state: State, reason: str) -> None:
        """Record the result of a task, then release its lock."""
        name, record = one.task.name, one.record
        record.state, record.reason, record.ended = state, reason, time.time()
        write(self.folder, name, record)
        one.held.close()
        self.seconds[name] = record.ended - record.began
        self.reasons[name] = reason or self.reasons[name]
        lines = Path(self.logs[name]).read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        if lines and state == "failed" and not self.echo:
            self.say("\n".join(f"    {line}" for line in lines))
        self.change(name, state, reason or f"in {self.seconds[name]:.1f} s")

    def stop(self, reason: str) -> None:
        """Send SIGTERM to all running tasks. Kill those that do not end in time, or at once after a later Ctrl-C."""
        deadline = time.monotonic() + GRACE_S
        try:
            for one in self.running.values():
                one.process.send_signal(signal.SIGTERM)
            while self.running and (left := deadline - time.monotonic()) > 0:
                for key, _ in self.selector.select(left):
                    content = key.data.output.read(_PIECE_BYTES)
                    if content:
                        with suppress(OSError):  # such as a full disk
                            write_all(key.data.log.fileno(), key.data.log.name, content)
                    elif content is not None:
                        self.stopped(key.data, reason)
        finally:
            for one in self.running.values():
                one.process.send_signal(PARENT_DIED)
            for one in list(self.running.values()):
                self.stopped(one, reason)

    def stopped(self, one: _Running, reason: str) -> None:
        """Record that the runner has ended a task, as far as the disk and standard error allow."""
        self.forget(one)
        one.process.wait()
        with suppress(OSError):
            self.close(one, "stopped", reason)

    def change(self, name: str, state: State, about: str = "") -> None:
        """Record and report the state of a task."""
        self.states[name] = state
        over = sum(found not in ("waiting", "running") for found in self.states.values())
        self.say(f"{name}: {state}{f', {about}' if about else ''} ({over} of {len(self.states)})")
