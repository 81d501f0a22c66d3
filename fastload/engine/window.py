"""The bounded, ordered hand-off between threads. It has the locks of the pipeline; `waiting` has its lines.

    loop             workers                      collector               loop
    issue(t)   ->    claim(), deliver(t)    ->    collect(), publish(t)   ->   take()
                     complete(t)

A *ticket* is a place in the order, one for each batch. The workers share its *units*: the samples, or 1 if one call
reads the batch. The only bound is on places, not on the lengths of queues:

    issued - oldest ticket not yet taken <= depth

So late tickets cannot fill the window while an early one is missing. The data ends if nothing is in flight and nothing
more is issued. There are no sentinels, and no time-out controls the flow. `close()` wakes every waiting thread.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from time import perf_counter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from fastload.engine.waiting import Changes, Line
from fastload.errors import LoaderClosedError, LoaderTimeoutError, WorkerCrashError
from fastload.memory.ticket import COMPLETE, OPEN, READY, TAKEN, Ticket
from fastload.reading.runs import RUN_SECONDS, Claim, Runs
from fastload.telemetry import WaitClock

T = TypeVar("T", bound=Ticket)


class Listener(Protocol):
    """Reads tickets elsewhere than in threads that claim, such as in processes."""

    def pull(self, seconds: float | None) -> bool:
        """Complete what was read elsewhere. Wait for that at most `seconds`. Return False if another thread does it."""

    def on_issue(self, ticket: Any) -> None:
        """Hear of a ticket that was issued, in the loop."""

    def on_drop(self, number: int) -> None:
        """Hear that all tickets up to a number are dropped. This comes under the window's lock."""

    def on_close(self) -> None:
        """Hear that the window is closed. This comes under the window's lock, also in a finalizer."""


class WindowCounts(NamedTuple):
    """The counts of a window since the last `recount()`. Seconds include current waits."""

    consumer_wait_s: float
    worker_wait_s: float
    occupancy: float


