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
        self.dropped = False
        self.lost = False  # whether a worker that had died claimed it

    def drop(self, *, closing: bool) -> None:
        """Tell its workers to stop reading. The window calls this under its lock, also in a finalizer.

        `closing` says whether the window is closed, rather than emptied for another epoch.
        """
        self.dropped = True

    def release(self) -> None:
        """Drop what a dropped ticket carries. The window calls this without its lock, also during a run."""
