"""report.html: a document of `report.document` as one page that opens offline.

No script, and nothing is fetched: the page forbids it to the browser. Whatever is not known is "n/a".
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

from fastload.harness import charts
from fastload.harness.markup import Child, Markup, element, join
from fastload.stats import duration, percent

UNKNOWN = "n/a"
_TRANSFORMS = {
    "resize": "Resize((256, 256)) + ToTensor",
    "rrc": "RandomResizedCrop(224) + flip + ToTensor + Normalize",
}
_BOUNDS = {
    "workers": "the workers, each at the pace of one alone",
    "cores": "the cores, if they did nothing but compute samples",
    "step": "the simulated step",
}
_STAGES = {
    "sample": "rest of the sample",
    "idle": "waiting for room in the queue",
    "rest": "between samples",
    "step": "the loop, besides loading",
}

Json = dict[str, Any]


def render(document: Json) -> str:
    """The page of a benchmark: what was measured, what bounds it, the raw figures, where they come from."""
    rows = document["rows"]
    body: list[Child] = [_head(document), *_banners(document)]
    if rows:
        body += [
            _finding(document),
            _curves(document),
            _first_batch(rows),
            _stages(document),
            _timeline(document),
            _table(document),
        ]
    body += [_runs(document), _provenance(document)]
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


# ---- words and figures ----


def _number(value: float | None, form: str = ".1f", *, scale: float = 1.0) -> str:
    return UNKNOWN if value is None else format(value * scale, form)


def _median(spread: Json | None, form: str = ".1f", *, scale: float = 1.0) -> str:
    return UNKNOWN if spread is None else _number(spread["median"], form, scale=scale)


def _range(spread: Json | None, form: str = ".1f") -> str:
    if spread is None:
        return UNKNOWN
    return f"{format(spread['low'], form)} to {format(spread['high'], form)}"


def _section(title: str, *children: Child, id_: str) -> Markup:
    return element("section", element("h2", title, id=id_), *children, aria_labelledby=id_)


def _note(*text: Child) -> Markup:
    return element("p", *text, class_="note")


def _fastest(rows: Sequence[Json]) -> Json | None:
    return max(rows, key=lambda row: row["rate"]["median"], default=None)


def _name(run: Json, rows: Sequence[Json]) -> str:
    """What the row is called that a run is one of; of one without figures, its loader and numbers."""
    for row in rows:
        if all(row[key] == run[key] for key in ("loader", "workers", "ranks")):
            return str(row["name"])
    return f"{run['loader']}, workers: {run['workers']}, ranks: {run['ranks']}"


def _typical(document: Json, row: Json) -> Json | None:
    """The figures of the run of a row whose rate is nearest to its median; None if it has no loader's stats."""
    mine = [
        run["figures"]
        for run in document["runs"]
        if run["figures"] and _name(run, [row]) == row["name"] and run["figures"]["loader_stats"]
    ]
    middle = row["rate"]["median"]
    return min(mine, key=lambda figures: abs(figures["rate"] - middle), default=None)


def _title(document: Json) -> str:
    fastest = _fastest(document["rows"])
    if fastest is None:
        return "no run was completed"
    return f"{fastest['name']}, {fastest['rate']['median']:,.0f} images a second"


# ---- sections ----


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
        found.append(banner(f"Partial: stopped after {done} of {planned} runs."))
    if failed:
        found.append(banner(f"{failed} of {done} runs failed: see the runs below."))
    if document["noise"]:
        found.append(banner(f"Noise: {document['noise']}."))
    if (document["step"] or "").startswith("simulated"):
        text = f"Step {document['step']} after each batch, with no accelerator behind it."
        found.append(banner(text, "banner plain"))
    return found


