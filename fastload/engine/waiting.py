"""Lines of threads that wait to be woken, and the two locks that belong to the whole process."""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter

starting = threading.Lock()
"""Owns the number of torch's threads, which `workers` sets while it starts threads."""

stack_size = threading.RLock()  # a finalizer may load in the same thread
"""Owns `threading.stack_size()`, which `workers` sets while one thread starts."""


class Line:
    """A line of threads, each of which waits for its own lock. Call all methods under the lock of the line's owner.

    A thread that finds nothing to do joins the line under the owner's lock, and acquires its turn without that lock:

        while True:
            with lock:
                if turn: line.leave(turn)
                if there is something to do: return it
                turn = line.join()
            turn.acquire()

    Why not `threading.Condition`: a garbage collection in this very thread may call `close()`, after the thread looked
    and before it is in line. It would then wake no thread, and this one would sleep forever. Here a thread that joins a
    closed line is awake at once. Also, no wait ends by taking a lock again: Ctrl-C could interrupt that.
    """

    def __init__(self) -> None:
        self._turns: deque[threading.Lock] = deque()
        self._closed = False

    def join(self) -> threading.Lock:
        """Return a turn: a lock that this thread can acquire once it is woken."""
        turn = threading.Lock()
        turn.acquire()
        self._turns.append(turn)
        if self._closed:
            self.wake()
        return turn

    def leave(self, turn: threading.Lock) -> None:
        """Take a turn out of line, if it is still there: the wake was interrupted, or the wait timed out."""
        with suppress(ValueError):
            self._turns.remove(turn)

    def wake(self, n: int | None = None) -> None:
        """Wake the first `n` threads in line, or all.

        This releases a turn, and then takes it out of line. Ctrl-C in between leaves a turn in line whose thread is
        awake. It does no harm there: a second release raises and does not count, and a thread that has not acquired
        its turn yet is about to look anyway. If only one thread can be in line, the caller wakes all, so that such a
        turn cannot take its place.
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
        """Wake all threads, and every thread that joins from now on."""
        self._closed = True
        self.wake()


class Changes:
    """Let threads wait for a condition. A thread that changes what the condition reads calls `tell()` afterwards."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock  # that of the window: with a second one, two threads could wait for each other in `close`
        self._line = Line()
        self._closed = False

    def wait(self, until: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until `until()` is true, this is closed, or `seconds` have passed. `until` runs under the lock."""
        ends = None if seconds is None else perf_counter() + seconds
        turn = None
        while True:
            with self._lock:
                if turn:
                    self._line.leave(turn)
                left = -1.0 if ends is None else max(0.0, ends - perf_counter())
                if self._closed or until() or not left:
                    return
                turn = self._line.join()
            turn.acquire(timeout=min(left, threading.TIMEOUT_MAX))

    def tell(self) -> None:
        """Let the threads that wait check their conditions again."""
        with self._lock:
            self._line.wake()

    def close(self) -> None:
        """End all waits, now and from now on."""
        with self._lock:
            self._closed = True
            self._line.close()


class Bell:
    """Wakes a thread that polls descriptors. Any thread may ring, also in a finalizer."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Close it only with this object. A later ring could write to another file that has the number by then.
        weakref.finalize(self, os.close, self.descriptor).atexit = False

    def ring(self) -> None:
        """Let `descriptor` be readable."""
        with suppress(BlockingIOError):
            os.eventfd_write(self.descriptor, 1)

    def wait(self) -> None:
        """Wait until it rings. It stays readable: several threads may wait."""
        poll = select.poll()  # `select` refuses descriptors from 1,024 on
        poll.register(self.descriptor, select.POLLIN)
        poll.poll()

    def hush(self) -> None:
        """Let `descriptor` be not readable until it rings again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)


def _after_fork_in_child() -> None:
    global starting, stack_size
    # A thread that held one does not exist in this process.
    starting, stack_size = threading.Lock(), threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)
