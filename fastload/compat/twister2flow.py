"""Twister2Flow's names over `fastload.flow`.

    from fastload.compat.twister2flow import PipelineGraph, PythonTask, PytorchTask, Twister2Task

    plg = PipelineGraph.PipelineGraph(name="UNNAMED_TASK")

The rest of such a program runs as it is. What is different: the tasks after one that failed do not run; each task has a
log; two graphs share nothing; and no Twister2 is needed. A `Twister2Task` runs its script on the ranks of an MPI job.

The programs that the tasks run find their names here too: those of `fastload.compat.twister2`, and those of
`fastload.compat.twister2deepnet`, which is imported when the first of them is. See docs/twister2.md.
"""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Sequence
from typing import Any

# A module in Twister2Flow, which has the class of this name.
from fastload.compat import twister2graph as PipelineGraph
from fastload.compat.twister2 import SourceFunc, TSetContext, Twister2Environment
from fastload.flow import MPITask, PythonTask, PytorchTask

__all__ = [
    "PipelineGraph",
    "PythonTask",
    "PytorchTask",
    "SourceFunc",
    "TSetContext",
    "Twister2Environment",
    "Twister2Task",
]

_DEEPNET = {
    "ArrowUtils",
    "DataUtil",
    "FileUtils",
    "MNIST",
    "MnistDistributed",
    "UtilPanda",
    "distributed",
    "utils",
}


def __getattr__(name: str) -> Any:
    if name in _DEEPNET:
        return getattr(importlib.import_module("fastload.compat.twister2deepnet"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Twister2Task(MPITask):
    """A Python script on the ranks of an MPI job, 4 by default. See `fastload.flow.MPITask` for the arguments.

    The command "twister2 submit ..." stands for the usual one: the `mpiexec` that is there.
    """

    kind = "twister2"

    def set_command(self, command: str | Sequence[str | os.PathLike[str]] | None = None) -> None:
        """Set what starts the ranks; None, or Twister2's own launcher: the `mpiexec` that is there."""
        words = shlex.split(command) if isinstance(command, str) else list(command or ())
        super().set_command(None if words[:2] == ["twister2", "submit"] else words)
