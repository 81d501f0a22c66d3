"""Stops the loaders' threads between two samples, so that this process can fork.

A forked process has no threads but the one that forked. A lock that another thread held, as HDF5's, OpenBLAS's or that
of `logging`, would stay locked in it forever.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PAUSE_SECONDS = 1.0
"""How long a fork waits for the samples that are being read."""


class _Busy:
    """A thread runs user code, or a library's, in a block `with busy:`.

    Entering has two steps: note that this thread is busy, look whether a fork is wanted. A thread that wants to fork
    takes them the other way round: it notes the fork, and looks who is busy. So at least one of the two sees the other.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset, in a forked process: no thread, no fork."""
        self._threads: dict[int, None] = {}  # by their ids; setting and popping are atomic
        self._forks = 0  # that are wanted; the lock of `_changed` owns it
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        me = threading.get_ident()
        self._threads[me] = None
        while self._forks:
            self._threads.pop(me, None)
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._forks)
            self._threads[me] = None

    def __exit__(self, *_: object) -> None:
        self._threads.pop(threading.get_ident(), None)
        if self._forks:
            with self._changed:
                self._changed.notify_all()

    @contextmanager
    def stopped(self) -> Iterator[bool]:
        """Keep other threads out of such blocks while this one runs. Yield False if one is still in a block."""
        me = threading.get_ident()
        with self._changed:
            self._forks += 1
        try:
            with self._changed:
                alone = self._changed.wait_for(
                    lambda: not self._threads.keys() - {me}, PAUSE_SECONDS
                )
            yield alone
        finally:
            with self._changed:
                self._forks -= 1
                self._changed.notify_all()


busy = _Busy()

os.register_at_fork(after_in_child=busy.forget)
