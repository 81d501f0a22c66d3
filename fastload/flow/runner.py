"""Run a graph. Each task is a process with its descendants, a log and an exit code.

This process starts the tasks, and threads wait for them. Or an executor does both, on workers that see the same files.
A task runs under a guard, which kills all its processes when its worker ends (`fastload._kit.guard`).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastload._kit.disk import locked_path
from fastload._kit.guard import PARENT_DIED, held, start_guarded
from fastload._kit.integers import positive
from fastload.errors import FlowError
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
    executor: Executor | None = None,
    say: Callable[[str], object] | None = None,
) -> Outcome:
    """Run the tasks of a graph, each after the tasks that it waits for have succeeded.

    Args:
        graph: the tasks.
        resume: skip each task whose last run is still valid. That run succeeded, and its arguments, script, inputs and
            outputs have not changed since. A task also runs if one that it waits for runs.
        dry_run: only print what would run, and why.
        max_parallel: maximum number of tasks at the same time. None: no limit.
        only: run only these tasks, whatever the states of the tasks that they wait for.
        executor: any `concurrent.futures.Executor`, such as a ProcessPoolExecutor, or one of Dask, Parsl or mpi4py for
            other machines. Its workers need this fastload, and must see the same files. None: threads of this process.
        say: called with a line about each change of a task's state. None: print it on standard error.

    If a task fails, the tasks that wait for it do not run, and all others do. If the call is interrupted, the running
    tasks get SIGTERM, and are killed after 10 s. Those that an `executor` runs are not ended: the call waits for them.
    The log `.fastload-flow/GRAPH/TASK.log` in the graph's folder gets the output of a task at once. It is printed once
    the task has ended.

    Returns:
        The state of each task.

    Raises:
        FlowError: a task failed (the message names its log), the graph has a cycle, or another process runs one of the
            tasks.

    Examples:
        >>> graph = fastload.flow.PipelineGraph("greetings")
        >>> task = graph.add_task(fastload.flow.Task("hello", command=["true"]))
        >>> fastload.flow.run(graph, say=lambda line: None).states
        {'hello': 'done'}
    """
    positive("max_parallel", max_parallel)
    chosen = set(only) or set(graph.tasks)
    if unknown := chosen - set(graph.tasks):
        raise FlowError(
            f"graph {graph.name} has no task {sorted(unknown)[0]!r}. The tasks are {', '.join(graph.tasks)}"
        )
    if not graph.base.is_dir():
        raise FlowError(f"graph {graph.name}: the folder {graph.base} does not exist")
    outcome = Outcome({name: "waiting" for name in graph.tasks if name in chosen}, {}, {}, {})
    say = say or partial(print, file=sys.stderr, flush=True)
    _Run(graph, resume, dry_run, max_parallel or len(graph), executor, say, outcome).run()
    if "failed" in outcome.states.values():
        raise FlowError(_failure(graph, outcome))
    return outcome


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


def _started(
    argv: list[str], folder: str, env: dict[str, str], log: str
) -> subprocess.Popen[bytes]:
    """Start the guarded process of a task. Raise OSError or ValueError if that fails."""
    with open(log, "ab") as output:
        return start_guarded(
            argv,
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _status(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process, once it has ended."""
    try:
        return process.wait()
    except BaseException:  # such as Ctrl-C, which a terminal sends to workers too
        process.send_signal(PARENT_DIED)
        process.wait()
        raise


def _on_worker(*task: Any) -> int:
    """Run a task on a worker of an executor, and return its exit code."""
    return _status(_started(*task))


@dataclass
class _Running:
    """A running task, which holds its lock."""

    task: Task
    record: Record
    held: ExitStack


