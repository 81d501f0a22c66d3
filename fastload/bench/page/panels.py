"""The pictures of report.html with the words around them: a section each, out of a document of `report.document`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastload.bench.page import charts
from fastload.bench.page.markup import UNKNOWN, Child, Markup, definitions, element, note, section
from fastload.bench.plan import LOADER_NAMES
from fastload.telemetry.snapshot import duration, percent

_STAGES = {
    "sample": "rest of the sample",
    "idle": "waiting for room in the queue",
    "rest": "between samples",
    "step": "the loop, besides loading",
}

Json = dict[str, Any]


# ---- what a document says of a row ----


def fastest(rows: Sequence[Json]) -> Json | None:
    """The row with the highest median rate; None of none."""
    return max(rows, key=lambda row: row["rate"]["median"], default=None)


def typical(document: Json, row: Json) -> Json | None:
    """The figures of the run of a row whose rate is nearest to its median; None if it has no loader's stats."""
    mine = [
        run["figures"]
        for run in document["runs"]
        if run["name"] == row["name"] and run["figures"] and run["figures"]["loader_stats"]
    ]
    middle = row["rate"]["median"]
    return min(mine, key=lambda figures: abs(figures["rate"] - middle), default=None)


# ---- the panels ----


def rate_panel(document: Json) -> Markup:
    """A chart for each number of ranks: rates by workers, against serial and the bound."""
    rows, roof = document["rows"], document["roofline"]
    ceilings = roof["ceilings"] if roof else []
    pictures = []
    for ranks in sorted({row["ranks"] for row in rows}):
        here = [row for row in rows if row["ranks"] == ranks]
        label = "Images a second"
        if len({row["ranks"] for row in rows}) > 1 or ranks > 1:
            label += f", {ranks} rank{'s' if ranks > 1 else ''} on this node"
        bounds = [ceiling for ceiling in ceilings if ceiling["ranks"] == ranks]
        chart = charts.rate_chart(here, bounds, label=label)
        pictures.append(element("figure", element("h3", label), chart))
    entries = [
        (kind, name)
        for kind, name in LOADER_NAMES.items()
        if any(row["loader"] == kind for row in rows)
    ]
    return section(
        "Rate by workers",
        charts.legend([*entries, ("bound", "bound")] if ceilings else entries),
        element("div", *pictures, class_="pair"),
        note(
            "Points are medians of the runs, bars and the band reach from the smallest to the largest. "
            f"The first {document['warmup_steps']} steps of a run are warm-up and count in no rate. "
        ),
        note(*_bound_words(document)),
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


def first_batch_panel(rows: Sequence[Json]) -> Markup:
    """A bar for each row."""
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

    return section(
        "Time to the first batch",
        element("table", element("tbody", *map(line, rows)), class_="bars"),
        note(
            "From iter() to the first batch in hand: starting threads or processes is in it, imports are not. "
            "Of several ranks, the last one's."
        ),
        id_="first",
    )


def stages_panel(document: Json) -> Markup:
    """A divided bar for each row of fastload's loader, with how full its queue was and how long the loop waited."""
    lines: list[Markup] = []
    seen: dict[str, float] = {}
    findings: list[tuple[str, Child]] = []
    for row in document["rows"]:
        figures = typical(document, row)
        if figures is None:
            continue
        stats = figures["loader_stats"]
        shares = charts.stage_shares(stats, workers=row["workers"])
        seen.update(shares)
        findings.append((row["name"], figures["finding"]))
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
        body = note(
            f"{UNKNOWN}: only fastload's loader times its stages, and none of its runs is here."
        )
        return section("Where the time goes", body, id_="stages")
    titles = ("loader", "time of its threads", "queue ready", "loop waited")
    return section(
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
        note(
            "Shares of the worker threads' time, of the loop's own where it loads serially, in the run with the median "
            "rate; of several ranks, rank 0's. A thread that waits for storage, a core or the GIL is counted in "
            "the stage that it is in. Queue ready: of the batches in flight, those ready when the loop asked for one; "
            "near 0 % the loader bounds the run, near 100 % the step does."
        ),
        definitions(findings),
        id_="stages",
    )


def timeline_panel(document: Json) -> Markup:
    """A lane for each thread, and one for the queue."""
    timeline = document["timeline"]
    if timeline is None:
        why = "a benchmark records it at its end, of fastload's loader; here there is none."
        return section("Timeline of the threads", note(f"{UNKNOWN}: {why}"), id_="timeline")
    seconds = timeline["seconds"]
    lanes: list[Markup] = []

    def add(name: str, picture: Markup, said: str) -> None:
        lanes.extend((element("span", name), picture, element("span", said, class_="share")))

    for one in timeline["lanes"]:
        loop = one["thread"] == "loop"
        in_next = _covered(one["spans"], lambda stage: stage == "wait")
        loads = _covered(one["spans"], lambda stage: stage not in ("wait", "step"))
        said = percent((in_next if loop else loads) / seconds) + (" in next()" if loop else " busy")
        label = f"{one['thread']}: {said}"
        add(one["thread"], charts.lane(one["spans"], seconds=seconds, label=label), said)
    if timeline["queue"]:
        shares = [one["ready_share"] for one in timeline["queue"]]
        said = f"{percent(sum(shares) / len(shares))} ready"
        picture = charts.queue_lane(timeline["queue"], seconds=seconds, label=f"queue: {said}")
        add("queue", picture, said)
    stages = dict.fromkeys(span["stage"] for one in timeline["lanes"] for span in one["spans"])
    words = {**_STAGES, "wait": "the loop in next()", "step": "the loop's step"}
    entries = [(charts.stage_class(stage), words.get(stage, stage)) for stage in stages]
    if timeline["queue"]:
        entries.append(("stage-ready", "batches ready, of those in flight, as the loop asks"))
    cut = " Later spans are left out: there are too many to draw." if timeline["cut"] else ""
    return section(
        "Timeline of the threads",
        charts.legend(entries),
        element("figure", element("div", *lanes, charts.time_axis(seconds), class_="lanes")),
        note(
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