class Window(Generic[T]):
    """A bounded window on an ordered stream of tickets, `depth` places wide.

    Args:
        depth: places in the window.
        in_order: if False, `take()` gives any ticket that is ready. The bound still counts from the oldest ticket.
        collected: put a collector thread between the workers and the loop.
        lanes: see `Runs`. 0: no thread claims, and the tickets are read elsewhere.
        max_bytes: bound of the bytes in flight. An incomplete ticket counts as the mean so far. One ticket is always
            let in, and only one until the first is complete.
        run_seconds: how long a run should last.

    Only the thread that holds `taking` may take and issue, only one may collect, any may claim and deliver.
    """

    def __init__(
        self,
        depth: int,
        *,
        in_order: bool = True,
        collected: bool = False,
        lanes: int = 1,
        max_bytes: int | None = None,
        run_seconds: float = RUN_SECONDS,
    ) -> None:
        self.depth = depth
        self.max_bytes = max_bytes
        self.lanes = lanes
        self.in_order = in_order
        self.collected = collected
        self._make_locks()
        _windows.add(self)
        self._issued = 0
        self._flight: deque[T] = deque()  # issued, not taken; in order
        self._runs: Runs[T] = Runs(lanes, run_seconds)  # of those with units to claim; in order
        self._complete_bytes = 0  # of those in flight that are complete
        self._complete_count = 0
        self._measured = self._measured_bytes = 0  # of all that were ever complete
        self._ready_tickets: deque[T] = deque()  # those that can be taken; as they became ready
        self.listener: Listener | None = None
        self.closed = False
        """Whether `close()` was called. It is never cleared, so any thread may read it without the lock."""
        self._fault: BaseException | None = None
        self.idle = WaitClock()  # workers that wait for work
        self._waits = WaitClock()  # of the loop
        self._occupancy_sum = 0.0
        self._takes = 0

    def _make_locks(self) -> None:
        # Owns every field of the window and of its tickets. Re-entrant: a garbage collection can start in any thread at
        # any allocation, also under this lock, and its finalizer may close this very window. `close()` only sets flags,
        # wakes threads and reads the clock, so the section that it interrupts finds its own state unchanged.
        self._lock = threading.RLock()
        # Owns the loop's side, if several threads share one iterator. The thread in `next()` holds it.
        self.taking = threading.RLock()
        self.telling = threading.Lock()  # owns the calls of the dataset's `will_read`
        # Threads that wait until ...
        self._workers = [Line() for _ in range(self.lanes)]  # ... their lane has units to claim
        self._collector = Line()  # ... a ticket is complete
        self._loop = Line()  # ... a ticket can be taken
        self.changes = Changes(self._lock)  # ... tickets are dropped

    # ---- the loop ----

    def recount(self) -> None:
        """Restart the counts at 0."""
        with self._lock:
            self.idle.restart()
            self._waits.restart()
            self._occupancy_sum = 0.0
            self._takes = 0

    def discard(self) -> None:
        """Forget every ticket in flight. Discard what workers still deliver of them."""
        with self._lock:
            dropped = tuple(self._flight)
            for ticket in dropped:
                ticket.dropped = True
            if dropped and self.listener is not None:
                self.listener.on_drop(dropped[-1].number)
            self._flight.clear()
            self._ready_tickets.clear()
            self._complete_bytes = self._complete_count = 0
            self._runs.clear()
        self.changes.tell()
        for ticket in dropped:
            ticket.release()

    def has_room(self) -> bool:
        """Return whether one more ticket may be issued."""
        with self._lock:
            if not self._flight:
                return True
            if self._issued - self._flight[0].number >= self.depth:
                return False
            if self.max_bytes is None:
                return True
            if not self._measured:
                return False  # their size is not known yet
            unknown = len(self._flight) - self._complete_count + 1
            mean = self._measured_bytes / self._measured
            return self._complete_bytes + unknown * mean <= self.max_bytes

    def oldest(self) -> T | None:
        """Return the ticket that has been in flight for longest, or None."""
        with self._lock:
            return self._flight[0] if self._flight else None

    def issue(self, ticket: T) -> None:
        """Put `ticket` into the next place, after `has_room()` returned True. No other thread issues.

        A ticket without units failed before it could be read, and is complete at once. The caller reads nothing of a
        ticket that it has issued: workers change it.
        """
        with self._lock:
            ticket.number = self._issued
            self._issued += 1
            self._flight.append(ticket)
            if not ticket.units:
                self.complete(ticket)
            elif self.lanes:
                self._workers[ticket.lane].wake(self._runs.add(ticket, ticket.lane))
            listener = self.listener if ticket.units else None
        if listener is not None:
            listener.on_issue(ticket)

    def take(self, timeout: float | None = None) -> T | None:
        """Wait for the next ticket and take it out of the window. Return None if nothing is in flight.

        Raises `LoaderTimeoutError` after `timeout` seconds (nothing is lost), `LoaderClosedError` after `close()`, and
        `WorkerCrashError` if a thread of the pipeline failed.
        """
        started = turn = None
        listener = self.listener
        pulls = listener is not None and listener.pull(0)
        try:
            while True:
                with self._lock:
                    if turn:
                        self._loop.leave(turn)
                    self.check()
                    if not self._flight:
                        return None
                    if started is None:
                        self._occupancy_sum += len(self._ready_tickets) / len(self._flight)
                        self._takes += 1
                    if (ticket := self._next()) is not None:
                        ticket.stage = TAKEN
                        self._complete_bytes -= ticket.nbytes
                        self._complete_count -= 1
                        self._flight.remove(ticket)
                        self._ready_tickets.remove(ticket)
                        return ticket
                    turn = None if pulls else self._loop.join()
                    now = perf_counter()
                    if started is None:
                        started = now
                        self._waits.start()
                if timeout is not None and now >= started + timeout:
                    raise LoaderTimeoutError(f"DataLoader timed out after {timeout:g} seconds")
                left = None if timeout is None else started + timeout - now
                if turn:
                    turn.acquire(timeout=-1 if left is None else left)
                elif listener is not None:
                    pulls = listener.pull(left)
        finally:
            if started is not None:
                with self._lock:
                    self._waits.stop()

    def check(self) -> None:
        """Raise `WorkerCrashError` or `LoaderClosedError` if no more tickets will come."""
        if self._fault is not None:
            raise WorkerCrashError("a fault of fastload ended a loader thread") from self._fault
        if self.closed:
            raise LoaderClosedError("the loader was closed. Begin another epoch with iter(loader)")

    def is_begun(self) -> bool:
        """Return whether a worker that lived has begun a ticket that is in flight."""
        with self._lock:
            return any(ticket.claimed and not ticket.lost for ticket in self._flight)

    def ready(self) -> T | None:
        """Return the ticket that `take()` would return now, or None if it would wait, raise or end."""
        listener = self.listener
        if listener is not None and self.taking.acquire(blocking=False):
            try:
                listener.pull(0)
            finally:
                self.taking.release()
        with self._lock:
            return None if self.closed else self._next()

    def _next(self) -> T | None:
        if self.in_order:
            return self._flight[0] if self._flight and self._flight[0].stage == READY else None
        return self._ready_tickets[0] if self._ready_tickets else None

    # ---- the workers ----

    def claim(self, lane: int = 0) -> Claim[T] | None:
        """Wait for units to work on in a lane, and claim some. Return None once the window is closed."""
        workers = self._workers[lane]
        turn = None
        while True:
            with self._lock:
                if turn:
                    workers.leave(turn)
                    self.idle.stop()
                if self.closed:
                    return None
                if (claim := self._runs.claim(lane)) is not None:
                    if self._runs.has_more(lane):
                        # There may be more runs than `issue` expected. No worker sleeps while units are open.
                        workers.wake(1)
                    return claim
                self.idle.start()
                turn = workers.join()
            turn.acquire()

    def deliver(self, ticket: T, units: int, seconds: float) -> bool:
        """Report that `units` units took `seconds`. Return True if they were the last ones of the ticket.

        The worker that gets True finishes the batch and calls `complete()`.
        """
        with self._lock:
            return self._runs.deliver(ticket, units, seconds) and not ticket.dropped

    def complete(self, ticket: T) -> None:
        """Hand `ticket`, whose batch is finished, to the collector or to the loop."""
        with self._lock:
            if ticket.dropped:
                return
            self._complete_count += 1
            self._complete_bytes += ticket.nbytes
            self._measured += 1
            self._measured_bytes += ticket.nbytes
            if self.collected:
                ticket.stage = COMPLETE
                self._collector.wake()
            else:
                self.publish(ticket)

    # ---- the collector ----

    def collect(self) -> T | None:
        """Wait for the next complete ticket, in order if the window is. Return None once the window is closed."""
        turn = None
        while True:
            with self._lock:
                if turn:
                    self._collector.leave(turn)
                if self.closed:
                    return None
                for ticket in self._flight:
                    if ticket.stage == COMPLETE:
                        return ticket
                    if self.in_order and ticket.stage == OPEN:
                        break
                turn = self._collector.join()
            turn.acquire()

    def publish(self, ticket: T) -> None:
        """Hand `ticket` to the loop."""
        with self._lock:
            if ticket.dropped:
                return
            ticket.stage = READY
            self._ready_tickets.append(ticket)
            if not self.in_order or ticket is self._flight[0]:
                self._loop.wake()

    # ---- anyone ----

    def close(self, fault: BaseException | None = None) -> None:
        """Wake every thread that waits, and let none wait again. Any thread may call this, any number of times.

        If a `fault` ended a thread of the pipeline, `take()` raises `WorkerCrashError` with it as the cause.
        """
        with self._lock:
            self._fault = fault or self._fault
            self.closed = True
            for ticket in tuple(self._flight):
                ticket.dropped = True
            if self.listener is not None:
                self.listener.on_close()
            for line in (*self._workers, self._collector, self._loop):
                line.close()
            self.changes.close()

    def counts(self) -> WindowCounts:
        """Return a snapshot of the waits since `recount()`."""
        with self._lock:
            occupancy = self._occupancy_sum / self._takes if self._takes else 0.0
            return WindowCounts(self._waits.seconds(), self.idle.seconds(), occupancy)


_windows: weakref.WeakSet[Window[Any]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # A thread that held one of these locks does not exist here. The forking thread held none: no section forks.
    for window in list(_windows):
        window._make_locks()
        window.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