def _finding(document: Json) -> Markup:
    """The sentence of the fastest run that has one; behind it those of the other rows."""
    said = [
        (row, figures["finding"])
        for row in document["rows"]
        if (figures := _typical(document, row)) is not None
    ]
    fastest = _fastest([row for row, _ in said])
    main = next((text for row, text in said if row is fastest), None)
    others = [(row["name"], text) for row, text in said if row is not fastest]
    return _section(
        "What bounds the run",
        element("p", f"{fastest['name']}: ", element("strong", main), class_="lead")
        if fastest
        else _note(f"{UNKNOWN}: torch's loader does not measure itself, and no other was run."),
        element("dl", *(part for name, text in others for part in _entry(name, text)))
        if others
        else None,
        id_="bound",
    )


def _curves(document: Json) -> Markup:
    rows, roof = document["rows"], document["roofline"]
    ceilings = roof["ceilings"] if roof else []
    pictures = []
    for ranks in sorted({row["ranks"] for row in rows}):
        here = [row for row in rows if row["ranks"] == ranks]
        label = "Images a second by workers"
        if len({row["ranks"] for row in rows}) > 1 or ranks > 1:
            label += f", {ranks} rank{'s' if ranks > 1 else ''} on this node"
        bounds = [ceiling for ceiling in ceilings if ceiling["ranks"] == ranks]
        chart = charts.rate_chart(here, bounds, label=label)
        pictures.append(element("figure", element("h3", label), chart))
    entries = [
        (kind, name)
        for kind, name in charts.SERIES.items()
        if any(row["loader"] == kind for row in rows)
    ]
    return _section(
        "Rate by workers",
        charts.legend([*entries, ("bound", "bound")] if ceilings else entries),
        element("div", *pictures, class_="pair"),
        _note(
            "Points are medians of the runs, bars and the band reach from the smallest to the largest. "
            f"The first {document['warmup_steps']} steps of a run are warm-up and count in no rate. "
        ),
        _note(*_bound_words(document)),
        id_="rate",
    )


def _bound_words(document: Json) -> list[Child]:
    roof = document["roofline"]
    if roof is None:
        return [f"Bound: {UNKNOWN}, as no run of fastload's own loader timed a sample."]
    step_ms = document["workload"]["step_ms"]
    words = (
        f"The bound is an estimate, the lowest of: workers x ranks at the pace of one thread, "
        f"{duration(roof['sample_s'])} a sample, seen in {roof['source']}; "
        f"{roof['cores'] or UNKNOWN} cores that do nothing but compute samples, "
        f"{duration(roof['sample_cpu_s'])} of CPU each"
    )
    words += (
        f"; the simulated step of {step_ms:g} ms, which is also the rate on data in memory."
        if step_ms
        else "; there is no step, and the loop on data in memory would have no rate to speak of."
    )
    return [words, " As it comes from other runs, a measured rate can lie a little above it."]


def _first_batch(rows: Sequence[Json]) -> Markup:
    longest = max(row["first_batch_s"]["high"] for row in rows)

    def line(row: Json) -> Markup:
        spread = row["first_batch_s"]
        label = f"{row['name']}: {duration(spread['median'])} to the first batch"
        return element(
            "tr",
            element("th", row["name"], scope="row"),
            element("td", charts.range_bar(label, spread, longest=longest), class_="wide"),
            element("td", duration(spread["median"])),
            class_=row["loader"],
        )

    return _section(
        "Time to the first batch",
        element("table", element("tbody", *map(line, rows)), class_="bars"),
        _note(
            "From iter() to the first batch in hand: starting threads or processes is in it, imports are not. "
            "Of several ranks, the last one's."
        ),
        id_="first",
    )


