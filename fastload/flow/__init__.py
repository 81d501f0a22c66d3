"""Run a few commands as a graph: each runs after those that it needs, and a failed graph can resume.

`PipelineGraph` holds tasks, and `run` runs them. `fastload flow run` runs a graph that a file describes.
"""

from fastload.flow.graph import PipelineGraph
from fastload.flow.runner import Outcome, run
from fastload.flow.tasks import MPITask, PythonTask, PytorchTask, Resources, Task

__all__ = [
    "MPITask",
    "Outcome",
    "PipelineGraph",
    "PythonTask",
    "PytorchTask",
    "Resources",
    "Task",
    "run",
]
