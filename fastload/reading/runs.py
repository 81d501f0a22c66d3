"""The batches that workers share: each claims a run of units of the oldest, and one learns that all are delivered."""

from __future__ import annotations

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from fastload.memory.ticket import Ticket
from fastload.reading.run_length import RUN_SECONDS, RunLength

T = TypeVar("T", bound=Ticket)


class Claim(NamedTuple, Generic[T]):
    """Units `start` to `stop` of a ticket. Only the worker that claimed them works on them."""

    ticket: T
    start: int
    stop: int


class Runs(Generic[T]):
    """Tickets with units to claim, in lines. The lock of the owner owns it, and these fields of its tickets.

    Args:
        lanes: lines from which workers claim: one for all workers, or one for each if a ticket belongs to a worker.
        seconds: how long a run should last. None: a run is a whole ticket.
    """

    def __init__(self, lanes: int, seconds: float | None = RUN_SECONDS) -> None:
        self._open = [deque[T]() for _ in range(lanes)]
        self._length = None if seconds is None else RunLength(seconds)

    def add(self, ticket: T, lane: int) -> int:
        """Let workers of a lane claim units of a ticket. Return the number of runs that it is expected to have."""
        self._open[lane].append(ticket)
        return -(-ticket.units // self._of(ticket))

    def claim(self, lane: int) -> Claim[T] | None:
        """Claim units of the oldest ticket of a lane. Return None if it has none."""
        if not self._open[lane]:
            return None
        ticket = self._open[lane][0]
        start = ticket.claimed
        ticket.claimed = min(start + self._of(ticket), ticket.units)
        if ticket.claimed == ticket.units:
            self._open[lane].popleft()
        return Claim(ticket, start, ticket.claimed)

    def has_more(self, lane: int) -> bool:
        """Return whether a lane has units to claim."""
        return bool(self._open[lane])

    def deliver(self, ticket: T, units: int, seconds: float) -> bool:
        """Note that `units` units took `seconds`. Return whether they were the last ones of the ticket."""
        if self._length is not None:
            self._length.learn(seconds / units)
        ticket.delivered += units
        return ticket.delivered == ticket.units

    def clear(self) -> None:
        """Forget all tickets."""
        for line in self._open:
            line.clear()

    def _of(self, ticket: T) -> int:
        return ticket.units if self._length is None else self._length.of(ticket.units)
