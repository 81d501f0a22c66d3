"""`PipelineGraph`: tasks and their order. `runner` runs a graph, and `show` draws it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeVar

from fastload.errors import FlowError
from fastload.flow.tasks import Task
from fastload.flow.values import checked_name

T = TypeVar("T", bound=Task)


class PipelineGraph:
    """Tasks in the order in which they may run.

    Args:
        name: name of the graph, with the same rules as that of a task. Its logs are in `.fastload-flow/NAME`.
        folder: folder in which the tasks run. None: the current folder when the graph runs.

    Raises:
        ValueError: the name is not allowed.

    Examples:
        >>> graph = fastload.flow.PipelineGraph("greetings")
        >>> first = graph.add_task(fastload.flow.Task("first", command=["true"]))
        >>> second = graph.add_task(fastload.flow.Task("second", command=["true"]))
        >>> graph.order()
        ['first', 'second']
    """

    def __init__(
        self, name: str = "UNNAMED_TASK", *, folder: str | os.PathLike[str] | None = None
    ) -> None:
        self.name = checked_name("a graph's", name)
        self.folder = None if folder is None else os.fspath(folder)
        self._tasks: dict[str, Task] = {}
        self._after: dict[str, tuple[str, ...]] = {}

    def add_task(self, task: T, after: Iterable[Task | str] | None = None) -> T:
        """Add a task, and return it.

        Args:
            after: tasks, or names of tasks, that must succeed before. None: the task that was added last. An empty
                list: no tasks.

        Raises:
            TypeError: `task` is not a task.
            FlowError: the graph has a task of this name.
        """
        if not isinstance(task, Task):
            raise TypeError(
                f"graph {self.name}: expected a task, got {type(task).__name__}: {task!r:.60}"
            )
        if task.name in self._tasks:
            raise FlowError(f"graph {self.name}: two tasks have the name {task.name!r}. Rename one")
        if after is None:
            after = list(self._tasks)[-1:]
        elif isinstance(after, str | Task):
            after = [after]
        names = (one.name if isinstance(one, Task) else str(one) for one in after)
        self._after[task.name] = tuple(dict.fromkeys(names))
        self._tasks[task.name] = task
        return task

    @property
    def base(self) -> Path:
        """Folder from which the tasks' own folders start."""
        return Path(self.folder or ".").absolute()

    @property
    def tasks(self) -> Mapping[str, Task]:
        """The tasks by name, in the order in which they were added."""
        return dict(self._tasks)

    def after(self, name: str) -> tuple[str, ...]:
        """Return the names of the tasks that must succeed before `name`."""
        return self._after[name]

    def order(self) -> list[str]:
        """Return the names of all tasks, each after those that it waits for.

        Raises:
            FlowError: there is no order.
        """
        sorter, names = self.sorter(), list[str]()
        while ready := sorter.get_ready():
            names += ready
            sorter.done(*ready)
        return names

    def sorter(self) -> TopologicalSorter[str]:
        """Return the tasks for a runner, which asks for those that can run.

        Raises:
            FlowError: there is no order.
        """
        sorter = TopologicalSorter(dict.fromkeys(self._tasks, ()))
        for name, before in self._after.items():
            sorter.add(name, *before)
            if unknown := [one for one in before if one not in self._tasks]:
                raise FlowError(
                    f"graph {self.name}: task {name!r} waits for {unknown[0]!r}, which is not a task. The tasks are "
                    f"{', '.join(self._tasks)}"
                )
        try:
            sorter.prepare()
        except CycleError as error:
            cycle = " -> ".join(error.args[1][::-1])
            raise FlowError(
                f"graph {self.name}: these tasks wait for one another, each for the next: {cycle}. Change after= of one"
            ) from None
        return sorter

    def __len__(self) -> int:
        return len(self._tasks)

    def __str__(self) -> str:
        return "\n".join(
            f"Task Id {number},\n  {task}" for number, task in enumerate(self._tasks.values())
        )
