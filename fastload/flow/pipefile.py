"""A graph in a TOML file, which `fastload flow run` runs.

    name = "mnist"                     # default: the name of the file

    [[task]]
    name = "download"
    script = "download.py"             # kind = "python" unless another is given
    args = ["--out", "raw"]
    outputs = ["raw"]

    [[task]]
    name = "train"                     # runs after the task above it, unless after = [...] names others
    kind = "pytorch"
    script = "train.py"
    parallelism = 4
    walltime = "0:20:00"               # for its batch job, as are ppn, cores and directives

Paths start from the folder of the file.
"""

from __future__ import annotations

import inspect
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from fastload.errors import FlowError
from fastload.flow.graph import PipelineGraph
from fastload.flow.tasks import MPITask, PythonTask, PytorchTask, Resources, Task

KINDS: dict[str, type[Task]] = {
    kind.kind: kind for kind in (PythonTask, MPITask, PytorchTask, Task)
}
_RESOURCES = ("walltime", "ppn", "cores", "directives")


def read_pipeline(path: str | os.PathLike[str]) -> PipelineGraph:
    """Return the graph that a file describes.

    Raise FlowError, which names the file, the task and the key, if the file does not describe a graph. Raise
    FileNotFoundError if it does not exist.
    """
    path = Path(path).absolute()
    try:
        about = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FlowError(f"{path}: not a TOML file: {error}") from error
    tasks = about.pop("task", None)
    name = about.pop("name", re.sub(r"[^A-Za-z0-9_.-]", "_", path.stem)[:64])
    if about:
        raise FlowError(f"{path}: unknown key {min(about)!r}. Expected name, and tables [[task]]")
    if not isinstance(tasks, list) or not tasks:
        raise FlowError(f"{path} has no tasks. Begin each task with [[task]]")
    try:
        graph = PipelineGraph(name, folder=path.parent)
    except ValueError as error:
        raise FlowError(f"{path}: {error}") from error
    for number, table in enumerate(tasks, start=1):
        if not isinstance(table, dict):
            raise FlowError(f"{path}: a task must be a table. Begin each task with [[task]]")
        try:
            _add(graph, {"name": None, **table})
        except (TypeError, ValueError, FlowError) as error:
            about_it = str(error).removeprefix(f"task {table.get('name')}: ")
            raise FlowError(f"{path}: task {table.get('name', number)}: {about_it}") from error
    graph.order()
    return graph


def _add(graph: PipelineGraph, table: dict[str, Any]) -> None:
    """Add the task of a table."""
    kind = table.pop("kind", "python" if "script" in table else "command")
    if kind not in KINDS:
        raise FlowError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    cls, after = KINDS[kind], table.pop("after", None)
    keys = {name for base in cls.__mro__[:-1] for name in inspect.signature(base).parameters}
    known = {*keys, *_RESOURCES, "after", "kind"} - {"options", "resources"}
    if unknown := table.keys() - known:
        raise FlowError(f"unknown key {min(unknown)!r}. The keys are {', '.join(sorted(known))}")
    resources = {name: table.pop(name) for name in _RESOURCES if name in table}
    graph.add_task(cls(**table, resources=Resources(**resources)), after)
