"""Charts of a benchmark: rates and first batches, and stages. The only file that needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fastload.bench.plan import LOADER_NAMES, TRANSFORMS, LoaderKind, Workload
from fastload.bench.report import Row, noise
from fastload.measure.tables import Spread
from fastload.telemetry.snapshot import LOADER_STAGES

_MUTED = "#66727f"
_LOOKS: Any = {
    "font.size": 9,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "figure.constrained_layout.use": True,
    "figure.dpi": 160,
}
_PARALLEL: dict[LoaderKind, tuple[str, str, float]] = {
    "thread": ("#0b6bcb", "o", 0.99),
    "plan": ("#0f8a7e", "^", 1.0),
    "torch": ("#d9730d", "s", 1.01),
}
"""Colour and marker of each parallel loader, and a factor for its numbers of workers, so that equal points do not hide
each other."""

_STAGES = {
    "read": ("read", "#0f8a7e"),
    "decode": ("decode", "#1f6fd1"),
    "transform": ("transform", "#7fb2ee"),
    "sample": ("rest of the sample", "#b9cde2"),
    "collate": ("collate", "#8655b5"),
    "sampler": ("sampler", "#9c6b12"),
    "idle": ("no room in the queue", "#e4e7eb"),
    "rest": ("between samples", "#cfd6dd"),
    "step": ("the loop's step", "#57a773"),
}
"""Name and colour of each stage, in the order in which a sample passes them."""


@rc_context(_LOOKS)
def save_plot(path: Path, rows: Sequence[Row], workload: Workload, *, caption: str) -> None:
    """Draw the rows (at least one) with the fewest ranks into a PNG, or another format that the suffix names.

    Points are medians, and bars reach from the smallest to the largest run. `caption` names the machine.
    """
    fewest = min(row.ranks for row in rows)
    rows = [row for row in rows if row.ranks == fewest]
    figure = rates(rows)
    lines = [_conditions(rows, workload), caption.replace("; ", "\n", 1), noise(rows)]
    figure.supxlabel("\n".join(filter(None, lines)), fontsize=7.5, color=_MUTED)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


@rc_context(_LOOKS)
def rates(rows: Sequence[Row]) -> Figure:
    """Draw rates and first batches of rows (at least one) with equal ranks over the number of workers."""
    figure = Figure((10.0, 4.9))
    left, right = figure.subplots(1, 2)
    _panel(left, rows, lambda row: row.rate, "Images per second", "higher is better")
    _panel(
        right, rows, lambda row: row.first_batch_s, "Seconds to the first batch", "lower is better"
    )
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=6)
    return figure


@rc_context(_LOOKS)
def stages(shares: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw a bar for each run, by name, divided by the shares (0 to 1) of its stages."""
    figure = Figure((10.0, 1.3 + 0.32 * len(shares)))
    axes = figure.subplots()
    ends = np.zeros(len(shares))
    for stage, (name, colour) in _STAGES.items():
        widths = np.array([parts.get(stage, 0.0) for parts in shares.values()])
        if widths.any():
            axes.barh([*shares], widths, left=ends, color=colour, height=0.7, label=name)
            ends += widths
    axes.set_xlim(0, 1)
    axes.set_ylim(len(shares) - 0.5, -0.5)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.spines["bottom"].set_visible(False)
    figure.legend(loc="outside upper left", ncols=7)
    return figure


def stage_shares(stats: Mapping[str, Any], *, workers: int) -> dict[str, float]:
    """Return each stage's share (0 to 1) of the threads' time, in the order in which a sample passes them.

    Without workers, the thread is that of the loop, and "step" is all that is not loading. With workers, "idle" is the
    wait for room in the queue, and "rest" the time between samples. "sample" excludes stages that the dataset named.
    """
    seconds = {name: stage["seconds"] for name, stage in stats["stages"].items()}
    parts = {name: s for name, s in seconds.items() if name not in LOADER_STAGES}
    parts["sample"] = max(0.0, seconds.get("sample", 0.0) - sum(parts.values()))
    parts["collate"] = seconds.get("collate", 0.0)
    if workers:
        parts["idle"] = stats["worker_wait_s"]
    else:
        parts["sampler"] = seconds.get("sampler", 0.0)
    left = max(1, workers) * stats["elapsed_s"] - sum(parts.values())
    parts["rest" if workers else "step"] = max(0.0, left)
    whole = sum(parts.values())
    return {name: parts[name] / whole for name in _STAGES if parts.get(name, 0.0) > 0}


def _panel(
    axes: Axes, rows: Sequence[Row], value: Callable[[Row], Spread], title: str, better: str
) -> None:
    """Draw one figure over the number of workers: a line for each parallel loader, a level for the serial one."""
    for kind, (colour, marker, aside) in _PARALLEL.items():
        mine = sorted((row for row in rows if row.loader == kind), key=lambda row: row.workers)
        if mine:
            spreads = [value(row) for row in mine]
            axes.errorbar(
                [row.workers * aside for row in mine],
                [spread.median for spread in spreads],
                yerr=[[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]],
                label=LOADER_NAMES[kind],
                color=colour,
                marker=marker,
                linewidth=2,
                elinewidth=1.2,
            )
    for row in (row for row in rows if row.loader == "serial"):
        label, spread = LOADER_NAMES["serial"], value(row)
        axes.axhline(spread.median, color=_MUTED, linestyle=(0, (4, 3)), label=label)
        axes.axhspan(spread.low, spread.high, color=_MUTED, alpha=0.15, linewidth=0)
    counts = sorted({row.workers for row in rows if row.workers}) or [1]
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlim(counts[0] * 0.85, counts[-1] * 1.18)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("workers (threads or processes)")
    axes.grid(axis="y")
    axes.set_title(title)
    axes.set_title(better, loc="right", fontsize=8.5, fontweight="normal", color=_MUTED)


def _conditions(rows: Sequence[Row], workload: Workload) -> str:
    step = f", simulated step of {workload.step_ms:g} ms" if workload.step_ms > 0 else ""
    runs = max(row.runs for row in rows)
    ranks = f", {rows[0].ranks} ranks on one node" if rows[0].ranks > 1 else ""
    points = "One run of each." if runs == 1 else f"Median and range of {runs} runs."
    return (
        f"JPEG files, {TRANSFORMS[workload.transform]}, batches of {workload.batch_size}, {workload.steps} steps, "
        f"page cache {workload.cache}{step}{ranks}. {points}"
    )
