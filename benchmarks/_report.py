"""Repeats to rows, rows to a table: medians with their spread, ratios within a repeat, aims met or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from fastload._kit.tables import columns
from fastload.measure.repeats import Spread

Figures = dict[str, float]

Results = Mapping[str, Sequence[Figures | None]]
"""The figures of each case, by repeat. None if it failed."""


@dataclass(frozen=True, slots=True)
class Aim:
    """The bound that the median of a row's ratio, or of its figure, should reach."""

    sense: Literal[">=", "<="]
    bound: float
    of: Literal["ratio", "figure"] = "ratio"

    def met(self, figure: Spread | None, ratio: Spread | None) -> bool | None:
        """Return whether it is reached, or None without a figure."""
        value = ratio if self.of == "ratio" else figure
        if value is None:
            return None
        return value.median >= self.bound if self.sense == ">=" else value.median <= self.bound

    def __str__(self) -> str:
        return f"{self.sense} {self.bound:g}" + (" x" if self.of == "ratio" else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of one configuration, and what it is compared with."""

    name: str
    unit: str
    figure: Spread | None
    """Over the repeats that succeeded; None if none did."""
    reference: str | None
    ratio: Spread | None
    """Figure over the reference's figure of the same repeat, then the spread of these over the repeats."""
    aim: Aim | None
    met: bool | None


def row(
    results: Results,
    case: str,
    key: str,
    *,
    unit: str,
    name: str | None = None,
    against: tuple[str, str] | str | None = None,
    reference: str | None = None,
    aim: Aim | None = None,
) -> Row:
    """Return a row that compares a figure with another of the same repeat.

    Args:
        case, key: name of the case, and of its figure.
        unit: unit of the figure.
        name: name of the row. None: that of the case.
        against: case and key of the figure that it is divided by, or the key of another figure of this case. None: no
            ratio.
        reference: name of that figure in the table. None: its case, or its key.
        aim: bound to reach, if any.
    """
    values = _by_repeat(results, case, key)
    figure, ratio = Spread.of(values), None
    if isinstance(against, str):
        reference, against = reference or against, (case, against)
    if against is not None:
        reference = reference or against[0]
        pairs = zip(values, _by_repeat(results, *against), strict=True)
        ratio = Spread.of(value / base for value, base in pairs if value is not None and base)
    return Row(
        name=name or case,
        unit=unit,
        figure=figure,
        reference=reference,
        ratio=ratio,
        aim=aim,
        met=None if aim is None else aim.met(figure, ratio),
    )


def _by_repeat(results: Results, case: str, key: str) -> list[float | None]:
    return [None if figures is None else figures[key] for figures in results[case]]


def best(results: Results, cases: Iterable[str], key: str) -> str:
    """Return the case with the largest median of figure `key`, or the first if none has figures.

    It is one case for all repeats: luck would choose another in each.
    """

    def median(case: str) -> float:
        found = Spread.of(_by_repeat(results, case, key))
        return found.median if found else float("-inf")

    return max(cases, key=median)


_HEADER = ("", "median", "min-max", "unit", "x", "min-max", "of", "aim", "")
_LEFT = (0, 3, 6, 7, 8)


def table(sections: Mapping[str, Sequence[Row]], *, judged: bool) -> str:
    """Return all rows as one table, with a heading for each benchmark. `judged=False` leaves the verdicts out."""
    cells = [_cells(row, judged) for rows in sections.values() for row in rows]
    header, rule, *lines = columns([_HEADER, *cells], left=_LEFT)
    text, left = [header, rule], iter(lines)
    for title, rows in sections.items():
        text += ["", title, *islice(left, len(rows))]
    return "\n".join(text)


def _cells(row: Row, judged: bool) -> tuple[str, ...]:
    if row.aim is None:
        verdict = ""
    elif not judged:
        verdict = "not judged"
    else:
        verdict = {True: "met", False: "NOT MET", None: "no figure"}[row.met]
    return (
        f"  {row.name}",
        *_texts(row.figure),
        row.unit,
        *_texts(row.ratio),
        row.reference or "",
        str(row.aim or ""),
        verdict,
    )


def _texts(spread: Spread | None) -> tuple[str, str]:
    """Return median and range of a spread, as the table shows them."""
    if spread is None:
        return "-", ""
    low, high = number(spread.low), number(spread.high)
    return number(spread.median), "" if spread.low == spread.high else f"{low}-{high}"


def number(value: float) -> str:
    """Return a figure as text."""
    return format(value, ",.0f" if abs(value) >= 100 else ".3g")
