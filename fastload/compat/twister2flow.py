"""Twister2Flow's names over `fastload.flow`.

    from fastload.compat.twister2flow import PipelineGraph, PythonTask, PytorchTask, Twister2Task

    plg = PipelineGraph.PipelineGraph(name="UNNAMED_TASK")

The rest of such a program runs as it is. What is different: the tasks after one that failed do not run; each task has a
log; two graphs share nothing; and no Twister2 is needed. A `Twister2Task` runs its script on the ranks of an MPI job,
in which `fastload.store.prepare` takes the place of Twister2's TSets.
"""

from __future__ import annotations

from typing import Any

# A module in Twister2Flow, which has the class of this name.
from fastload.flow import MPITask, PythonTask, PytorchTask
from fastload.flow import graph as PipelineGraph

__all__ = ["PipelineGraph", "PythonTask", "PytorchTask", "Twister2Environment", "Twister2Task"]


class Twister2Task(MPITask):
    """A Python script on the ranks of an MPI job, 4 by default. See `fastload.flow.MPITask` for the arguments."""

    kind = "twister2"


class Twister2Environment:
    """Not there: raises an error that says what takes its place."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise ImportError(
            "fastload has no Twister2Environment. Make the rows of one part by a function, and call "
            "fastload.store.prepare(function, sources, out, executor=mpi4py.futures.MPIPoolExecutor()); "
            "each rank then reads the set with fastload.store.get(out)"
        )
