"""Rates to an image: a bar for each loader, by what it reads. The only file of this folder that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks._report import Bar

_COLOURS = {"ours": "#0b6bcb", "peer": "#b8c1cc", "bound": "#66727f"}
_LABELS = {"ours": "fastload", "peer": "other loaders", "bound": "a bare loop: the bound"}


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
    sizes = [len(members) + 1 for members in groups.values()]
    figure = Figure((10, 0.3 * sum(sizes) + 1.6), dpi=160, layout="constrained")
    panels = figure.subplots(len(groups), sharex=True, squeeze=False, height_ratios=sizes)[:, 0]
    for axes, (group, members) in zip(panels, groups.items(), strict=True):
        rates = [bar.rate for bar in members]
        drawn = axes.barh(
            [bar.name for bar in members],
            [rate.median for rate in rates],
            color=[_COLOURS[bar.kind] for bar in members],
            xerr=[[r.median - r.low for r in rates], [r.high - r.median for r in rates]],
        )
        axes.bar_label(drawn, fmt="{:,.0f}", padding=5)
        axes.margins(y=0.02)
        axes.invert_yaxis()  # the first on top
        axes.set_title(group, loc="left")
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(length=0, labelbottom=False)
    kinds = [kind for kind in _COLOURS if any(bar.kind == kind for bar in bars)]
    figure.suptitle(f"{title} (higher is better)", x=0.01, ha="left", fontweight="bold")
    figure.legend(
        [Patch(color=_COLOURS[kind]) for kind in kinds],
        [_LABELS[kind] for kind in kinds],
        loc="outside upper right",
        ncols=len(kinds),
    )
    figure.supxlabel("\n".join(filter(None, (warning, caption))), fontsize=7.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
