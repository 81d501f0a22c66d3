"""Rates to an image: a bar for each loader, by what it reads. The only file of this folder that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks._report import Bar

_INK, _MUTED, _GRID, _ALARM = "#1f2933", "#66727f", "#e4e7eb", "#b42318"
_COLOURS = {"ours": "#0b6bcb", "peer": "#b8c1cc", "bound": "#66727f"}
_LABELS = {"ours": "fastload", "peer": "other loaders", "bound": "a bare loop: the bound"}
_BAR_IN, _HEAD_IN, _TOP_IN, _LINE_IN, _WIDTH_IN = 0.27, 0.42, 0.5, 0.16, 10.0


def save_plot(
    path: Path, bars: Sequence[Bar], *, title: str, caption: str, warning: str = ""
) -> None:
    """Draw the bars (at least one) into a PNG, or whatever format the name's ending says.

    Bars are medians, their lines reach from the smallest to the largest run; all groups have one scale. `caption`,
    of one line or several, says where it was measured, `warning` what makes it less than it seems.
    """
    groups = {
        group: [bar for bar in bars if bar.group == group]
        for group in dict.fromkeys(bar.group for bar in bars)
    }
    foot = 0.35 + _LINE_IN * len(caption.splitlines())
    heights = [_BAR_IN * len(members) for members in groups.values()]
    height = _TOP_IN + sum(heights) + _HEAD_IN * len(groups) + foot
    figure = Figure(figsize=(_WIDTH_IN, height), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    most = max(bar.rate.high for bar in bars)
    top = height - _TOP_IN
    for (group, members), own in zip(groups.items(), heights, strict=True):
        top -= _HEAD_IN + own
        axes = figure.add_axes((0.42, top / height, 0.54, own / height))
        _panel(axes, group, members, most)
    figure.text(0.02, 1 - 0.3 / height, title, fontsize=11.5, color=_INK, fontweight="bold")
    figure.text(0.98, 1 - 0.3 / height, "higher is better", fontsize=8.5, color=_MUTED, ha="right")
    kinds = [kind for kind in _COLOURS if any(bar.kind == kind for bar in bars)]
    handles = [figure.axes[0].barh([0], [0], color=_COLOURS[kind]) for kind in kinds]
    figure.legend(
        handles,
        [_LABELS[kind] for kind in kinds],
        loc="upper left",
        bbox_to_anchor=(0.012, 1 - 0.34 / height),
        ncols=len(kinds),
        frameon=False,
        fontsize=9,
        labelcolor=_INK,
        handlelength=1.2,
    )
    figure.text(
        0.02, 0.12 / height, caption, fontsize=7.5, color=_MUTED, linespacing=1.5, va="bottom"
    )
    if warning:
        figure.text(0.98, 0.12 / height, warning, fontsize=8, color=_ALARM, ha="right", va="bottom")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _panel(axes: Axes, group: str, members: Sequence[Bar], most: float) -> None:
    """One group's bars, the first on top, with their medians in figures: those of a short bar are read, not seen."""
    medians = [bar.rate.median for bar in members]
    axes.barh(
        range(len(members)),
        medians,
        color=[_COLOURS[bar.kind] for bar in members],
        height=0.72,
        xerr=[
            [bar.rate.median - bar.rate.low for bar in members],
            [bar.rate.high - bar.rate.median for bar in members],
        ],
        error_kw={"elinewidth": 1.2, "ecolor": _INK},
    )
    for place, bar in enumerate(members):
        axes.annotate(
            f"{bar.rate.median:,.0f}",
            (bar.rate.high, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=_INK,
        )
    axes.set_yticks(range(len(members)), [bar.name for bar in members])
    axes.set_ylim(len(members) - 0.5, -0.5)
    axes.set_xlim(0, most * 1.12)
    axes.set_title(group, loc="left", fontsize=9.5, color=_MUTED, pad=4)
    axes.set_xticks([])
    axes.tick_params(length=0, labelsize=9, labelcolor=_INK)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(_GRID)
