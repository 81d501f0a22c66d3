"""A graph as text: its tasks, their order, and the results of their last runs."""

from __future__ import annotations

import time

from fastload._kit.texts import counted
from fastload.flow.graph import PipelineGraph
from fastload.flow.record import folder_of, read, state_of, why_stale


def as_text(graph: PipelineGraph) -> str:
    """Return a line for each task, in order: its name, command, predecessors and last run."""
    lines = [f"{graph.name}: {counted(len(graph), 'task')}"]
    for name in graph.order():
        before = ", ".join(graph.after(name)) or "-"
        task = str(graph.tasks[name]).partition(", ")[2]
        lines.append(f"  {name}  [{_last_run(graph, name)}]  after {before}")
        lines.append(f"      {task}")
    return "\n".join(lines)


def _last_run(graph: PipelineGraph, name: str) -> str:
    """Describe the last run of a task: its state, its time, and why it is stale."""
    record = read(folder_of(graph), name)
    if record.state == "waiting":
        return "never ran"
    began = time.strftime("%H:%M:%S", time.localtime(record.began))
    took = f"{record.ended - record.began:.1f} s" if record.ended else f"began {began}"
    stale = why_stale(graph, graph.tasks[name], record) if record.state == "done" else ""
    return f"{state_of(folder_of(graph), name, record)}, {took}{stale and f'; {stale}'}"