def _stages(document: Json) -> Markup:
    lines: list[Markup] = []
    seen: dict[str, float] = {}
    for row in document["rows"]:
        figures = _typical(document, row)
        if figures is None:
            continue
        stats = figures["loader_stats"]
        shares = charts.stage_shares(stats, workers=row["workers"])
        seen.update(shares)
        said = ", ".join(f"{_STAGES.get(name, name)} {percent(share)}" for name, share in shares)
        ready = percent(stats["occupancy"]) if row["workers"] else UNKNOWN
        lines.append(
            element(
                "tr",
                element("th", row["name"], scope="row"),
                element("td", charts.share_bar(f"{row['name']}: {said}", shares), class_="wide"),
                element("td", ready),
                element("td", percent(row["wait_share"]["median"])),
            )
        )
    if not lines:
        body = _note(
            f"{UNKNOWN}: only fastload's loader times its stages, and none of its runs is here."
        )
        return _section("Where the time goes", body, id_="stages")
    titles = ("loader", "time of its threads", "queue ready", "loop waited")
    return _section(
        "Where the time goes",
        charts.legend(
            (
                f"stage-{name}" if name in ("idle", "rest") else charts.stage_class(name),
                _STAGES.get(name, name),
            )
            for name in seen
        ),
        element(
            "div",
            element(
                "table",
                element("thead", element("tr", *(element("th", t, scope="col") for t in titles))),
                element("tbody", *lines),
                class_="bars",
            ),
            class_="scroll",
        ),
        _note(
            "Shares of the worker threads' time, of the loop's own where it loads serially, in the run with the median "
            "rate; of several ranks, rank 0's. A thread that waits for storage, a core or the GIL is counted in "
            "the stage that it is in. Queue ready: of the batches in flight, those ready when the loop asked for one; "
            "near 0 % the loader bounds the run, near 100 % the step does."
        ),
        id_="stages",
    )


def _timeline(document: Json) -> Markup:
    timeline = document["timeline"]
    if timeline is None:
        why = "a benchmark records it at its end, of fastload's loader; here there is none."
        return _section("Timeline of the threads", _note(f"{UNKNOWN}: {why}"), id_="timeline")
    seconds = timeline["seconds"]
    cells: list[Markup] = []
    for one in timeline["lanes"]:
        inside = _covered(one["spans"], lambda stage: stage not in ("wait", "step"))
        said = f"loads {percent(inside / seconds)}"
        if one["thread"] == "loop":
            waits = _covered(one["spans"], lambda stage: stage == "wait")
            said = f"in next() {percent(waits / seconds)}"
        picture = charts.lane(one["spans"], seconds=seconds, label=f"{one['thread']}: {said}")
        cells += [*_cells("span", one["thread"], picture), element("span", said, class_="share")]
    if timeline["queue"]:
        shares = [one["ready_share"] for one in timeline["queue"]]
        said = f"ready {percent(sum(shares) / len(shares))}"
        picture = charts.queue_lane(timeline["queue"], seconds=seconds, label=f"queue: {said}")
        cells += [*_cells("span", "queue", picture), element("span", said, class_="share")]
    stages = dict.fromkeys(span["stage"] for one in timeline["lanes"] for span in one["spans"])
    words = {**_STAGES, "wait": "the loop in next()", "step": "the loop's step"}
    entries = [(charts.stage_class(stage), words.get(stage, stage)) for stage in stages]
    if timeline["queue"]:
        entries.append(("stage-ready", "batches ready, of those in flight, as the loop asks"))
    cut = " Later spans are left out: there are too many to draw." if timeline["cut"] else ""
    return _section(
        "Timeline of the threads",
        charts.legend(entries),
        element("figure", element("div", *cells, charts.time_axis(seconds), class_="lanes")),
        _note(
            f"{timeline['run']}, the last {timeline['steps']} steps of a short run in one rank. They are real spans, "
            "from torch's profiler; that run is slower for it and counts in no figure. Point at a span to read it."
            + cut
        ),
        id_="timeline",
    )


def _covered(spans: Sequence[Json], wanted: Callable[[str], bool]) -> float:
    """Seconds that the wanted spans of one thread cover, each once, although they lie within each other."""
    covered = reached = 0.0
    for span in spans:  # by their beginning
        if wanted(span["stage"]):
            covered += max(0.0, span["to_s"] - max(reached, span["from_s"]))
            reached = max(reached, span["to_s"])
    return covered


def _cells(name: str, *values: Child) -> list[Markup]:
    return [element(name, value) for value in values]


