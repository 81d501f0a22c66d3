"""A document of `report.document` as one page that opens offline. Its template is page.html.

The page has no scripts and fetches nothing, and its security policy forbids both.
"""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from fastload.bench import plot, report
from fastload.bench.plan import Workload
from fastload.measure.repeats import figure

_NO_RUN = "No run was completed"


def render(document: dict[str, Any], rows: Sequence[report.Row]) -> str:
    """Return the page of a benchmark: warnings, the chart, the table, what bounds each run, and what was run.

    `rows` are those of the document, by `report.summarise`.
    """
    best = max(rows, key=lambda row: row.rate.median, default=None)
    drawn = io.BytesIO()
    plot.draw(document, rows).savefig(drawn, format="svg")
    origin = document["provenance"]
    conditions = [shlex.join(origin["command"]), *report.conditions(document, rows)]
    conditions += [f"{origin['date']}, commit {origin['git_commit'] or 'unknown'}"]
    texts = {
        "title": f"{best.name}, {best.rate.median:,.0f} images per second" if best else _NO_RUN,
        "warnings": "\n".join(_warnings(document)),
        "verdict": document["verdict"] or "",
        "chart": base64.b64encode(drawn.getvalue()).decode(),
        "notes": "\n".join(report.notes(rows, Workload(**document["workload"])) if rows else ()),
        "conditions": "\n".join(conditions),
    }
    texts = {name: escape(text) for name, text in texts.items()}
    texts |= {"loaders": _table(report.cells(rows)), "runs": _table(_runs(document))}
    return Template(files(__package__).joinpath("page.html").read_text("utf-8")).substitute(texts)


def _warnings(document: dict[str, Any]) -> Iterator[str]:
    runs, step = document["runs"], document["step"] or ""
    if partial := report.partial(len(runs), document["planned_runs"]):
        yield partial
    if failed := [run["name"] for run in runs if run["error"]]:
        names = "; ".join(dict.fromkeys(failed))
        yield f"{len(failed)} of {len(runs)} runs failed: {names}. The table of runs says why."
    if document["noise"]:
        yield f"Noise: {document['noise']}."
    if step.startswith("simulated"):
        yield f"Step {step}."


def _runs(document: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the cells of each run, below their heads: what bounds it, or why it failed."""
    yield ["loader", "run", "img/s", "what bounds it"]
    for run in document["runs"]:
        figures = run["figures"] or {}
        said = figures.get("finding") or "n/a: torch's loader does not measure itself"
        if run["error"]:
            said = f"failed: {run['error']}"
        yield [run["name"], str(run["repeat"] + 1), figure(figures.get("rate"), ".1f"), said]


def _table(lines: Iterable[Sequence[str]]) -> str:
    """Return lines of cells as a table. The first line is its head."""
    head, *rows = (list(map(escape, line)) for line in lines)
    body = "\n".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows)
    return f"<table>\n<tr><th>{'</th><th>'.join(head)}</th></tr>\n{body}\n</table>"
