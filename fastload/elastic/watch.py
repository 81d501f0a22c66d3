"""The thread of a worker, which beats and watches the beats of the others.

No clocks are compared: a worker is dead if its beat has not changed for most of `lease_s` by this worker's own clock,
which stands still while this worker is stopped.
"""

from __future__ import annotations

import os
import threading
from itertools import count
from time import monotonic

from fastload.elastic.stores import Connection
from fastload.errors import StoreLostError

BEATS = 8
"""Beats in the time of a lease. A worker is dead if 6 in a row are missing, so its shards are free within a lease."""
LOOK_S = 0.05
"""Time between two looks of a worker that waits for others."""

_JOIN_S = 2.0


class Watch:
    """A worker that has joined the others: its connection, its number, and the heartbeats of others as it sees them.

    Args:
        connection: connection to the store.
        worker: the number of this worker.
        lease_s: seconds after which a worker without a beat is dead.

    The thread replaces `_dead` and `_error` as a whole, and the loop's thread reads them. So they need no lock.
    """

    def __init__(self, connection: Connection, worker: int, lease_s: float) -> None:
        self._pid = os.getpid()
        self.connection = connection
        self.worker = worker
        self._beat_s = lease_s / BEATS
        self._dead_s = lease_s * (BEATS - 2) / BEATS
        self._closing = threading.Event()
        self._looked = monotonic()
        self._watched = 0.0  # seconds in which this worker has watched the others
        # By worker, its last beat, and the value of `_watched` when that beat was first seen.
        self._beats: dict[int, tuple[str, float]] = {}
        self._dead: set[int] = set()
        self._beaten = count()
        self._error: StoreLostError | None = None
        self._beat()
        self._thread = threading.Thread(
            target=self._beat_on, name=f"fastload-lease-{worker}", daemon=True
        )
        self._thread.start()

    @property
    def is_forked(self) -> bool:
        """True in a fork of the worker's process, which has no thread. The connection is the parent's."""
        return self._pid != os.getpid()

    def is_dead(self, worker: int) -> bool:
        """Return True if a worker gave no sign of life for most of a lease."""
        return worker in self._dead

    def nap(self) -> None:
        """Wait a moment for other workers. Raise StoreLostError if the store is gone."""
        if self._error is not None:
            raise self._error
        self._closing.wait(LOOK_S)

    def close(self) -> None:
        """End the thread."""
        if self.is_forked:
            return
        self._closing.set()
        # A garbage collection may call this in any thread.
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _beat_on(self) -> None:
        try:
            while not self._closing.wait(self._beat_s):
                self._beat()
        except StoreLostError as error:
            self._error = error

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
        self._dead = {w for w, (_, since) in self._beats.items() if now - since > self._dead_s}
