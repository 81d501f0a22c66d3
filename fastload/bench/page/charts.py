"""The charts of report.html, from a document of `report.document`: inline SVG that a style sheet colours.

Shapes that stretch with the page contain no text, which would be stretched too. Their labels are HTML.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fastload.bench.page.markup import Markup, element, join
from fastload.telemetry.snapshot import LOADER_STAGES, duration, percent

_WIDTH, _HEIGHT = 400.0, 250.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 12.0, 12.0, 40.0
_LABEL_WIDTH = 26.0
_FULL = 1000.0  # the width of a shape that stretches
_NAMED = ("read", "decode", "transform", "sample", "collate", "pin", "sampler", "wait", "step")


def stage_class(stage: str) -> str:
    """Return the class that colours a stage. All stages without a colour of their own share one."""
    return f"stage-{stage}" if stage in _NAMED else "stage-named"


# ---- rate by workers ----


def rate_chart(
    rows: Sequence[dict[str, Any]], ceilings: Sequence[dict[str, Any]], *, label: str
) -> Markup:
    """Draw images per second over the number of workers: medians, ranges, the serial level, the bounds.

    All rows and ceilings have the same number of ranks.
    """
    counts = sorted({row["workers"] for row in rows if row["workers"]}) or [1]
    fastest = float(max(row["rate"]["high"] for row in rows))
    # A bound far above all measured rates would flatten the chart, so it is only in the table.
    seen = [float(c["rate"]) for c in ceilings if c["rate"] <= 1.6 * fastest]
    ticks = nice_ticks(max([fastest, *seen]))
    top = max(ticks[-1], 1.05 * max([fastest, *seen]))

    def x(workers: int) -> float:
        span = math.log2(counts[-1] / counts[0])
        inset = 24.0
        share = math.log2(workers / counts[0]) / span if span else 0.5
        return _LEFT + inset + share * (_WIDTH - _LEFT - _RIGHT - 2 * inset)

    def y(rate: float) -> float:
        return _TOP + (1 - rate / top) * (_HEIGHT - _TOP - _BOTTOM)

    marks = [
        *_grid(ticks, y),
        *_worker_labels(counts, x),
        *_serial_level([row for row in rows if row["loader"] == "serial"], y),
        *(
            mark
            for plan, class_ in ((False, "bound"), (True, "bound-plan"))
            for mark in _bound_line(
                [c for c in ceilings if c["plan"] is plan and c["rate"] <= top], x, y, class_
            )
        ),
    ]
    for loader in ("torch", "plan", "thread"):
        mine = sorted(
            (row for row in rows if row["loader"] == loader), key=lambda row: row["workers"]
        )
        marks += _series(loader, mine, x, y)
    said = ", ".join(f"{row['name']} {row['rate']['median']:.1f}" for row in rows)
    return element(
        "svg",
        element("title", label),
        element("desc", f"Medians in images per second: {said}."),
        *marks,
        viewBox=f"0 0 {_WIDTH:g} {_HEIGHT:g}",
        role="img",
        class_="chart",
    )


def nice_ticks(highest: float) -> list[float]:
    """Return three to six round numbers from 0 to at most `highest`."""
    if highest <= 0:
        return [0.0, 1.0]
    raw = highest / 5
    scale = 10 ** math.floor(math.log10(raw))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= raw * 0.999)
    return [index * step for index in range(int(highest / step + 1e-9) + 1)]


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def _grid(ticks: Sequence[float], y: Callable[[float], float]) -> list[Markup]:
    return [
        mark
        for tick in ticks
        for mark in (
            _line(_LEFT, y(tick), _WIDTH - _RIGHT, y(tick), "grid" if tick else "axis"),
            element("text", f"{tick:,g}", x=_LEFT - 6, y=y(tick) + 4, text_anchor="end"),
        )
    ]


def _worker_labels(counts: Sequence[int], x: Callable[[int], float]) -> list[Markup]:
    """Draw the numbers of workers under the axis. Leave out those too close to the one before."""
    marks, free = [], -math.inf
    for count in counts:
        if x(count) >= free:
            marks.append(element("text", count, x=x(count), y=_HEIGHT - 22, text_anchor="middle"))
            free = x(count) + _LABEL_WIDTH
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    marks.append(
        element("text", "workers", x=middle, y=_HEIGHT - 5, text_anchor="middle", class_="muted")
    )
    return marks


def _serial_level(rows: Sequence[dict[str, Any]], y: Callable[[float], float]) -> list[Markup]:
    return [
        element(
            "g",
            element("title", _point(row)),
            element(
                "rect",
                x=_LEFT,
                y=y(row["rate"]["high"]),
                width=_WIDTH - _RIGHT - _LEFT,
                height=max(0.5, y(row["rate"]["low"]) - y(row["rate"]["high"])),
                class_="band",
            ),
            _line(
                _LEFT, y(row["rate"]["median"]), _WIDTH - _RIGHT, y(row["rate"]["median"]), "level"
            ),
            class_="serial",
        )
        for row in rows
    ]


def _bound_line(
    ceilings: Sequence[dict[str, Any]],
    x: Callable[[int], float],
    y: Callable[[float], float],
    class_: str,
) -> list[Markup]:
    if not ceilings:
        return []
    places = [(x(c["workers"]), y(c["rate"])) for c in ceilings]
    if len(places) == 1:
        (at, height), half = places[0], 14.0
        places = [(at - half, height), (at + half, height)]
    return [
        element("polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in places), class_=class_)
    ]


def _series(
    loader: str,
    rows: Sequence[dict[str, Any]],
    x: Callable[[int], float],
    y: Callable[[float], float],
) -> list[Markup]:
    # So that equal points do not hide each other.
    aside = {"torch": 1.5, "plan": 0.0, "thread": -1.5}[loader]
    places = [(x(row["workers"]) + aside, y(row["rate"]["median"])) for row in rows]
    marks = [element("polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in places))]
    for row, (at, height) in zip(rows, places, strict=True):
        shape = {
            "thread": element("circle", cx=at, cy=height, r=4.5),
            "plan": element("path", d=f"M{at:.1f},{height - 5:.1f} l5,9 h-10 z"),
            "torch": element("rect", x=at - 4, y=height - 4, width=8, height=8),
        }[loader]
        range_ = _line(at, y(row["rate"]["low"]), at, y(row["rate"]["high"]), "range")
        marks.append(element("g", element("title", _point(row)), range_, shape))
    return [element("g", *marks, class_=loader)] if rows else []


def _point(row: dict[str, Any]) -> str:
    rate, runs = row["rate"], row["runs"]
    of = "1 run" if runs == 1 else f"{runs} runs, {rate['low']:.1f} to {rate['high']:.1f}"
    return f"{row['name']}: {rate['median']:.1f} images per second ({of})"


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """Draw the legend of colours, from pairs of a class and its meaning."""
    return element(
        "ul",
        *(
            element("li", element("span", class_=f"swatch {class_}", aria_hidden="true"), meaning)
            for class_, meaning in entries
        ),
        class_="legend",
    )


# ---- shapes that stretch ----


def stretched(label: str, *shapes: Markup, height: int, class_: str) -> Markup:
    """Draw a chart without text, `_FULL` wide and `height` high, stretched over the available width."""
    return element(
        "svg",
        element("title", label),
        *shapes,
        viewBox=f"0 0 {_FULL:g} {height}",
        preserveAspectRatio="none",
        role="img",
        class_=class_,
    )


def range_bar(label: str, spread: dict[str, float], *, longest: float) -> Markup:
    """Draw a bar as long as the median, with a line from the smallest to the largest value."""
    scale = _FULL / longest if longest else 0.0
    low, high = spread["low"] * scale, spread["high"] * scale
    return stretched(
        label,
        element(
            "rect", x=0, y=4, width=max(1.0, spread["median"] * scale), height=12, class_="bar"
        ),
        element("rect", x=low, y=9, width=max(1.0, high - low), height=2, class_="whisker"),
        height=20,
        class_="strip",
    )


def stage_shares(stats: dict[str, Any], *, workers: int) -> list[tuple[str, float]]:
    """Return pairs of a stage and its share (0 to 1) of the threads' time, in the order in which a sample passes them.

    Without workers, the thread is that of the loop, and "step" is all that is not loading. With workers, "idle" is the
    wait for room in the queue, and "rest" the time between samples. "sample" excludes stages that the dataset named.
    """
    stages = stats["stages"]
    total = max(1, workers) * stats["elapsed_s"]
    named = {name: s["seconds"] for name, s in stages.items() if name not in LOADER_STAGES}
    order = {"read": 0, "decode": 1, "transform": 2}
    parts = [(name, named[name]) for name in sorted(named, key=lambda name: order.get(name, 3))]
    sample_s = stages.get("sample", {}).get("seconds", 0.0)
    parts.append(("sample", max(0.0, sample_s - sum(named.values()))))
    parts.append(("collate", stages.get("collate", {}).get("seconds", 0.0)))
    if workers:
        parts.append(("idle", stats["worker_wait_s"]))
    else:
        parts.append(("sampler", stages.get("sampler", {}).get("seconds", 0.0)))
    left = max(0.0, total - sum(seconds for _, seconds in parts))
    parts.append(("rest" if workers else "step", left))
    whole = sum(seconds for _, seconds in parts)
    return [(name, seconds / whole) for name, seconds in parts if whole and seconds > 0]


def share_bar(label: str, shares: Sequence[tuple[str, float]]) -> Markup:
    """Draw a bar divided by shares."""
    shapes, at = [], 0.0
    for name, share in shares:
        shapes.append(
            element(
                "rect",
                element("title", f"{name}: {percent(share)}"),
                x=at,
                y=0,
                width=share * _FULL,
                height=20,
                class_=stage_class(name) if name not in ("idle", "rest") else f"stage-{name}",
            )
        )
        at += share * _FULL
    return stretched(label, *shapes, height=20, class_="strip")


# ---- the timeline ----


def lane(spans: Sequence[dict[str, Any]], *, seconds: float, label: str) -> Markup:
    """Draw the spans of one thread over `seconds`, with inner spans over outer ones."""
    scale = _FULL / seconds
    return stretched(
        label,
        *(
            element(
                "rect",
                element(
                    "title",
                    f"{span['stage']}: {duration(span['to_s'] - span['from_s'])} "
                    f"at {duration(span['from_s'])}",
                ),
                x=span["from_s"] * scale,
                y=0,
                width=max(0.4, (span["to_s"] - span["from_s"]) * scale),
                height=20,
                class_=stage_class(span["stage"]),
            )
            for span in spans
        ),
        height=20,
        class_="strip lane",
    )


def queue_lane(asked: Sequence[dict[str, Any]], *, seconds: float, label: str) -> Markup:
    """Draw the share of batches in flight that were ready each time the loop asked for one."""
    scale = _FULL / seconds
    until = [later["at_s"] for later in asked[1:]] + [seconds]
    return stretched(
        label,
        *(
            element(
                "rect",
                element("title", f"{percent(one['ready_share'])} ready at {duration(one['at_s'])}"),
                x=one["at_s"] * scale,
                y=20 * (1 - one["ready_share"]),
                width=max(0.4, (end - one["at_s"]) * scale),
                height=max(0.5, 20 * one["ready_share"]),
                class_="stage-ready",
            )
            for one, end in zip(asked, until, strict=True)
        ),
        height=20,
        class_="strip lane",
    )


def time_axis(seconds: float) -> Markup:
    """Draw round times at their positions along the lanes."""
    return element(
        "div",
        join(
            element("span", duration(tick), style=f"left:{100 * tick / seconds:.2f}%")
            for tick in nice_ticks(seconds)
            if tick < 0.97 * seconds
        ),
        class_="axis",
        aria_hidden="true",
    )
