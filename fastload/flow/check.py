"""Check that the tasks of a graph can be started, as far as that is known before any of them has run."""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path

from fastload.errors import FlowError, LaunchError
from fastload.flow.graph import PipelineGraph


def check_commands(graph: PipelineGraph, chosen: Set[str]) -> None:
    """Raise FlowError if one of the chosen tasks has nothing to run, no launcher, or a missing script.

    An earlier task may still make the script: one that lists it, or a folder above it, as an output, or one without
    outputs. A task may also make a missing host file.
    """
    makes: dict[str, set[Path]] = {}  # outputs of each task, and of those before it
    for name in graph.order():
        task, folder = graph.tasks[name], graph.tasks[name].folder(graph.base)
        made = set[Path]().union(*(makes[one] for one in graph.after(name)))
        # Without outputs, it may make any file.
        makes[name] = made | {_path(folder, output) for output in task.outputs or ["/"]}
        if name not in chosen:
            continue
        wrong = f"graph {graph.name}: task {name} cannot run: "
        try:
            task.argv(graph.base)
        except (FlowError, LaunchError) as error:
            raise FlowError(f"{wrong}{error}") from error
        except OSError:
            continue
        if task.script is None or "-m" in task.command:
            continue
        script = _path(folder, task.script)
        if not script.exists() and made.isdisjoint((script, *script.parents)):
            raise FlowError(
                f"{wrong}the script {script} does not exist, and no earlier task "
                "makes it. Correct its path, or list it in the outputs of the task that makes it"
            )


def _path(folder: Path, path: str) -> Path:
    return Path(os.path.normpath(folder / path))
