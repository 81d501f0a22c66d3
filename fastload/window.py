"""The bounded, ordered hand-off between threads: every lock of the pipeline is here.

    loop             workers                      collector               loop
    issue(t)   ->    claim(), deliver(t)    ->    collect(), publish(t)   ->   take()
                     complete(t)

A *ticket* is a place in the order, one for each batch; its *units* (samples, or 1 where the batch
is read in one call) are shared out among the workers. The one bound is on places, not on lengths of
queues:

    issued - oldest ticket not yet taken <= depth

so nothing can fill up with late tickets while an early one is missing, and nothing needs to be
reordered without bound. With tickets taken in order this is `0 <= issued - taken <= depth`. The end
of the data is a count (nothing in flight and nothing more issued); there are no sentinels and no
time-outs as control flow. Closing wakes every waiter.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from contextlib import suppress
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar

from fastload.errors import LoaderClosedError, LoaderTimeoutError, WorkerCrashError
from fastload.telemetry import WaitClock

RUN_SECONDS = 250e-6
"""What is claimed, a run of neighbours within a batch, should last about this long: 50 times what claiming
and delivering it cost, and short enough that a slow one holds back no more than a few cheap samples."""

FILL_SECONDS = 2e-3
"""The same, if the dataset fills a run in one call: about 16 images, so that what Python does for a call vanishes."""

_OPEN, _COMPLETE, _READY, _TAKEN = range(4)

starting = threading.Lock()
"""Owns the number of threads that torch gives to new threads, while `workers` starts some that have one."""


class Ticket:
    """A place in the order. All fields belong to the lock of the window that issued it."""

    __slots__ = ("claimed", "delivered", "dropped", "lane", "nbytes", "number", "stage", "units")

    def __init__(self, units: int, lane: int = 0) -> None:
        self.units = units
        self.lane = lane
        self.nbytes = 0  # once complete, for a window that is bounded in bytes
        self.number = -1
        self.claimed = 0
        self.delivered = 0
        self.stage = _OPEN
        self.dropped = False

    def release(self) -> None:
        """Let go of what it carries: it is dropped, nobody will take it. Called without the lock, also
        while a run of it is in progress."""


T = TypeVar("T", bound=Ticket)


class Claim(NamedTuple, Generic[T]):
    """Units `start` to `stop` of a ticket, which the claiming worker alone now owns."""

    ticket: T
    start: int
    stop: int


class WindowCounts(NamedTuple):
    """What the window counted since the last `begin()`; seconds include waits that still go on."""

    consumer_wait_s: float
    worker_wait_s: float
    occupancy: float


class Window(Generic[T]):
    """A bounded window on an ordered stream of tickets, `depth` places wide.

    With `max_bytes`, it is also bounded by the bytes of the tickets in flight, each of those that are
    not complete yet counted as the mean so far; one is always let in, and only one until the first is
    complete.

    Workers claim from *lanes*: one for all of them where any may do any work, or one each where a
    ticket is a certain worker's.

    `collected=True` puts a collector between the workers and the loop. With `in_order=False`,
    `take()` gives whichever ticket is ready, and the bound counts from the oldest one not yet
    taken. Only one thread at a time may take and issue, the one that holds `taking`; only one may
    collect; any number may claim and deliver.
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
        self.run_seconds = run_seconds
        self.max_bytes = max_bytes
        self.lanes = lanes
        self.in_order = in_order
        self.collected = collected
        # Owns every field below and those of the tickets. Re-entrant, because a garbage collection
        # can start in any thread at any allocation, also one made under this lock, and run the
        # finalizer that closes this very window. That only sets flags, wakes, and reads the clock, so
        # a section that it interrupts finds its own state unchanged.
        self._make_locks()
        _windows.add(self)
        self._issued = 0
        self._flight: deque[T] = deque()  # issued, not taken; in order
        # Those of them with units to claim; in order, by lane.
        self._open: list[deque[T]] = [deque() for _ in range(self.lanes)]
        self._complete_bytes = 0  # of those in flight that are complete
        self._complete_count = 0
        self._measured = self._measured_bytes = 0  # of all that were ever complete
        self._ready_tickets: deque[T] = deque()  # those that can be taken; as they became ready
        self._unit_seconds = 0.0  # estimated cost of a unit; 0 = unknown
        self._closed = False
        self._fault: BaseException | None = None
        self._idle = WaitClock()
        self._consumer_wait_s = 0.0
        self._occupancy_sum = 0.0
        self._takes = 0

    def _make_locks(self) -> None:
        self._lock = threading.RLock()
        # Owns the loop's side, where several threads share one iterator: held by the one in `next()`.
        self.taking = threading.RLock()
        # Who waits, each thread at a lock of its own, to be woken when ...
        # ... a ticket of their lane has units to claim
        self._workers: list[deque[threading.Lock]] = [deque() for _ in range(self.lanes)]
        self._collector: deque[threading.Lock] = deque()  # a ticket is complete
        self._loop: deque[threading.Lock] = deque()  # a ticket can be taken
        self._pauses: deque[threading.Lock] = deque()  # tickets are dropped

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"Window(depth={self.depth}, issued={self._issued}, flight={len(self._flight)}, "
                f"open={sum(map(len, self._open))}, ready={len(self._ready_tickets)}, closed={self._closed})"
            )

    # ---- the loop ----

    def begin(self) -> None:
        """Discard what is in flight and start to count anew."""
        self.discard()
        self.recount()

    def recount(self) -> None:
        """Start to count anew."""
        with self._lock:
            self._idle.restart()
            self._consumer_wait_s = self._occupancy_sum = 0.0
            self._takes = 0

    def discard(self) -> None:
        """Forget every ticket in flight. Runs in progress deliver into nothing."""
        with self._lock:
            dropped = tuple(self._flight)
            for ticket in dropped:
                ticket.dropped = True
            self._flight.clear()
            self._ready_tickets.clear()
            self._complete_bytes = self._complete_count = 0
            for line in self._open:
                line.clear()
            self._wake(self._pauses)
        for ticket in dropped:
            ticket.release()

    def is_taking(self) -> bool:
        """Return whether this thread holds `taking`."""
        return self.taking._is_owned()  # type: ignore[attr-defined, no-any-return]

    def has_room(self) -> bool:
        """Whether one more ticket may be issued."""
        with self._lock:
            if not self._flight:
                return True
            if self._issued - self._flight[0].number >= self.depth:
                return False
            if self.max_bytes is None:
                return True
            if not self._measured:
                return False  # until it is known how large they are
            unknown = len(self._flight) - self._complete_count + 1
            mean = self._measured_bytes / self._measured
            return self._complete_bytes + unknown * mean <= self.max_bytes

    def oldest(self) -> T | None:
        """The ticket that has been in flight for longest."""
        with self._lock:
            return self._flight[0] if self._flight else None

    def issue(self, ticket: T) -> None:
        """Put `ticket` in the next place. The caller has seen `has_room()`; only its own thread
        could change that.

        A ticket of no units (one that failed before it could be read) is to be completed by the
        caller.
        """
        with self._lock:
            ticket.number = self._issued
            self._issued += 1
            self._flight.append(ticket)
            if ticket.units:
                self._open[ticket.lane].append(ticket)
                self._wake(self._workers[ticket.lane], -(-ticket.units // self._run_length(ticket)))

    def take(self, timeout: float | None = None) -> T | None:
        """Wait for the next ticket and take it out of the window; None at the end: nothing is in
        flight.

        Raises `LoaderTimeoutError` after `timeout` seconds (nothing is lost), `LoaderClosedError`,
        and `WorkerCrashError` where a thread of the pipeline itself failed.
        """
        started = turn = None
        try:
            while True:
                with self._lock:
                    if turn:
                        self._leave(self._loop, turn)
                    self.check()
                    if not self._flight:
                        return None
                    if started is None:
                        self._occupancy_sum += len(self._ready_tickets) / len(self._flight)
                        self._takes += 1
                    if self._takeable():
                        return self._pop()
                    turn = self._line_up(self._loop)
                now = perf_counter()
                if started is None:
                    started = now
                if timeout is not None and now >= started + timeout:
                    raise LoaderTimeoutError(f"DataLoader timed out after {timeout:g} seconds")
                turn.acquire(timeout=-1 if timeout is None else started + timeout - now)
        finally:
            if started is not None:
                with self._lock:
                    self._consumer_wait_s += perf_counter() - started

    def _pop(self) -> T:
        ticket = (self._flight if self.in_order else self._ready_tickets)[0]
        ticket.stage = _TAKEN
        self._complete_bytes -= ticket.nbytes
        self._complete_count -= 1
        self._flight.remove(ticket)
        self._ready_tickets.remove(ticket)
        return ticket

    def check(self) -> None:
        """Raise `WorkerCrashError` or `LoaderClosedError` if no ticket will come any more."""
        if self._fault is not None:
            raise WorkerCrashError("a loader thread ended unexpectedly") from self._fault
        if self._closed:
            raise LoaderClosedError("the loader was closed: begin another epoch with iter(loader)")

    def ready(self) -> T | None:
        """The ticket that `take()` would give now without waiting; None where it would wait, raise or end."""
        with self._lock:
            if self._closed or not self._flight or not self._takeable():
                return None
            return (self._flight if self.in_order else self._ready_tickets)[0]

    def _takeable(self) -> bool:
        return self._flight[0].stage == _READY if self.in_order else bool(self._ready_tickets)

    # ---- the workers ----

    def claim(self, lane: int = 0) -> Claim[T] | None:
        """Wait for units to work on in a lane; None when the window is closed."""
        workers, open_tickets = self._workers[lane], self._open[lane]
        turn = None
        while True:
            with self._lock:
                if turn:
                    self._leave(workers, turn)
                    self._idle.stop()
                if self._closed:
                    return None
                if open_tickets:
                    claim = self._claim(open_tickets)
                    if open_tickets:
                        # `issue` woke as many as it foresaw runs; whoever leaves work wakes one more,
                        # so that no worker sleeps beside open units, whatever was foreseen.
                        self._wake(workers, 1)
                    return claim
                self._idle.start()
                turn = self._line_up(workers)
            turn.acquire()

    def _claim(self, open_tickets: deque[T]) -> Claim[T]:
        ticket = open_tickets[0]
        start = ticket.claimed
        ticket.claimed = min(start + self._run_length(ticket), ticket.units)
        if ticket.claimed == ticket.units:
            open_tickets.popleft()
        return Claim(ticket, start, ticket.claimed)

    def deliver(self, ticket: T, units: int, seconds: float) -> bool:
        """Report `units` claimed units done in `seconds`. True for the one call that brings the
        last of a ticket.

        The worker that gets True finishes the batch and calls `complete()`.
        """
        with self._lock:
            cost = seconds / units
            # A step of at most 25 % towards what was seen, so that it follows the median run: neither
            # a thread that lost its core nor a sample that was in a cache decides about the next runs.
            known = self._unit_seconds
            self._unit_seconds = min(max(cost, known / 1.25), known * 1.25) if known else cost
            ticket.delivered += units
            return ticket.delivered == ticket.units and not ticket.dropped

    def complete(self, ticket: T) -> None:
        """The batch of `ticket` is made; hand it to the collector, or to the loop."""
        with self._lock:
            if ticket.dropped:
                return
            self._complete_count += 1
            self._complete_bytes += ticket.nbytes
            self._measured += 1
            self._measured_bytes += ticket.nbytes
            if self.collected:
                ticket.stage = _COMPLETE
                self._wake(self._collector)
            else:
                self.publish(ticket)

    def _run_length(self, ticket: T) -> int:
        """Units that one claim should take, to last about `run_seconds`; 1 while the cost is unknown."""
        if not self._unit_seconds:
            return 1
        return max(1, min(ticket.units, int(self.run_seconds / self._unit_seconds)))

    # ---- the collector ----

    def collect(self) -> T | None:
        """Wait for the next complete ticket, in order if the window is; None when the window is closed."""
        turn = None
        while True:
            with self._lock:
                if turn:
                    self._leave(self._collector, turn)
                if self._closed:
                    return None
                for ticket in self._flight:
                    if ticket.stage == _COMPLETE:
                        return ticket
                    if self.in_order and ticket.stage == _OPEN:
                        break
                turn = self._line_up(self._collector)
            turn.acquire()

    def publish(self, ticket: T) -> None:
        """The batch of `ticket` is what the loop shall see."""
        with self._lock:
            if ticket.dropped:
                return
            ticket.stage = _READY
            self._ready_tickets.append(ticket)
            if not self.in_order or ticket is self._flight[0]:
                self._wake(self._loop)

    # ---- anyone ----

    @property
    def closed(self) -> bool:
        """Whether `close()` was called. Read without the lock: one flag that is set once and never cleared."""
        return self._closed

    def close(self) -> None:
        """Wake every waiter and let nobody wait again. May be called from anywhere, any number of times."""
        try:
            self._close()
        except KeyboardInterrupt:
            self._close()  # Ctrl-C struck in the middle; nobody else would wake who was left asleep
            raise

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            for ticket in tuple(self._flight):
                ticket.dropped = True
            for line in (*self._workers, self._collector, self._loop, self._pauses):
                self._wake(line)

    def break_down(self, fault: BaseException) -> None:
        """A thread of the pipeline ends by `fault`: let the loop know, who might wait for it for ever."""
        with self._lock:
            self._fault = fault
        self.close()

    def pause(self, ticket: T, seconds: float) -> None:
        """Wait for `seconds`, or until `ticket` is dropped."""
        with self._lock:
            if ticket.dropped:
                return
            turn = self._line_up(self._pauses)
        turn.acquire(timeout=seconds)
        with self._lock:
            self._leave(self._pauses, turn)

    def _line_up(self, line: deque[threading.Lock]) -> threading.Lock:
        """A turn in `line`: a lock to be acquired once, without the window's, to wait until woken.

        Not `threading.Condition`: a `close()` out of a garbage collection in this very thread, after
        it looked at the state and before it is in line, would wake nobody, and the thread would
        sleep for ever. Here it is in line first and looks then. Nor does a wait end with a lock to be
        taken back, in the middle of which Ctrl-C could strike.
        """
        turn = threading.Lock()
        turn.acquire()
        line.append(turn)
        if self._closed:
            self._wake(line)
        return turn

    def _leave(self, line: deque[threading.Lock], turn: threading.Lock) -> None:
        """Take a `turn` that was waited for out of `line`, where an interrupted wake or none left it."""
        with suppress(ValueError):
            line.remove(turn)

    def _wake(self, line: deque[threading.Lock], n: int | None = None) -> None:
        """Wake the first `n` in line, or all.

        Released first and taken out of line then: if Ctrl-C strikes between, the thread is awake, and
        its turn, met again, either cannot be released or counts for a thread that is about to look
        for itself. All of the loop and of the collector are woken, although there is one of each:
        what an interrupted wait left in line must not take the place of who waits.
        """
        left = len(line) if n is None else n
        while left > 0:
            try:
                turn = line[0]
            except IndexError:
                return
            try:
                turn.release()
            except RuntimeError:
                pass
            else:
                left -= 1
            with suppress(ValueError):
                line.remove(turn)

    def counts(self) -> WindowCounts:
        """A snapshot of the waits since `begin()`."""
        with self._lock:
            occupancy = self._occupancy_sum / self._takes if self._takes else 0.0
            return WindowCounts(self._consumer_wait_s, self._idle.seconds(), occupancy)


_windows: weakref.WeakSet[Window[Any]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # The threads that might hold these locks do not exist here, so nobody will release them; and
    # the one thread that does exist was not inside a section, none of which can fork.
    global starting
    starting = threading.Lock()
    for window in list(_windows):
        window._make_locks()
        window._closed = True


os.register_at_fork(after_in_child=_after_fork_in_child)