def _grid(caption: str, titles: Sequence[str], lines: Sequence[Sequence[Child]]) -> Markup:
    """A table that scrolls sideways where the screen is narrow; the first cell of a line is its name."""
    head = element("tr", *(element("th", title, scope="col") for title in titles))
    body = (
        element("tr", element("th", line[0], scope="row"), *_cells("td", *line[1:]))
        for line in lines
    )
    table = element(
        "table", element("caption", caption), element("thead", head), element("tbody", *body)
    )
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _table(document: Json) -> Markup:
    roof = document["roofline"]
    ceilings = {(c["ranks"], c["workers"]): c for c in roof["ceilings"]} if roof else {}

    def line(row: Json) -> list[Child]:
        ceiling = ceilings.get((row["ranks"], row["workers"]))
        return [
            row["name"],
            _median(row["rate"]),
            _range(row["rate"]),
            _median(row["rank_rate"]),
            _median(row["ratio"], ".2f"),
            _number(ceiling and ceiling["rate"]),
            _BOUNDS[ceiling["by"]].split(",")[0] if ceiling else UNKNOWN,
            _median(row["first_batch_s"], ".3f"),
            _median(row["cpu_s_per_1000"], ".2f"),
            _median(row["peak_bytes"], ".0f", scale=2**-20),
            _median(row["wait_share"], ".0%"),
            _median(row["occupancy"], ".0%"),
            f"{row['unique_samples']} of {row['samples']}",
            _median(row["cached_share"], ".0%"),
            row["runs"],
        ]

    titles = (
        *("loader", "img/s", "smallest to largest", "img/s a rank", "x serial", "bound", "bound by"),
        *("1st batch s", "CPU s/1000", "peak MiB", "loop waited", "queue ready", "unique samples"),
        *("cached", "runs"),
    )  # fmt: skip
    caption = "Medians; img/s of all ranks together, x serial over serial in as many ranks"
    return _section(
        "Figures", _grid(caption, titles, [line(row) for row in document["rows"]]), id_="figures"
    )


def _runs(document: Json) -> Markup:
    def line(number: int, run: Json) -> list[Child]:
        figures = run["figures"] or {}
        rates = figures.get("rank_rates", [])
        return [
            str(number),
            _name(run, document["rows"]),
            _number(figures.get("rate"), ".2f"),
            " ".join(f"{rate:.1f}" for rate in rates) if len(rates) > 1 else UNKNOWN,
            _number(figures.get("first_batch_s"), ".3f"),
            _number(figures.get("steady_s"), ".3f"),
            _number(figures.get("total_s"), ".3f"),
            _number(figures.get("close_s"), ".3f"),
            _number(figures.get("wait_share"), ".1%"),
            _number(run["others_share"], ".0%"),
            run["error"] or "",
        ]

    titles = (
        *("run", "loader", "img/s", "each rank", "1st batch s", "steady s", "total s", "close s"),
        *("loop waited", "other processes", "error"),
    )  # fmt: skip
    lines = [line(number, run) for number, run in enumerate(document["runs"], start=1)]
    body = (
        _grid("In the order in which they ran", titles, lines)
        if lines
        else _note("No run was completed.")
    )
    return _section("Every run", body, id_="runs")


def _entry(name: str, *value: Child) -> tuple[Markup, Markup]:
    return element("dt", name), element("dd", *value)


def _provenance(document: Json) -> Markup:
    origin, work = document["provenance"], document["workload"]
    machine, versions = origin["machine"], origin["versions"]
    cores = machine["cores_usable"] or machine["cores"]
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    entries = [
        ("command", element("code", shlex.join(origin["command"]))),
        ("date", origin["date"]),
        ("machine", f"{machine['cpu']}, {cores} of {machine['cores']} cores usable, {memory}"),
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
                join([element("code", work["file_list"]), f", {_TRANSFORMS[work['transform']]}"]),
            ),
            (
                "batches",
                f"{work['steps']} steps of {work['batch_size']} samples in each rank, seed {work['seed']}",
            ),
            ("ranks", f"{', '.join(map(str, ranks))}: processes on this node, started together"),
            ("page cache", f"{work['cache']} before each run"),
            ("step", document["step"]),
        ]
    return _section(
        "Provenance",
        element("dl", *(part for name, value in entries for part in _entry(name, value))),
        id_="provenance",
    )
