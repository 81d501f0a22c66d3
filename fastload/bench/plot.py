"""The charts of a benchmark as one figure. The only file that needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fastload.bench.plan import LOADER_NAMES
from fastload.bench.report import Row, partial
from fastload.measure.provenance import caption

_PANELS = {
    "rate_global": "Images per second: higher is better",
    "first_batch_s": "Seconds to the first batch: lower is better",
}


def draw(document: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Draw rates and first batches.

    Points are medians, and bars reach from the smallest to the largest run. The last lines name the conditions.
    `rows` are those of the document, by `report.summarise`.
    """
    figure = Figure((10.0, 5.3), dpi=160, layout="constrained")
    for axes, value in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        _panel(axes, rows, value)
    figure.supxlabel(_conditions(document, rows), fontsize=7.5)
    return figure


def _panel(axes: Axes, rows: Sequence[Row], value: str) -> None:
    """Draw one figure over the number of workers: a line for each parallel loader, a level for the serial one."""
    colours = ("C0", "C2", "C3", "C4", "C1", "C7")
    for kind, colour, marker in zip(LOADER_NAMES, colours, "o^vDs ", strict=True):
        mine = sorted((row for row in rows if row.loader == kind), key=lambda row: row.workers)
        spreads = [spread for row in mine if (spread := row.figures[value])]
        if mine and kind == "serial":
            axes.axhline(spreads[0].median, color=colour, linestyle="--", label=LOADER_NAMES[kind])
            axes.axhspan(spreads[0].low, spreads[0].high, color=colour, alpha=0.2, linewidth=0)
        elif mine:
            axes.errorbar(
                [row.workers for row in mine],
                [spread.median for spread in spreads],
                yerr=[[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]],
                label=LOADER_NAMES[kind],
                color=colour,
                marker=marker,
            )
    counts = sorted({row.workers for row in rows if row.workers}) or [1]
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlim(counts[0] * 0.85, counts[-1] * 1.18)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("workers (threads or processes)")
    axes.grid(axis="y")
    axes.set_title(_PANELS[value], loc="left")
    if value == "rate_global":
        axes.legend()


def _conditions(document: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the lines below the charts: what was loaded, on which machine, and what makes the figures doubtful."""
    work = document["workload"] or {}
    loaded = (f"{name} {work[name]}" for name in work if name not in ("file_list", "base_dir"))
    runs = max((row.runs for row in rows), default=0)
    lines = [
        ", ".join(loaded),
        f"step {document['step']}; median and range of {runs} runs",
        partial(len(document["runs"]), document["planned_runs"]),
        caption(document["provenance"]),
        document["noise"],
    ]
    return "\n".join(filter(None, lines))
