"""Who reads for one iterator: its threads, and its worker processes. How they end.

A thread holds the window and what it reads with, never the iterator that the user holds. So an iterator that the user
drops is collected, its finalizer closes the window, and the threads end by themselves. One of them ends the processes.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from fastload._kit.user_errors import annotate, contained
from fastload.engine.threads import (
    JOIN_SECONDS,
    abandon,
    started,
    wait,
    whereabouts,
)
from fastload.engine.window import Window
from fastload.memory.batch import Batch
from fastload.processes.child import Child
from fastload.processes.wire import with_core

_teams: weakref.WeakSet[Team] = weakref.WeakSet()
"""The teams of this process, which end with it. Their threads keep them alive."""

_registered = False
"""Whether multiprocessing ends the teams, in a process that it has started: such a process runs no `atexit`."""


class Team:
    """The threads of an iterator, and its worker processes.

    Args:
        window: hands out the work and takes the batches.
        children: the worker processes. The first thread receives what they send.
    """

    def __init__(self, window: Window[Batch], children: Sequence[Child] = ()) -> None:
        self.threads: list[threading.Thread] = []
        self.children = children
        self._window = window
        # Each thread puts None once it is set up, or the error that it raised.
        self._set_up: SimpleQueue[Exception | None] = SimpleQueue()
        self._waited = 0
        _teams.add(self)
        _end_with_multiprocessing()

    def launch(self, name: str, target: Callable[..., None], *args: Any) -> None:
        """Start a thread. `target` is called with `args` and the team, and runs in `serving`."""
        self.threads.append(started(name, target, *args, self))

    def wait_until_set_up(self) -> None:
        """Wait until all threads are set up. Raise the error of one that could not be."""
        while self._waited < len(self.threads):
            self._waited += 1
            if (error := self._set_up.get()) is not None:
                raise error

    @contextmanager
    def serving(self) -> Iterator[None]:
        """If the block raises, close the window with the fault."""
        try:
            yield
        except BaseException as exc:
            self._window.close(exc)

    @contextmanager
    def setting_up(self, where: str) -> Iterator[None]:
        """Run the block, and tell `wait_until_set_up` whether that raised."""
        try:
            yield
        except BaseException as exc:
            error = contained(exc)
            annotate(error, where)
            self._set_up.put(error)
            raise
        self._set_up.put(None)

    def whereabouts(self) -> str:
        """Return the stack of each worker and thread, innermost call last."""
        driven = "".join(child.stack() for child in self.children if not child.dead)
        return driven + whereabouts(self.threads[bool(driven) :])

    def is_whole(self) -> bool:
        """Return whether all worker processes are alive. Threads do not die."""
        return not any(child.dead for child in self.children)

    def is_spent(self) -> bool:
        """Return whether a batch may never come, because worker processes have died.

        Each worker of an iterable dataset has its own part of it, so one is enough.
        """
        dead = [child.dead for child in self.children]
        return any(dead) and (self.children[0].iterable or all(dead))

    def is_running(self) -> bool:
        """Return whether any thread may still run."""
        return any(thread.is_alive() for thread in self.threads)

    def close(self) -> None:
        """Let the threads and processes end after their current calls."""
        self._window.close()

    def kill_hung(self) -> None:
        """Kill the worker processes that still run, and say in a warning where they were."""
        hung = [child for child in self.children if not child.dead]
        if not hung:
            return
        how = f"did not exit within {JOIN_SECONDS:g} s after its last batch and was killed. No batch is lost"
        if any(child.remote.reading() for child in hung):
            stacks = "".join(child.stack() for child in hung)
            how = f"did not return from a call within {JOIN_SECONDS:g} s and was killed. Stacks:\n{stacks}"
        for child in hung:
            child.kill()
        self.threads[0].join(JOIN_SECONDS)
        names = ", ".join(f"worker process {child.pid}" for child in hung)
        warnings.warn(f"{names} {how}", RuntimeWarning, stacklevel=4)


def _end_with_multiprocessing() -> None:
    global _registered
    if not _registered:
        _registered = True
        multiprocessing.util.Finalize(None, _end_all, exitpriority=100)


def join(teams: Iterable[Team]) -> None:
    """Wait at most `JOIN_SECONDS` for the threads and worker processes of closed windows.

    Time in which a process waited for a core does not count. Kill processes that hang, and abandon threads that hang:
    no later call waits for them. Name both in a warning.
    """
    teams = list(teams)
    pids = [one.pid for team in teams for one in team.children if not one.dead]
    threads = [thread for team in teams for thread in team.threads]
    if with_core(lambda seconds: not wait(threads, seconds), JOIN_SECONDS, pids):
        return
    stuck = wait(threads, 0)
    for team in teams:
        team.kill_hung()
        team.threads = [thread for thread in team.threads if thread not in stuck]
    abandon([thread for thread in stuck if thread.is_alive()])


def _end_all() -> None:
    for team in list(_teams):
        team.close()
    join(list(_teams))


atexit.register(_end_all)


def _after_fork_in_child() -> None:
    global _registered
    _teams.clear()
    _registered = False


os.register_at_fork(after_in_child=_after_fork_in_child)
