"""Figures of repeated runs, and tables of text."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of repeated runs, with the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the spread of the values that are not None, or None if there are no such values."""
        known = [value for value in values if value is not None]
        return cls(statistics.median(known), min(known), max(known)) if known else None


def columns(lines: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Return lines of cells as lines of text, with a rule after the first. Columns in `left` are aligned left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
