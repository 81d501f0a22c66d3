"""How many samples each source of a mixture gives to each global batch, and what it has given before.

The number is a function of the step alone, until a source drops out. So any step is found by adding up, chunk by chunk,
from the nearest step that is known.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload._kit.hashing import GOLDEN, MASK

Weights = Mapping[str, float]
Schedule = Weights | Mapping[int, Weights] | Callable[[int], Weights]
Counts = NDArray[np.int64]  # [sources]

_STRIDE = 1 << 18  # samples between the points that are stored


class Point(NamedTuple):
    """A global step, and what the sources gave before it."""

    epoch: int
    began: int
    """The global step that the epoch began with. Global steps are counted over all epochs."""
    given_then: Counts
    """`given` at that step."""
    step: int
    given: Counts

    def after(self, numbers: NDArray[np.int64]) -> Point:
        """Return the point after steps with these numbers: int64[steps, sources]."""
        return self._replace(step=self.step + len(numbers), given=self.given + numbers.sum(axis=0))

    def next_epoch(self) -> Point:
        """Return the beginning of the next epoch, if this is the end of one."""
        return Point(self.epoch + 1, self.step, self.given, self.step, self.given)


class WeightSchedule:
    """The weights at each global step.

    Raises ValueError or TypeError for weights that are no weights of these sources.
    """

    def __init__(self, schedule: Schedule, names: list[str]) -> None:
        self._names = names
        self._function: Callable[[int], Weights] | None = None
        self._own: list[tuple[int, NDArray[np.float64]]] = []
        if callable(schedule):
            self._function = schedule
            self._row(schedule(0))
            return
        if not isinstance(schedule, Mapping):
            raise TypeError(f"weights must be a dict or a function of the step, got {schedule!r}")
        by_step = all(isinstance(key, int) for key in schedule)
        rows: Any = schedule if by_step else {0: schedule}
        self._own = [(step, self._row(row)) for step, row in rows.items()]
        steps = [*rows]
        if steps[:1] != [0] or steps != sorted(steps):
            raise ValueError(
                f"weights by step must begin with step 0, in ascending order, got the steps {steps}"
            )

    def rows(self, step: int, count: int) -> NDArray[np.float64]:
        """Return the weights at `count` global steps from `step` on: float64[count, sources]."""
        rows = np.empty((count, len(self._names)))
        if self._function is not None:
            for row in range(count):
                rows[row] = self._row(self._function(step + row))
        for begin, weights in self._own:
            rows[max(0, begin - step) :] = weights
        return rows

    def _row(self, weights: Weights) -> NDArray[np.float64]:
        if not isinstance(weights, Mapping) or set(weights) != set(self._names):
            raise ValueError(f"weights must name each source once, {self._names}, got {weights!r}")
        row = np.array([weights[name] for name in self._names], np.float64)
        if not ((row >= 0).all() and 0 < sum(row.tolist()) < math.inf):
            raise ValueError(
                f"weights and their sum must be finite, 0 or more, and not all 0, got {weights!r}"
            )
        return row


class Shares:
    """The numbers of samples that sources give, by step.

    Args:
        sizes: samples of each source: int64[sources].
        batch: samples in a global batch.
        schedule: the weights.
        point: a known point. Steps before it cannot be found.
        epoch_steps: global steps in an epoch, if sources repeat.
        drop: whether an exhausted source drops out. If not, and without `epoch_steps`, it ends the epoch.
        key: 64 bits that select the numbers.
    """

    def __init__(
        self,
        sizes: Counts,
        batch: int,
        schedule: WeightSchedule,
        point: Point,
        *,
        epoch_steps: int | None,
        drop: bool,
        key: int,
    ) -> None:
        self._sizes, self.batch, self._schedule = sizes, batch, schedule
        self._epoch_steps, self._drop, self._key = epoch_steps, drop, key
        self._stride = max(1, _STRIDE // batch)
        self._known = [point]  # in order
        self._latest = point  # where the last search ended

    def seek(self, epoch: int, step: float) -> Point:
        """Return the point before a step of an epoch, counted from 0. Return the epoch's end if it has fewer steps.

        An infinite `step` asks for the end.

        Raises ValueError if the point lies before the first known one.
        """
        target, known = (epoch, step), self._known
        place = bisect_right(known, target, key=_in_epoch)
        if not place:
            first, local = _in_epoch(known[0])
            raise ValueError(
                f"step {step} of epoch {epoch} lies before the state that was loaded: the first step that can be read "
                f"again is {local} of epoch {first}. Make a new Mixture to begin anew"
            )
        point, latest = known[place - 1], self._latest
        if _in_epoch(point) < _in_epoch(latest) <= target:
            point = latest
        while _in_epoch(point) < target:
            left = step - (point.step - point.began) if point.epoch == epoch else math.inf
            numbers = self.numbers(point, int(min(left, self._stride)))
            if not len(numbers) and point.epoch == epoch:
                break
            point = point.after(numbers) if len(numbers) else point.next_epoch()
            if len(numbers) in (0, self._stride) and _in_epoch(known[-1]) < _in_epoch(point):
                known.append(point)
        self._latest = point
        return point

    def at(self, step: int) -> Point:
        """Return the point before a global step, in the epoch that it ends if it lies between two."""
        earlier = bisect_left(self._known, step, key=lambda known: known.step)
        point = self._known[max(0, earlier - 1)]
        while (point := self.seek(point.epoch, step - point.began)).step < step:
            point = point.next_epoch()
        return point

    def numbers(self, point: Point, steps: int) -> NDArray[np.int64]:
        """Return the samples of each source in the next steps: int64[steps, sources], fewer at an epoch's end."""
        found = [np.empty((0, len(self._sizes)), np.int64)]
        while steps > 0:
            left = self._sizes - (point.given - point.given_then)
            if self._epoch_steps is not None:
                most = self._epoch_steps - (point.step - point.began)
                left = np.full_like(left, np.iinfo(np.int64).max)
            elif not self._drop and (left <= 0).any():
                break
            else:  # the steps that the epoch can still have: a source gives less than a batch beyond its last sample
                most = int(left[left > 0].sum()) // self.batch + len(left) + 1
            block = self._block(point.step, min(steps, most), left > 0)
            ends = ((np.cumsum(block, axis=0) >= left) & (left > 0)).any(axis=1)
            block = block[: int(ends.argmax()) + 1] if ends.any() else block
            if not len(block):
                break
            found.append(block)
            point, steps = point.after(block), steps - len(block)
        return np.concatenate(found)

    def _block(self, step: int, steps: int, alive: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the numbers of the next steps if these sources give, up to a step at which none of them has weight."""
        ends = np.cumsum(self._schedule.rows(step, max(0, steps)) * alive, axis=1)
        total = ends[:, -1:]
        none = np.flatnonzero(total[:, 0] == 0)
        rows = int(none[0]) if len(none) else len(ends)
        ends, number = ends[:rows] / total[:rows], np.arange(rows)
        # Fractions of 32 bits: their sum with an integer is exact, so no sample is lost to rounding.
        begin = np.uint64((step * GOLDEN + self._key) & MASK)
        words = begin + number.astype(np.uint64) * np.uint64(GOLDEN)
        offset = (words >> np.uint64(32)) / 2.0**32
        bounds = np.floor(self.batch * ends + offset[:, None]).astype(np.int64)
        return np.diff(bounds, axis=1, prepend=0)


def _in_epoch(point: Point) -> tuple[int, int]:
    """Return the epoch of a point, and its step in that epoch."""
    return point.epoch, point.step - point.began
