"""The record of a task's last run, `.fastload-flow/GRAPH/TASK.json`. It decides if the task must run again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fastload._kit.disk import locked_path, write_file
from fastload._kit.fingerprint import fingerprint
from fastload.flow.graph import PipelineGraph
from fastload.flow.tasks import Task

FOLDER = ".fastload-flow"
State = Literal["waiting", "running", "done", "fresh", "failed", "blocked", "stopped"]
UNREADABLE = {"absent": "is not there", "unreadable": "cannot be read"}
"""What is wrong with a path that has one of these instead of a fingerprint."""


@dataclass
class Record:
    """A run of a task.

    Attributes:
        state: "running", "done", "failed" or "stopped".
        began, ended: seconds since the epoch, or 0 if unknown.
        reason: why it failed, or "".
        identity, script: fingerprints of the arguments and of the script's content, before the run.
        before: for each task that it waits for, the start of that task's last run, which identifies the run.
        inputs, outputs: a fingerprint of each file or folder: inputs before the run, outputs after it.
    """

    state: State = "waiting"
    began: float = 0.0
    ended: float = 0.0
    reason: str = ""
    identity: str = ""
    script: str = ""
    before: dict[str, float] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)


def before_run(graph: PipelineGraph, task: Task) -> Record:
    """Return a record of everything that a run of the task would depend on now."""
    folder, records = task.folder(graph.base), folder_of(graph)
    return Record(
        identity=fingerprint(task.identity()),
        script="" if task.script is None else _of_content(folder / task.script),
        before={name: read(records, name).began for name in graph.after(task.name)},
        inputs=stamps(folder, task.inputs),
    )


def _of_content(path: Path) -> str:
    try:
        return fingerprint(path.read_bytes())
    except OSError:
        return "absent"


def stamps(folder: Path, paths: Iterable[str]) -> dict[str, str]:
    """Return a fingerprint for each path, of the sizes and times of a file or a folder's files, or "absent"."""
    return {path: _stamp(folder / path) for path in paths}


def _stamp(path: Path) -> str:
    try:
        path.stat()  # `exists()` hides errors
        return fingerprint(path, paths=True)
    except OSError as exc:
        missing = isinstance(exc, FileNotFoundError | NotADirectoryError)
        return "absent" if missing else "unreadable"


def why_stale(graph: PipelineGraph, task: Task, last: Record) -> str:
    """Return why the task has to run again, or "" if its last run is still valid."""
    if last.state == "waiting":
        return "it never ran"
    if last.state != "done":
        return f"its last run {'failed' if last.state == 'failed' else 'did not end'}"
    now = before_run(graph, task)
    ran = (one for one, began in now.before.items() if began != last.before.get(one))
    if name := next(ran, None):
        return f"{name} ran since"
    if (now.identity, now.script) != (last.identity, last.script):
        return f"{'its arguments' if now.identity != last.identity else task.script} changed"
    then = {**last.inputs, **last.outputs}
    for path, stamp in {**now.inputs, **stamps(task.folder(graph.base), task.outputs)}.items():
        if stamp in UNREADABLE or stamp != then.get(path):
            return f"{path} {UNREADABLE.get(stamp, 'changed')}"
    return ""


def folder_of(graph: PipelineGraph) -> Path:
    """Return the folder of a graph's records and logs."""
    return graph.base / FOLDER / graph.name


def read(folder: Path, task: str) -> Record:
    """Return the record of a task. If it is missing or unreadable, return that of a task that never ran."""
    try:
        about: dict[str, Any] = json.loads((folder / f"{task}.json").read_bytes())
        return Record(**about)
    except (OSError, ValueError, TypeError):
        return Record()


def state_of(folder: Path, task: str, record: Record) -> str:
    """Return the state in a record, or "interrupted" if it says "running" but the lock is free."""
    if record.state == "running":
        with suppress(OSError), locked_path(folder / f"{task}.lock", wait=False):
            return "interrupted"
    return record.state


def write(folder: Path, task: str, record: Record) -> None:
    """Write the record of a task."""
    os.makedirs(folder, exist_ok=True)
    content = json.dumps(asdict(record), indent=1).encode()
    write_file(folder / f"{task}.json", content, durable=False)
