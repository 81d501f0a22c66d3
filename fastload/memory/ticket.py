"""A place in the order, which the window hands from thread to thread."""

from __future__ import annotations

OPEN, COMPLETE, READY, TAKEN = range(4)
"""The stages of a ticket."""


class Ticket:
    """A place in the order. The lock of the window that issued it owns all fields."""

    __slots__ = (
        "claimed",
        "delivered",
        "dropped",
        "lane",
        "lost",
        "nbytes",
        "number",
        "stage",
        "units",
    )

    def __init__(self, units: int, lane: int = 0) -> None:
        self.units = units
        self.lane = lane
        self.nbytes = 0  # once complete, for a window that is bounded in bytes
        self.number = -1
        self.claimed = 0
        self.delivered = 0
        self.stage = OPEN
        self.dropped = False  # set once, under the lock; workers read it without, and stop reading
        self.lost = False  # whether no worker is left to read it

    def release(self) -> None:
        """Drop what a dropped ticket carries. The window calls this without its lock, also during a run."""
