"""report.html: a document of `report.document` as one page that opens offline.

It has no scripts and fetches nothing, and its security policy forbids both. The template is page.html.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from fastload.bench import plot
from fastload.bench.plan import Workload
from fastload.bench.report import Row, partial, table


def render(document: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the page of a benchmark: its charts, what limits it, the table, and all values of the document.

    `rows` are those of the document, by `report.summarise`.
    """
    best = max(rows, key=lambda row: row.rate.median, default=None)
    drawn = io.BytesIO()
    plot.draw(document, rows).savefig(drawn, format="png")
    runs = [(run["name"], run["figures"] or {}) for run in document["runs"]]
    findings = {name: figures.get("finding") for name, figures in runs}
    texts = {
        "title": f"{best.name}, {best.rate.median:,.0f} images per second" if best else _NO_RUN,
        "banners": "\n".join(_banners(document)),
        "verdict": document["verdict"] or "",
        "findings": "\n".join(f"{name}: {said or _SILENT}" for name, said in findings.items()),
        "table": table(rows, Workload(**document["workload"])) if rows else _NO_RUN,
        "values": json.dumps(document, indent=2),
        "chart": base64.b64encode(drawn.getvalue()).decode(),
    }
    template = Template(files(__package__).joinpath("page.html").read_text("utf-8"))
    return template.substitute({name: escape(text) for name, text in texts.items()})


_NO_RUN = "No run was completed"
_SILENT = "n/a, because torch's loader does not measure itself"


def _banners(document: dict[str, Any]) -> Iterator[str]:
    done, failed = len(document["runs"]), sum(bool(run["error"]) for run in document["runs"])
    if document["partial"]:
        yield partial(done, document["planned_runs"])
    if failed:
        yield f"{failed} of {done} runs failed. The values below have their errors."
    if document["noise"]:
        yield f"Noise: {document['noise']}."
    if (document["step"] or "").startswith("simulated"):
        yield f"Step {document['step']}."
