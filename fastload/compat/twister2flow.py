"""Twister2Flow's names over `fastload.flow`.

    from fastload.compat.twister2flow import PipelineGraph, PythonTask, PytorchTask, Twister2Task

    plg = PipelineGraph.PipelineGraph(name="UNNAMED_TASK")

The rest of such a program runs unchanged. Four things differ. If a task fails, the tasks after it do not run. Each task
has a log. Two graphs share nothing. No Twister2 is needed. A `Twister2Task` runs its script on the ranks of an MPI job.

The programs that the tasks run can import the names of `fastload.compat.twister2` and `fastload.compat.twister2deepnet`
from here too. The latter is imported when one of its names is first used. See docs/twister2.md.
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

_DEEPNET = "ArrowUtils DataUtil FileUtils MNIST MnistDistributed UtilPanda distributed utils"


def __getattr__(name: str) -> Any:
    if name in _DEEPNET.split():
        return getattr(importlib.import_module("fastload.compat.twister2deepnet"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Twister2Task(MPITask):
    """A Python script on the ranks of an MPI job, 4 by default. See `fastload.flow.MPITask` for the arguments.

    The command "twister2 submit ..." is replaced by the usual one, the `mpiexec` on PATH.
    """

    kind = "twister2"

    def set_command(self, command: str | Sequence[str | os.PathLike[str]] | None = None) -> None:
        """Set the command that starts the ranks. None, or Twister2's own launcher: the `mpiexec` on PATH."""
        words = shlex.split(command) if isinstance(command, str) else list(command or ())
        super().set_command(None if words[:2] == ["twister2", "submit"] else words)
