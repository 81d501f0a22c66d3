"""A graph as text: its tasks, their order, and the results of their last runs."""

from __future__ import annotations

import time

from fastload.flow.graph import PipelineGraph
from fastload.flow.record import Record, folder_of, read, state_of, why_stale


def as_text(graph: PipelineGraph) -> str:
    """Return a line for each task, in order: its name, command, predecessors and last run."""
    lines = [f"{graph.name}: {len(graph)} tasks"]
    for name in graph.order():
        before = ", ".join(graph.after(name)) or "-"
        task = str(graph.tasks[name]).partition(", ")[2]
        lines.append(f"  {name}  [{_last_run(graph, name)}]  after {before}")
        lines.append(f"      {task}")
    return "\n".join(lines)


def _last_run(graph: PipelineGraph, name: str) -> str:
    """Describe the last run of a task: its state, its time, and why it is stale."""
    folder, task = folder_of(graph), graph.tasks[name]
    record = read(folder, name)
    if record.state == "waiting":
        return "never ran"
    state = state_of(folder, name, record)
    took = f"{record.ended - record.began:.1f} s" if record.ended else f"since {_clock(record)}"
    if state == "interrupted":
        return f"interrupted, began {_clock(record)}"
    if state != "done":
        return f"{state}, {took}"
    stale = why_stale(graph, task, record)
    return f"done, {took}; {stale}" if stale else f"done, {took}"


def _clock(record: Record) -> str:
    return time.strftime("%H:%M:%S", time.localtime(record.began))
