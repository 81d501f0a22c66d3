"""Repeated runs: their turns, the medians of their figures with their range, and figures as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


def turns(cases: Sequence[T], count: int) -> Iterator[tuple[int, T]]:
    """Yield each case with the number of its repeat.

    Every second repeat is in reverse order, so that a machine that slowly gets faster or slower favours no case.
    """
    for repeat in range(count):
        for case in cases[:: -1 if repeat % 2 else 1]:
            yield repeat, case


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of repeated runs, with the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the spread of the values that are not None, or None if there are no such values."""
        from statistics import median  # takes 5 ms, for which `fastload bench --help` would wait

        known = [value for value in values if value is not None]
        return cls(median(known), min(known), max(known)) if known else None


def figure(value: float | None, form: str = ".2f") -> str:
    """Return a figure as text, or "n/a" for None and NaN."""
    return "n/a" if value is None or math.isnan(value) else format(value, form)
