"""The figures of a benchmark as one bar chart. The only file that needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from matplotlib.figure import Figure

from fastload.bench.plan import LoaderKind
from fastload.bench.report import Row, conditions

_PANELS = {
    "rate_global": "Images per second: higher is better",
    "first_batch_s": "Seconds to the first batch: lower is better",
}
_COLOURS = dict(zip(get_args(LoaderKind), ("C7", "C0", "C3", "C4", "C1", "C2"), strict=True))


def draw(document: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Draw rates and first batches.

    Bars are medians, with lines from the smallest to the largest run. The last lines name the conditions. `rows` are
    those of the document, by `report.summarise`.
    """
    figure = Figure((10.0, 2.0 + 0.35 * len(rows)), dpi=160, layout="constrained")
    for axes, (value, title) in zip(
        figure.subplots(1, len(_PANELS), sharey=True), _PANELS.items(), strict=True
    ):
        for row in reversed(rows):  # the first one at the top
            if spread := row.figures[value]:
                reach = [[spread.median - spread.low], [spread.high - spread.median]]
                axes.barh(row.name, spread.median, xerr=reach, color=_COLOURS[row.loader])
        axes.set_axisbelow(True)
        axes.grid(axis="x")
        axes.set_title(title, loc="left")
    figure.supxlabel("\n".join(conditions(document, rows)), fontsize=7.5)
    return figure
