"""report.html: a document of `report.document` as one page that opens offline.

It has no scripts and fetches nothing, and its security policy forbids both. Unknown figures are "n/a".
"""

from __future__ import annotations

import shlex
from importlib.resources import files

from fastload.bench.page import panels
from fastload.bench.page.markup import (
    UNKNOWN,
    Child,
    Markup,
    definitions,
    element,
    join,
    note,
    section,
)
from fastload.bench.page.panels import Json, fastest, typical
from fastload.bench.page.tables import figures_table, runs_table
from fastload.bench.plan import TRANSFORMS
from fastload.bench.report import partial
from fastload.measure.provenance import cores


def render(document: Json) -> str:
    """Return the page of a benchmark: what was measured, what limits it, the raw figures, and their provenance."""
    rows = document["rows"]
    body: list[Child] = [_head(document), *_banners(document)]
    if rows:
        body += [
            _finding(document),
            element(
                "div",
                panels.rate_panel(document),
                panels.first_batch_panel(rows),
                class_="pair" if len({row["ranks"] for row in rows}) == 1 else None,
            ),
            panels.stages_panel(document),
            panels.timeline_panel(document),
            figures_table(document),
        ]
    body += [runs_table(document), _provenance(document)]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'",
        ),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"fastload bench: {_title(document)}"),
        element("style", Markup(files(__package__).joinpath("page.css").read_text("utf-8"))),
    )
    page = element("html", head, element("body", element("main", *body)), lang="en")
    return f"<!doctype html>\n{page}\n"


# ---- sections ----


def _title(document: Json) -> str:
    row = fastest(document["rows"])
    if row is None:
        return "no run was completed"
    return f"{row['name']}, {row['rate']['median']:,.0f} images per second"


def _head(document: Json) -> Markup:
    return element(
        "header",
        element("p", f"fastload bench, {document['provenance']['date'][:10]}", class_="eyebrow"),
        element("h1", _title(document)[:1].upper() + _title(document)[1:]),
        *(element("p", line, class_="lead") for line in (document["verdict"] or "").splitlines()),
    )


def _banners(document: Json) -> list[Markup]:
    def banner(text: str, class_: str = "banner") -> Markup:
        return element("p", text, class_=class_)

    done, planned = len(document["runs"]), document["planned_runs"]
    failed = sum(run["error"] is not None for run in document["runs"])
    found = []
    if document["partial"]:
        found.append(banner(partial(done, planned)))
    if failed:
        found.append(banner(f"{failed} of {done} runs failed. See the table of runs below."))
    if document["noise"]:
        found.append(banner(f"Noise: {document['noise']}."))
    if (document["step"] or "").startswith("simulated"):
        text = f"Step {document['step']} after each batch, without an accelerator."
        found.append(banner(text, "banner plain"))
    return found


def _finding(document: Json) -> Markup:
    """Return the finding of the fastest run that has one."""
    row = fastest([row for row in document["rows"] if typical(document, row)])
    figures = row and typical(document, row)
    if row is None or figures is None:
        body = note(f"{UNKNOWN}: torch's loader does not measure itself, and no other was run.")
    else:
        body = element(
            "p", f"{row['name']}: ", element("strong", figures["finding"]), class_="lead"
        )
    return section("What limits the run", body, id_="bound")


def _provenance(document: Json) -> Markup:
    origin, work = document["provenance"], document["workload"]
    machine, versions = origin["machine"], origin["versions"]
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    entries: list[tuple[str, Child]] = [
        ("command", element("code", shlex.join(origin["command"]))),
        ("date", origin["date"]),
        (
            "machine",
            f"{machine['cpu']}, {cores(origin)} of {machine['cores']} cores usable, {memory}",
        ),
        ("system", machine["system"]),
        ("load before", f"{machine['load_average_1min']:.2f}"),
        ("versions", ", ".join(f"{name} {v or UNKNOWN}" for name, v in versions.items())),
        ("commit", origin["git_commit"] or UNKNOWN),
    ]
    if work is not None:
        ranks = sorted({run["ranks"] for run in document["runs"]})
        entries += [
            (
                "images",
                join([element("code", work["file_list"]), f", {TRANSFORMS[work['transform']]}"]),
            ),
            (
                "batches",
                f"{work['steps']} steps of {work['batch_size']} samples in each rank, seed {work['seed']}",
            ),
            ("ranks", f"{', '.join(map(str, ranks))}: processes on this node, started together"),
            ("page cache", f"{work['cache']} before each run"),
            ("step", document["step"]),
        ]
    return section(
        "Provenance",
        definitions(entries),
        id_="provenance",
    )
