"""The charts of a benchmark as one figure. The only file that needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fastload.bench.plan import LOADER_NAMES
from fastload.bench.report import Row, partial
from fastload.measure.provenance import caption
from fastload.telemetry.snapshot import LOADER_STAGES

_PANELS = {
    "rate_global": "Images per second: higher is better",
    "first_batch_s": "Seconds to the first batch: lower is better",
}


def draw(document: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Draw rates and first batches for each number of ranks, and the stages of all rows whose loader measures itself.

    Points are medians, and bars reach from the smallest to the largest run. The last lines name the conditions.
    `rows` are those of the document, by `report.summarise`.
    """
    ranks = sorted({row.ranks for row in rows})
    shares = {row.name: stages for row in rows if (stages := _stages_of(document, row))}
    heights = [4.5] * len(ranks) + [0.7 + 0.3 * len(shares)] * bool(shares)
    figure = Figure((10.0, 0.8 + sum(heights)), dpi=160, layout="constrained")
    if heights:
        grid = figure.add_gridspec(len(heights), len(_PANELS), height_ratios=heights)
        for line, count in enumerate(ranks):
            mine = [row for row in rows if row.ranks == count]
            for column, value in enumerate(_PANELS):
                _panel(figure.add_subplot(grid[line, column]), mine, value)
        if shares:
            draw_stages(figure.add_subplot(grid[-1, :]), shares)
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
    axes.set_xlabel(
        "workers (threads or processes)"
        + f" in each of {rows[0].ranks} ranks" * (rows[0].ranks > 1)
    )
    axes.grid(axis="y")
    axes.set_title(_PANELS[value], loc="left")
    if value == "rate_global":
        axes.legend()


def draw_stages(axes: Axes, shares: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a bar for each run, by name, divided by the shares (0 to 1) of its stages."""
    ends = dict.fromkeys(shares, 0.0)
    for stage in dict.fromkeys(name for parts in shares.values() for name in parts):
        widths = {run: parts.get(stage, 0.0) for run, parts in shares.items()}
        axes.barh([*shares], [*widths.values()], left=[*ends.values()], label=stage)
        ends = {run: end + widths[run] for run, end in ends.items()}
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title("Time of the worker threads, or of the loop if serial", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _stages_of(document: Mapping[str, Any], row: Row) -> dict[str, float]:
    """Return the shares of the stages in the row's run whose rate is nearest to the median, on rank 0."""
    mine = [
        run["figures"] for run in document["runs"] if run["name"] == row.name and run["figures"]
    ]
    typical = min(mine, key=lambda figures: abs(figures["rate"] - row.rate.median))
    stats = typical["loader_stats"]
    return stage_shares(stats, workers=row.workers) if stats else {}


def stage_shares(stats: Mapping[str, Any], *, workers: int) -> dict[str, float]:
    """Return each stage's share (0 to 1) of the threads' time.

    Without workers, the thread is that of the loop, and "step" is all that is not loading. With workers, "no room" is
    the wait for room in the queue. "other" is the time of a sample outside the stages that the dataset named.
    """
    seconds = {name: stage["seconds"] for name, stage in stats["stages"].items()}
    parts = {name: s for name, s in seconds.items() if name not in LOADER_STAGES}
    parts["other"] = max(0.0, seconds.get("sample", 0.0) - sum(parts.values()))
    parts["collate"] = seconds.get("collate", 0.0)
    if workers:
        parts["no room"] = stats["worker_wait_s"]
    else:
        parts["sampler"] = seconds.get("sampler", 0.0)
    left = max(1, workers) * stats["elapsed_s"] - sum(parts.values())
    parts["between samples" if workers else "step"] = max(0.0, left)
    whole = sum(parts.values())
    return {name: part / whole for name, part in parts.items()}


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
