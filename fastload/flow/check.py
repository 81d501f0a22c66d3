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
    # Outputs of the tasks up to each task. None: unknown, because a task declares none.
    makes: dict[str, set[Path] | None] = {}
    for name in graph.order():
        task = graph.tasks[name]
        folder = task.folder(graph.base)
        known: set[Path] | None = set()
        for found in (makes[one] for one in graph.after(name)):
            known = None if known is None or found is None else known | found
        outputs = {_path(folder, output) for output in task.outputs}
        makes[name] = None if known is None or not outputs else known | outputs
        if name not in chosen:
            continue
        try:
            task.argv(graph.base)
        except (FlowError, LaunchError) as error:
            raise FlowError(f"graph {graph.name}: task {name} cannot run: {error}") from error
        except OSError:
            continue
        if task.script is None or "-m" in task.command or known is None:
            continue
        script = _path(folder, task.script)
        if not script.exists() and not known & {script, *script.parents}:
            raise FlowError(
                f"graph {graph.name}: task {name} cannot run: the script {script} does not exist, and no earlier task "
                "makes it. Correct its path, or list it in the outputs of the task that makes it"
            )


def _path(folder: Path, path: str) -> Path:
    return Path(os.path.normpath(folder / path))
