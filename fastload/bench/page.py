"""report.html: a document of `report.document` as one page that opens offline.

It has no scripts and fetches nothing, and its security policy forbids both. Unknown figures are "n/a".
"""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from html import escape
from importlib.resources import files
from typing import Any

from matplotlib import figure as charts

from fastload.bench import plot
from fastload.bench.figures import Figures
from fastload.bench.report import Row, partial
from fastload.telemetry.snapshot import percent

UNKNOWN = "n/a"
"""Text for a missing figure."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

Json = dict[str, Any]


def render(document: Json, rows: Sequence[Row]) -> str:
    """Return the page of a benchmark: what was measured, what limits it, the raw figures, and their provenance.

    `rows` are those of the document, by `report.summarise`.
    """
    body = [
        f"<h1>{escape(_title(rows))}</h1>",
        *(_text(line) for line in (document["verdict"] or "").splitlines()),
        *(_text(line, "banner") for line in _banners(document)),
    ]
    if rows:
        body += [*_rates(document, rows), *_stages(document, rows)]
    body += _tables(document)
    content = "\n".join(body)
    style = files(__package__).joinpath("page.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>fastload bench: {escape(_title(rows))}</title><style>{style}</style></head>"
        f"<body><main>\n{content}\n</main></body></html>\n"
    )


# ---- sections ----


def _title(rows: Sequence[Row]) -> str:
    if not rows:
        return "No run was completed"
    best = max(rows, key=lambda row: row.rate.median)
    name = best.name[:1].upper() + best.name[1:]
    return f"{name}, {best.rate.median:,.0f} images per second"


def _banners(document: Json) -> Iterator[str]:
    done, planned = len(document["runs"]), document["planned_runs"]
    failed = sum(run["error"] is not None for run in document["runs"])
    if document["partial"]:
        yield partial(done, planned)
    if failed:
        yield f"{failed} of {done} runs failed. See the table of runs below."
    if document["noise"]:
        yield f"Noise: {document['noise']}."
    if (document["step"] or "").startswith("simulated"):
        yield f"Step {document['step']} after each batch, without an accelerator."


def _rates(document: Json, rows: Sequence[Row]) -> Iterator[str]:
    yield "<h2>Rate by workers</h2>"
    for ranks in sorted({row.ranks for row in rows}):
        here = [row for row in rows if row.ranks == ranks]
        medians = ", ".join(f"{row.name} {row.rate.median:.1f}" for row in here)
        if ranks > 1:
            yield f"<h3>{ranks} ranks on this node</h3>"
        chart = plot.rates(here)
        yield _image(chart, f"Images per second: {medians}")
    yield _text(
        "Points are medians of the runs. Bars and the band reach from the smallest to the largest run. "
        f"The first {document['warmup_steps']} steps of a run are warm-up, and no rate counts them. The first batch "
        "includes the start of threads or processes, but not imports.",
        "note",
    )


def _stages(document: Json, rows: Sequence[Row]) -> Iterator[str]:
    yield "<h2>Where the time goes</h2>"
    typical = {row.name: figures for row in rows if (figures := _typical(document, row))}
    if not typical:
        yield _text(f"{UNKNOWN}: torch's loader does not measure itself, and no other was run.")
        return
    workers = {row.name: row.workers for row in rows}
    shares = {
        name: plot.stage_shares(figures["loader_stats"], workers=workers[name])
        for name, figures in typical.items()
    }
    said = "; ".join(
        f"{name}: {', '.join(f'{stage} {percent(share)}' for stage, share in parts.items())}"
        for name, parts in shares.items()
    )
    yield _image(plot.stages(shares), said)
    yield _text(
        "Shares of the worker threads' time in the run with the median rate, on rank 0. For serial loading, they "
        "are shares of the loop's time. Waiting for storage, a core or the GIL counts in the stage of the thread.",
        "note",
    )
    yield _definitions({name: figures["finding"] for name, figures in typical.items()})


def _typical(document: Json, row: Row) -> Json | None:
    """Return the figures of the row's run whose rate is nearest to the median, or None if no run has loader stats."""
    mine = [
        run["figures"]
        for run in document["runs"]
        if run["name"] == row.name and run["figures"] and run["figures"]["loader_stats"]
    ]
    return min(mine, key=lambda figures: abs(figures["rate"] - row.rate.median), default=None)


def _tables(document: Json) -> Iterator[str]:
    """Yield all other values of the document, by their names there: medians, every run, provenance."""
    rows = [{"name": row["name"], **row} for row in document["rows"]]
    if rows:
        yield "<h2>Figures</h2>"
        yield _table("Medians, smallest and largest; ratio compared with as many ranks", rows)
    names = [f.name for f in fields(Figures) if f.name not in ("loader_stats", "finding")]
    runs = [
        {"name": run["name"], **{name: (run["figures"] or {}).get(name) for name in names}}
        | {"others_share": run["others_share"], "error": run["error"] or ""}
        for run in document["runs"]
    ]
    yield "<h2>Every run</h2>"
    yield _table("In the order in which they ran", runs)
    yield "<h2>Provenance</h2>"
    origin = dict(document["provenance"])
    origin |= {"command": shlex.join(origin["command"]), "step": document["step"]}
    yield _definitions(
        {name: _said(value) for name, value in (origin | (document["workload"] or {})).items()}
    )


def _said(value: Any) -> str:
    """Return a value of the document as text."""
    if isinstance(value, dict) and "median" in value:
        return f"{_said(value['median'])} ({_said(value['low'])} to {_said(value['high'])})"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_said(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " ".join(map(_said, value))
    if isinstance(value, int | float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    return UNKNOWN if value is None else str(value)


# ---- what a page is made of: all of it escapes text ----


def _text(text: str, class_: str = "") -> str:
    return f'<p class="{class_}">{escape(text)}</p>' if class_ else f"<p>{escape(text)}</p>"


def _image(figure: charts.Figure, alternative: str) -> str:
    """Return a chart as an image within the page."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    content = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{escape(alternative)}" src="data:image/png;base64,{content}">'


def _definitions(entries: Mapping[str, str]) -> str:
    parts = (f"<dt>{escape(n)}</dt><dd><code>{escape(v)}</code></dd>" for n, v in entries.items())
    return f"<dl>{''.join(parts)}</dl>"


def _table(caption: str, lines: Sequence[Mapping[str, object]]) -> str:
    """Return a table that scrolls sideways on a narrow screen. The first cell of a line is its name."""
    if not lines:
        return "<p>No run was completed.</p>"

    def row(cells: Iterable[str], tag: str) -> str:
        first, *others = map(escape, cells)
        return f"<tr><th>{first}</th>{''.join(f'<{tag}>{cell}</{tag}>' for cell in others)}</tr>"

    names = (name.replace("_", " ") for name in lines[0])
    body = "\n".join([row(names, "th"), *(row(map(_said, line.values()), "td") for line in lines)])
    return f'<div class="scroll"><table><caption>{escape(caption)}</caption>\n{body}</table></div>'
