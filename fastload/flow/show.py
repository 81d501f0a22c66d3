"""A graph as text, and as a drawing (SVG): its tasks, their order, and the results of their last runs."""

from __future__ import annotations

import time
from html import escape

from fastload.flow.graph import PipelineGraph
from fastload.flow.record import Record, folder_of, read, state_of, why_stale

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 190, 62, 60, 24, 16
_COLOURS = {"done": "#d8f0dc", "stale": "#fff3cd", "failed": "#f8d7da", "running": "#d6e4f5"}
_COLOURS |= dict.fromkeys(("stopped", "interrupted"), "#fff3cd")


def as_text(graph: PipelineGraph) -> str:
    """Return a line for each task, in order: its name, command, predecessors and last run."""
    lines = [f"{graph.name}: {len(graph)} tasks"]
    for name in graph.order():
        before = ", ".join(graph.after(name)) or "-"
        task = str(graph.tasks[name]).partition(", ")[2]
        lines.append(f"  {name}  [{_about(graph, name)[1]}]  after {before}")
        lines.append(f"      {task}")
    return "\n".join(lines)


def _about(graph: PipelineGraph, name: str) -> tuple[str, str]:
    """Return the state of a task after its last run, and a text on it."""
    folder, task = folder_of(graph), graph.tasks[name]
    record = read(folder, name)
    if record.state == "waiting":
        return "waiting", "never ran"
    state = state_of(folder, name, record)
    took = f"{record.ended - record.began:.1f} s" if record.ended else f"since {_clock(record)}"
    if state == "interrupted":
        return state, f"interrupted, began {_clock(record)}"
    if state != "done":
        return state, f"{state}, {took}"
    stale = why_stale(graph, task, record)
    return ("stale", f"done, {took}; {stale}") if stale else ("done", f"done, {took}")


def _clock(record: Record) -> str:
    return time.strftime("%H:%M:%S", time.localtime(record.began))


def as_svg(graph: PipelineGraph) -> str:
    """Return a drawing of the tasks, their order and the states of their last runs, as SVG.

    Each step of the longest path is a column. Each task has an arrow to its successors.
    """
    places = _places(graph)
    columns = max(x for x, _ in places.values()) + 1
    rows = max(y for _, y in places.values()) + 1
    width = 2 * _MARGIN + columns * _WIDTH + (columns - 1) * _GAP_X
    height = 2 * _MARGIN + rows * _HEIGHT + (rows - 1) * _GAP_Y
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f"<title>{escape(graph.name)}</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#555"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for name in places:
        shapes += [_arrow(_corner(places[one]), _corner(places[name])) for one in graph.after(name)]
    shapes += [_box(graph, name, *_corner(place)) for name, place in places.items()]
    return "\n".join([*shapes, "</svg>"]) + "\n"


def _places(graph: PipelineGraph) -> dict[str, tuple[int, int]]:
    """Return the column and the row of each task."""
    places: dict[str, tuple[int, int]] = {}
    for name in graph.order():
        column = max((places[one][0] + 1 for one in graph.after(name)), default=0)
        places[name] = (column, sum(x == column for x, _ in places.values()))
    return places


def _corner(place: tuple[int, int]) -> tuple[int, int]:
    return _MARGIN + place[0] * (_WIDTH + _GAP_X), _MARGIN + place[1] * (_HEIGHT + _GAP_Y)


def _arrow(begin: tuple[int, int], end: tuple[int, int]) -> str:
    x, y = begin[0] + _WIDTH, begin[1] + _HEIGHT // 2
    u, v = end[0], end[1] + _HEIGHT // 2
    bend = (u - x) // 2
    return (
        f'<path d="M{x} {y}C{x + bend} {y} {u - bend} {v} {u} {v}" fill="none" stroke="#555" '
        'marker-end="url(#tip)"/>'
    )


def _box(graph: PipelineGraph, name: str, x: int, y: int) -> str:
    state, text = _about(graph, name)
    kind = graph.tasks[name].kind
    ranks = getattr(graph.tasks[name], "parallelism", 1)
    about = f"{kind}, {ranks} ranks" if ranks > 1 else kind
    lines = [
        f'<text x="{x + 10}" y="{y + at}" {style}>{escape(line[:28])}</text>'
        for at, line, style in (
            (20, name, 'font-weight="bold"'),
            (38, about, 'fill="#555"'),
            (54, text, 'fill="#555" font-size="11"'),
        )
    ]
    fill = _COLOURS.get(state, "#f2f2f2")
    return (
        f"<g><title>{escape(f'{name}: {text}')}</title>"
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="{fill}" stroke="#888"/>'
        f"{''.join(lines)}</g>"
    )
