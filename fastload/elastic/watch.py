"""The two threads of a worker: one beats and watches the beats of the others, one waits for events of the store.

No clocks are compared: a worker is dead if its beat has not changed for most of `lease_s` by this worker's own clock,
which stands still while this worker is stopped.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from itertools import count
from time import monotonic

from fastload.elastic.stores import Connection
from fastload.errors import StoreLostError

BEATS = 8
"""Beats in the time of a lease. A worker is dead if 6 in a row are missing, so its shards are free within a lease."""

_JOIN_S = 2.0
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


class Watch:
    """The heartbeats of other workers as one worker sees them, and the events that wake it.

    Args:
        connection: this worker's connection to the store.
        worker: the number of this worker.
        lease_s: seconds after which a worker without a beat is dead.

    The condition guards all attributes that follow it. Both threads write them; the loop's thread reads them and waits.
    """

    def __init__(self, connection: Connection, worker: int, lease_s: float) -> None:
        self._pid = os.getpid()
        self.connection = connection
        self.worker = worker
        self._beat_s = lease_s / BEATS
        self._dead_s = lease_s * (BEATS - 2) / BEATS
        self._closing = threading.Event()
        self._condition = threading.Condition()
        self._looked = monotonic()
        self._watched = 0.0  # seconds in which this worker has watched the others
        # By worker, its last beat, and the value of `_watched` when that beat was first seen.
        self._beats: dict[int, tuple[str, float]] = {}
        self._dead: set[int] = set()
        self._changes = 0
        self._events = 1  # the number of the next event
        self._told, self._beaten = count(), count()
        self._error: StoreLostError | None = None
        self._beat()
        waits = connection.cloned()
        self._threads = [
            threading.Thread(target=self._beat_on, name=f"fastload-lease-{worker}", daemon=True),
            threading.Thread(
                target=self._wait_on, args=(waits,), name=f"fastload-events-{worker}", daemon=True
            ),
        ]
        for thread in self._threads:
            thread.start()
        _watches.add(self)

    @property
    def changes(self) -> int:
        """A number that grows whenever a shard may have become free, or an epoch has ended."""
        with self._condition:
            return self._changes

    @property
    def is_forked(self) -> bool:
        """True in a fork of the worker's process, which has no threads. The connection is the parent's."""
        return self._pid != os.getpid()

    def is_dead(self, worker: int) -> bool:
        """Return True if a worker gave no sign of life for most of a lease."""
        with self._condition:
            return worker in self._dead

    def wait(self, changes: int) -> None:
        """Wait until `self.changes` differs from `changes`. Raise StoreLostError if the store is gone."""
        with self._condition:
            while self._changes == changes and self._error is None:
                self._condition.wait()
            if self._error is not None:
                raise self._error

    def tell(self) -> None:
        """Wake all workers that wait, this one too."""
        with self._condition:
            number = self._events
        text = f"{self.worker} {next(self._told)}"
        while not self.connection.tell(f"event/{number}", text):
            number += 1

    def close(self) -> None:
        """End the threads."""
        if self.is_forked:
            return
        self._closing.set()
        self.tell()
        for thread in self._threads:
            # A garbage collection may call this in any thread.
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _beat_on(self) -> None:
        try:
            while not self._closing.wait(self._beat_s):
                self._beat()
        except StoreLostError as error:
            self._change(error)

    def _wait_on(self, connection: Connection) -> None:
        try:
            while not self._closing.is_set():
                connection.wait(f"event/{self._events}", self._closing)
                with self._condition:
                    self._events += 1
                self._change()
        except StoreLostError as error:
            self._change(error)

    def _change(self, error: StoreLostError | None = None) -> None:
        with self._condition:
            self._changes += 1
            self._error = error or self._error
            self._condition.notify_all()

    def _beat(self) -> None:
        """Send a beat, and read the beats of the others."""
        self.connection.set(f"beat/{self.worker}", str(next(self._beaten)))
        others = [
            worker
            for worker in range(1, self.connection.add("workers", 0) + 1)
            if worker != self.worker
        ]
        texts = self.connection.read_all([f"beat/{worker}" for worker in others])
        # A worker that was stopped saw no beats, and the others may have been stopped with it.
        before, self._looked = self._looked, monotonic()
        now = self._watched = self._watched + min(self._looked - before, 2 * self._beat_s)
        for worker, text in zip(others, texts, strict=True):
            if worker not in self._beats or self._beats[worker][0] != text:
                self._beats[worker] = (text, now)
        silent = {w for w, (_, since) in self._beats.items() if now - since > self._dead_s}
        with self._condition:
            new = silent - self._dead
            self._dead = silent
        if new:
            self._change()


@atexit.register
def _close_all() -> None:
    # A thread in C++ code would abort the process while the interpreter shuts down.
    for watch in list(_watches):
        watch.close()
