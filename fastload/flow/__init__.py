"""A few commands as a graph: what has to run before what, run once, and gone on with after a failure.

`PipelineGraph` holds tasks; `fastload flow run` runs one that a file describes.
"""

from fastload.flow.graph import PipelineGraph
from fastload.flow.runner import Outcome, run
from fastload.flow.tasks import FunctionTask, MPITask, PythonTask, PytorchTask, Resources, Task

__all__ = [
    "FunctionTask",
    "MPITask",
    "Outcome",
    "PipelineGraph",
    "PythonTask",
    "PytorchTask",
    "Resources",
    "Task",
    "run",
]
