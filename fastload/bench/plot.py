"""Plot rows: rate and time to first batch over the number of workers. The only file that needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fastload.bench.plan import LOADER_NAMES, TRANSFORMS, LoaderKind, Workload
from fastload.bench.report import Row, noise
from fastload.measure.tables import Spread

_INK, _MUTED, _GRID, _ALARM = "#1f2933", "#66727f", "#e4e7eb", "#b42318"
_STYLE: dict[LoaderKind, tuple[str, str]] = {
    "thread": ("#0b6bcb", "o"),
    "plan": ("#0f8a7e", "^"),
    "torch": ("#d9730d", "s"),
    "serial": ("#66727f", ""),
}
_PARALLEL: tuple[tuple[LoaderKind, float], ...] = (
    ("thread", -0.015),
    ("plan", 0.0),
    ("torch", 0.015),
)
"""Each parallel loader, and the shift of its points, so that equal ones do not hide each other."""


def save_plot(path: Path, rows: Sequence[Row], workload: Workload, *, caption: str) -> None:
    """Draw the rows (at least one) with the fewest ranks into a PNG, or another format that the suffix names.

    Points are medians, and bars reach from the smallest to the largest run. `caption` names the machine.
    """
    fewest = min(row.ranks for row in rows)
    rows = [row for row in rows if row.ranks == fewest]
    figure = Figure(figsize=(10.0, 4.9), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.06, right=0.985, top=0.83, bottom=0.235, wspace=0.17)
    _panel(left, rows, lambda row: row.rate, title="Images per second", better="higher is better")
    _panel(
        right,
        rows,
        lambda row: row.first_batch_s,
        title="Seconds to the first batch",
        better="lower is better",
    )
    named = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    labels = [label for label in LOADER_NAMES.values() if label in named]
    left.legend(
        [h[0] if isinstance(h := named[label], ErrorbarContainer) else h for label in labels],
        labels,
        loc="lower left",
        bbox_to_anchor=(-0.015, 1.12),
        ncols=4,
        frameon=False,
        fontsize=10,
        labelcolor=_INK,
        handlelength=1.6,
        borderpad=0,
        columnspacing=1.8,
    )
    figure.text(
        0.06,
        0.025,
        _conditions(rows, workload) + "\n" + caption.replace("; ", "\n", 1),
        fontsize=7.5,
        color=_MUTED,
        linespacing=1.5,
    )
    if warning := noise(rows):
        figure.text(0.985, 0.056, warning, fontsize=8, color=_ALARM, ha="right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _panel(
    axes: Axes, rows: Sequence[Row], value: Callable[[Row], Spread], *, title: str, better: str
) -> None:
    """Draw one figure over the number of workers: a line for each parallel loader, a level for the serial one."""
    counts = sorted({row.workers for row in rows if row.workers}) or [1]
    for kind, aside in _PARALLEL:
        mine = sorted((row for row in rows if row.loader == kind), key=lambda row: row.workers)
        if not mine:
            continue
        colour, marker = _STYLE[kind]
        spreads = [value(row) for row in mine]
        axes.errorbar(
            [math.log2(row.workers) + aside for row in mine],
            [spread.median for spread in spreads],
            yerr=[[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]],
            label=LOADER_NAMES[kind],
            color=colour,
            marker=marker,
            markersize=6,
            linewidth=2,
            elinewidth=1.2,
            capsize=0,
        )
    for row in (row for row in rows if row.loader == "serial"):
        label, (colour, _) = LOADER_NAMES["serial"], _STYLE["serial"]
        spread = value(row)
        axes.axhline(spread.median, color=colour, linewidth=1.5, linestyle=(0, (4, 3)), label=label)
        axes.axhspan(spread.low, spread.high, color=colour, alpha=0.15, linewidth=0)
    _dress(axes, counts)
    axes.set_title(title, loc="left", fontsize=11.5, color=_INK, fontweight="bold", pad=10)
    axes.set_title(better, loc="right", fontsize=8.5, color=_MUTED, pad=10)


def _dress(axes: Axes, counts: Sequence[int]) -> None:
    positions = [math.log2(count) for count in counts]
    axes.set_xticks(positions, [str(count) for count in counts])
    axes.set_xlim(positions[0] - 0.25, positions[-1] + 0.25)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.set_xlabel("workers (threads or processes)", fontsize=9, color=_MUTED)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, labelcolor=_INK)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_MUTED)


def _conditions(rows: Sequence[Row], workload: Workload) -> str:
    step = f", simulated step of {workload.step_ms:g} ms" if workload.step_ms > 0 else ""
    runs = max(row.runs for row in rows)
    ranks = f", {rows[0].ranks} ranks on one node" if rows[0].ranks > 1 else ""
    points = "One run of each." if runs == 1 else f"Median and range of {runs} runs."
    return (
        f"JPEG files, {TRANSFORMS[workload.transform]}, batches of {workload.batch_size}, {workload.steps} steps, "
        f"page cache {workload.cache}{step}{ranks}. {points}"
    )