@dataclass
class _Run:
    graph: PipelineGraph
    resume: bool
    dry_run: bool
    max_parallel: int
    executor: Executor | None
    say: Callable[[str], object]
    outcome: Outcome
    running: dict[Future[int], _Running] = field(default_factory=dict)
    """Tasks that have not ended."""
    stopped_for: str = ""
    """Why the tasks got SIGTERM, or ""."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Those of all tasks, if no executor was given."""

    def __post_init__(self) -> None:
        self.base, self.folder = self.graph.base, folder_of(self.graph)
        self.sorter = self.graph.sorter()

    def run(self) -> None:
        """Run all tasks. When this returns or raises, no task is running."""
        ready: list[str] = []
        with ExitStack() as self.opened, ThreadPoolExecutor(self.max_parallel or 1) as self.pool:
            try:
                while self.sorter.is_active():
                    ready += self.sorter.get_ready()
                    if not ready or len(self.running) == self.max_parallel:
                        self.wait()
                    elif not self.begin(name := ready.pop(0)):
                        self.sorter.done(name)
            except BaseException as error:
                interrupted = isinstance(error, KeyboardInterrupt)
                self.stop("it was interrupted" if interrupted else f"the runner failed: {error}")
                raise

    def begin(self, name: str) -> bool:
        """Start a task, if it was chosen, need run and can run. Return True if it runs."""
        task, found = self.graph.tasks[name], self.outcome.states
        if name not in found:
            return False
        states = {one: found[one] for one in self.graph.after(name) if one in found}
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
        self.outcome.reasons[name] = reason
        if self.dry_run:
            shown = str(task).partition("Name: ")[2]
            self.say(f"{name}: would run{reason and f', as {reason}'}: {shown}")
            return False
        return self.start(task)

    def start(self, task: Task) -> bool:
        """Give a task to the executor. Return False, and record it as failed, if that fails."""
        name = task.name
        # Closed at the end of the run if not by `close`.
        kept = self.opened.enter_context(ExitStack())
        try:
            kept.enter_context(locked_path(self.folder / f"{name}.lock", wait=False, needed=False))
        except BlockingIOError:  # so the other process writes the record
            self.outcome.reasons[name] = reason = "another process runs it"
            self.change(name, "failed", reason)
            return False
        record = before_run(self.graph, task)
        record.state, record.began = "running", time.time()
        write(self.folder, name, record)
        log = self.outcome.logs[name] = str(self.folder / f"{name}.log")
        one = _Running(task, record, kept)
        try:
            open(log, "wb").close()
            argv, folder = task.argv(self.base), str(task.folder(self.base))
            made = (argv, folder, task.env, log)
            if self.executor is None:
                with held():  # Ctrl-C waits until `stop` knows the process
                    self.processes.append(_started(*made))
                    self.running[self.pool.submit(_status, self.processes[-1])] = one
            else:
                self.running[self.executor.submit(_on_worker, *made)] = one
        except (OSError, ValueError, RuntimeError) as error:
            self.close(one, "failed", str(error))
            return False
        reason = self.outcome.reasons[name]
        self.change(name, "running", reason and f"as {reason}")
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Wait until a task has ended, and handle the end of all that have."""
        for future in wait(self.running, timeout, FIRST_COMPLETED).done:
            self.end(future)

    def end(self, future: Future[int]) -> None:
        """Handle the end of a task."""
        # First, so that a later exception leaves nothing to wait for.
        one = self.running.pop(future)
        if self.stopped_for:
            with suppress(OSError):  # of the disk or standard error
                self.close(one, "stopped", self.stopped_for)
        else:
            reason = self.why_failed(one, future)
            self.close(one, "failed" if reason else "done", reason)
            self.sorter.done(one.task.name)

    def why_failed(self, one: _Running, future: Future[int]) -> str:
        """Return why a task that ended has failed, or "", and record its outputs."""
        if error := future.exception():  # the task could not start, or its worker has died
            return str(error) or repr(error)
        if (number := (status := future.result()) - 128) in signal.valid_signals():
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
        _show(self.outcome.logs[name])
        self.change(name, state, reason or f"in {seconds:.1f} s")

    def stop(self, reason: str) -> None:
        """Send SIGTERM to all running tasks. Kill those that do not end in time, or at once after a later Ctrl-C.

        Drop the tasks that another executor has not begun, and wait for the others.
        """
        self.stopped_for, deadline = reason, time.monotonic() + GRACE_S
        try:
            self.send(signal.SIGTERM)
            # Not a task of this process: it runs, even if no thread waits for it yet.
            for future in [*self.running] if self.executor else ():
                if future.cancel():
                    self.end(future)
            while self.running and (left := deadline - time.monotonic()) > 0:
                self.wait(left)
        finally:
            self.send(PARENT_DIED)
            while self.running:
                self.wait()

    def send(self, number: int) -> None:
        """Send a signal to the tasks that are processes of this one."""
        for process in self.processes:
            process.send_signal(number)

    def change(self, name: str, state: State, about: str = "") -> None:
        """Record and report the state of a task."""
        states = self.outcome.states
        states[name] = state
        over = sum(found not in ("waiting", "running") for found in states.values())
        self.say(f"{name}: {state}{f', {about}' if about else ''} ({over} of {len(states)})")
