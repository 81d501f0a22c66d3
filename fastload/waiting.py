"""What threads wait at: lines, in which each thread waits until it is woken, and one lock of the process."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress

starting = threading.Lock()
"""Owns the number of threads that torch gives to new threads, while `workers` starts some that have one."""


class Line:
    """A line of waiting threads, each at a lock of its own. All methods are called with the lock of the line's owner.

    A thread that finds nothing to do joins the line under the owner's lock, and acquires its turn without it:

        while True:
            with lock:
                if turn: line.leave(turn)
                if there is something to do: return it
                turn = line.join()
            turn.acquire()

    Not `threading.Condition`: a `close()` out of a garbage collection in this very thread, after it looked and before
    it is in line, would wake no one, and the thread would sleep for ever. Here a thread that joins a closed line is
    awake. Nor does a wait end with a lock to be taken back, in the middle of which Ctrl-C could strike.
    """

    def __init__(self) -> None:
        self._turns: deque[threading.Lock] = deque()
        self._closed = False

    def join(self) -> threading.Lock:
        """Return a turn: a lock that can be acquired once this thread is woken."""
        turn = threading.Lock()
        turn.acquire()
        self._turns.append(turn)
        if self._closed:
            self.wake()
        return turn

    def leave(self, turn: threading.Lock) -> None:
        """Take a turn that was waited for out of line, if an interrupted wake or none left it there."""
        with suppress(ValueError):
            self._turns.remove(turn)

    def wake(self, n: int | None = None) -> None:
        """Wake the first `n` in line, or all.

        A turn is released first, and then taken out of line. Ctrl-C between the two leaves a turn in line whose
        thread is awake. To meet it again does no harm: it cannot be released twice, or it stands for a thread that is
        about to look for itself. A line of one thread is woken whole, so that such a turn cannot take that one's place.
        """
        left = len(self._turns) if n is None else n
        while left > 0:
            try:
                turn = self._turns[0]
            except IndexError:
                return
            try:
                turn.release()
            except RuntimeError:
                pass
            else:
                left -= 1
            self.leave(turn)

    def close(self) -> None:
        """Wake all, and whoever joins from now on."""
        self._closed = True
        self.wake()


def _after_fork_in_child() -> None:
    global starting
    starting = threading.Lock()  # the thread that may hold it is not in this process


os.register_at_fork(after_in_child=_after_fork_in_child)
