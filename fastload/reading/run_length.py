"""How many units of a batch a worker claims at once."""

from __future__ import annotations

RUN_SECONDS = 250e-6
"""How long a run (neighbours in a batch, claimed at once) should last. That is 50 times the cost of claiming and
delivering, but short enough that a slow run holds back few cheap samples."""

FILL_SECONDS = 2e-3
"""How long a run should last if the dataset fills it in one call: about 16 images, so that a call costs little."""


class RunLength:
    """Learns how many units one claim should take, so that a run lasts about `seconds`. A window's lock owns it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._unit_seconds = 0.0  # estimated cost of a unit; 0 = unknown

    def of(self, units: int) -> int:
        """Return the number of units to claim at once, at most `units`. It is 1 while their cost is unknown."""
        if not self._unit_seconds:
            return 1
        return max(1, min(units, int(self._seconds / self._unit_seconds)))

    def learn(self, unit_seconds: float) -> None:
        """Take a step of at most 25 % towards what a unit cost, so that the estimate follows the median run.

        A single slow or fast unit, from a thread that lost its core or from a cache, hardly changes the next runs.
        """
        known = self._unit_seconds
        self._unit_seconds = (
            min(max(unit_seconds, known / 1.25), known * 1.25) if known else unit_seconds
        )
