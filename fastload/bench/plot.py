"""Charts of a benchmark: rates and first batches, stages, the timeline. The only file that needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fastload.bench.plan import LOADER_NAMES, TRANSFORMS, LoaderKind, Workload
from fastload.bench.report import Row, noise
from fastload.bench.roofline import Ceiling
from fastload.measure.tables import Spread
from fastload.telemetry.snapshot import LOADER_STAGES

_INK, _MUTED, _GRID, _ALARM = "#1f2933", "#66727f", "#e4e7eb", "#b42318"
_LEGEND: dict[str, Any] = {
    "frameon": False,
    "fontsize": 9,
    "labelcolor": _INK,
    "handlelength": 1.6,
    "borderpad": 0,
    "columnspacing": 1.2,
}
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


_STAGES = {
    "read": ("read", "#0f8a7e"),
    "decode": ("decode", "#1f6fd1"),
    "transform": ("transform", "#7fb2ee"),
    "sample": ("rest of the sample", "#b9cde2"),
    "collate": ("collate", "#8655b5"),
    "pin": ("pin", "#c9b3e0"),
    "sampler": ("sampler", "#9c6b12"),
    "idle": ("no room in the queue", "#e4e7eb"),
    "rest": ("between samples", "#cfd6dd"),
    "wait": ("the loop in next()", "#e3a33b"),
    "step": ("the loop's step", "#57a773"),
}
"""Name and colour of each stage. A stage that the dataset named has a colour of all such stages."""
_NAMED = "#3d8b4f"


def save_plot(path: Path, rows: Sequence[Row], workload: Workload, *, caption: str) -> None:
    """Draw the rows (at least one) with the fewest ranks into a PNG, or another format that the suffix names.

    Points are medians, and bars reach from the smallest to the largest run. `caption` names the machine.
    """
    fewest = min(row.ranks for row in rows)
    rows = [row for row in rows if row.ranks == fewest]
    figure = rates(rows)
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


def rates(rows: Sequence[Row], ceilings: Sequence[Ceiling] = ()) -> Figure:
    """Draw rates and first batches of rows (at least one) with equal ranks over the number of workers.

    A bound far above all measured rates would flatten the panel, so it is left out.
    """
    figure = _figure(4.9)
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.06, right=0.985, top=0.83, bottom=0.235, wspace=0.17)
    highest = 1.6 * max(row.rate.high for row in rows)
    for plan, line in ((False, "--"), (True, ":")):
        seen = [c for c in ceilings if c.plan is plan and c.workers and c.rate <= highest]
        left.plot(
            [math.log2(ceiling.workers) for ceiling in seen],
            [ceiling.rate for ceiling in seen],
            color=_INK,
            linestyle=line,
            linewidth=1.2,
            marker="_",
            markersize=14,
            label="bound with a plan" if plan else "bound",
        )
    _panel(left, rows, lambda row: row.rate, title="Images per second", better="higher is better")
    _panel(
        right,
        rows,
        lambda row: row.first_batch_s,
        title="Seconds to the first batch",
        better="lower is better",
    )
    named = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    bounds = [
        f"bound{end}" for end in ("", " with a plan") if len(named[f"bound{end}"].get_xdata())
    ]
    labels = [label for label in (*LOADER_NAMES.values(), *bounds) if label in named]
    left.legend(
        [h[0] if isinstance(h := named[label], ErrorbarContainer) else h for label in labels],
        labels,
        loc="lower left",
        bbox_to_anchor=(-0.015, 1.12),
        ncols=6,
        **_LEGEND,
    )
    return figure


def stages(shares: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw a bar for each run, by name, divided by the shares (0 to 1) of its stages."""
    figure = _figure(1.3 + 0.32 * len(shares))
    axes = figure.subplots()
    for row, parts in enumerate(shares.values()):
        at = 0.0
        for stage, share in parts.items():
            axes.barh(row, share, left=at, color=_colour(stage), height=0.7)
            at += share
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    _lanes(figure, axes, list(shares), {stage for parts in shares.values() for stage in parts})
    return figure


def timeline(recorded: Mapping[str, Any], names: Sequence[str]) -> Figure:
    """Draw a lane for each thread of a timeline (of `run.trace`), and one for the queue if it has states of it.

    `names` has a name for each lane. Inner spans lie over outer ones.
    """
    lanes, asked, end = recorded["lanes"], recorded["queue"], recorded["seconds"]
    figure = _figure(1.3 + 0.32 * len(names))
    axes = figure.subplots()
    for row, lane in enumerate(lanes):
        extents = [(span["from_s"], span["to_s"] - span["from_s"]) for span in lane["spans"]]
        colours = [_colour(span["stage"]) for span in lane["spans"]]
        axes.broken_barh(extents, (row - 0.35, 0.7), color=colours)
    if asked:
        bottom = len(lanes) + 0.35  # the axis points down
        times = [*(one["at_s"] for one in asked), end]
        heights = [bottom - 0.7 * one["ready_share"] for one in asked]
        axes.fill_between(
            times, bottom, [*heights, heights[-1]], step="post", color=_STAGES["collate"][1]
        )
    axes.set_xlim(0, end)
    axes.set_xlabel("seconds", fontsize=9, color=_MUTED)
    _lanes(figure, axes, names, {span["stage"] for lane in lanes for span in lane["spans"]})
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
    order, whole = list(_STAGES), sum(parts.values())
    return {
        name: parts[name] / whole
        for name in sorted(parts, key=lambda n: order.index(n) if n in order else 2.5)
        if whole and parts[name] > 0
    }


def _figure(height: float) -> Figure:
    """Return a figure 10 inches wide and `height` inches high."""
    figure = Figure(figsize=(10.0, height), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _colour(stage: str) -> str:
    return _STAGES[stage][1] if stage in _STAGES else _NAMED


def _lanes(figure: Figure, axes: Axes, names: Sequence[str], seen: Collection[str]) -> None:
    """Name the lanes, the first one at the top, and the colours of the stages that were seen."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(length=0, labelsize=9, labelcolor=_INK)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    known = {name: colour for stage, (name, colour) in _STAGES.items() if stage in seen}
    if others := sorted(set(seen) - set(_STAGES)):
        known[", ".join(others[:4]) + (" ..." if len(others) > 4 else "")] = _NAMED
    figure.legend(
        [Patch(color=colour) for colour in known.values()],
        known,
        loc="upper left",
        ncols=7,
        **_LEGEND,
    )
    figure.subplots_adjust(
        left=0.2,
        right=0.97,
        top=1 - 0.5 / figure.get_figheight(),
        bottom=0.5 / figure.get_figheight(),
    )


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
