"""report.html: a document of `report.document` as one page that opens offline.

It has no scripts and fetches nothing, and its security policy forbids both. Unknown figures are "n/a".
"""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from matplotlib.figure import Figure

from fastload.bench import plot
from fastload.bench.plan import TRANSFORMS
from fastload.bench.report import Row, partial
from fastload.measure.provenance import cores
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
        body += [*_rates(document, rows), *_stages(document, rows), _figures_table(document)]
    body += [_runs_table(document), *_provenance(document)]
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


def _provenance(document: Json) -> Iterator[str]:
    origin, work = document["provenance"], document["workload"]
    machine = origin["machine"]
    entries = {
        "command": shlex.join(origin["command"]),
        "date": origin["date"],
        "machine": f"{machine['cpu']}, {cores(origin)} of {machine['cores']} cores usable, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB",
        "system": machine["system"],
        "load before": f"{machine['load_average_1min']:.2f}",
        "versions": ", ".join(f"{name} {v or UNKNOWN}" for name, v in origin["versions"].items()),
        "commit": origin["git_commit"] or UNKNOWN,
    }
    if work is not None:
        ranks = ", ".join(map(str, sorted({run["ranks"] for run in document["runs"]})))
        entries |= {
            "images": f"{work['file_list']}, {TRANSFORMS[work['transform']]}",
            "batches": f"{work['steps']} steps of {work['batch_size']} samples in each rank, seed {work['seed']}",
            "ranks": f"{ranks}: processes on this node, started together",
            "page cache": f"{work['cache']} before each run",
            "step": document["step"],
        }
    yield "<h2>Provenance</h2>"
    yield _definitions(entries)


# ---- the tables ----


def _figures_table(document: Json) -> str:
    """Return a table with a line for each row: medians."""
    lines = []
    for row in document["rows"]:
        lines.append(
            {
                "loader": row["name"],
                "img/s": _median(row["rate"]),
                "smallest to largest": f"{row['rate']['low']:.1f} to {row['rate']['high']:.1f}",
                "img/s per rank": _median(row["rank_rate"]),
                "x serial": _median(row["ratio"], ".2f"),
                "1st batch s": _median(row["first_batch_s"], ".3f"),
                "CPU s/1000": _median(row["cpu_s_per_1000"], ".2f"),
                "peak MiB": _median(row["peak_bytes"], ".0f", scale=2**-20),
                "loop waited": _median(row["wait_share"], ".0%"),
                "queue ready": _median(row["occupancy"], ".0%"),
                "unique samples": f"{row['unique_samples']} of {row['samples']}",
                "cached": _median(row["cached_share"], ".0%"),
                "runs": row["runs"],
            }
        )
    caption = "Medians; img/s of all ranks together, x serial compared with as many ranks"
    return "<h2>Figures</h2>\n" + _table(caption, lines)


def _runs_table(document: Json) -> str:
    """Return a table with a line for each run, failed ones included."""
    lines = []
    for number, run in enumerate(document["runs"], start=1):
        figures = run["figures"] or {}
        rates = figures.get("rank_rates", [])
        lines.append(
            {
                "run": f"{number}: {run['name']}",
                "img/s": _number(figures.get("rate"), ".2f"),
                "each rank": " ".join(f"{r:.1f}" for r in rates) if len(rates) > 1 else UNKNOWN,
                "1st batch s": _number(figures.get("first_batch_s"), ".3f"),
                "steady s": _number(figures.get("steady_s"), ".3f"),
                "total s": _number(figures.get("total_s"), ".3f"),
                "close s": _number(figures.get("close_s"), ".3f"),
                "loop waited": _number(figures.get("wait_share"), ".1%"),
                "other processes": _number(run["others_share"], ".0%"),
                "error": run["error"] or "",
            }
        )
    return "<h2>Every run</h2>\n" + _table("In the order in which they ran", lines)


def _number(value: float | None, form: str = ".1f", *, scale: float = 1.0) -> str:
    return UNKNOWN if value is None else format(value * scale, form)


def _median(spread: Json | None, form: str = ".1f", *, scale: float = 1.0) -> str:
    return UNKNOWN if spread is None else _number(spread["median"], form, scale=scale)


# ---- what a page is made of: all of it escapes text ----


def _text(text: str, class_: str = "") -> str:
    return f'<p class="{class_}">{escape(text)}</p>' if class_ else f"<p>{escape(text)}</p>"


def _image(figure: Figure, alternative: str) -> str:
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

    def row(cells: Iterable[object], tag: str) -> str:
        first, *others = (escape(str(cell)) for cell in cells)
        return f"<tr><th>{first}</th>{''.join(f'<{tag}>{cell}</{tag}>' for cell in others)}</tr>"

    body = "\n".join([row(lines[0], "th"), *(row(line.values(), "td") for line in lines)])
    return f'<div class="scroll"><table><caption>{escape(caption)}</caption>\n{body}</table></div>'
