"""The charts of report.html with their texts, from a document of `report.document`: one section for each."""

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
    """Return the row with the highest median rate, or None if there are no rows."""
    return max(rows, key=lambda row: row["rate"]["median"], default=None)


def typical(document: Json, row: Json) -> Json | None:
    """Return the figures of the row's run whose rate is nearest to the median, or None if no run has loader stats."""
    mine = [
        run["figures"]
        for run in document["runs"]
        if run["name"] == row["name"] and run["figures"] and run["figures"]["loader_stats"]
    ]
    middle = row["rate"]["median"]
    return min(mine, key=lambda figures: abs(figures["rate"] - middle), default=None)


# ---- the panels ----


def rate_panel(document: Json) -> Markup:
    """Return a chart for each number of ranks: rates by workers, with serial loading and the bound."""
    rows, roof = document["rows"], document["roofline"]
    ceilings = roof["ceilings"] if roof else []
    panels = []
    for ranks in sorted({row["ranks"] for row in rows}):
        here = [row for row in rows if row["ranks"] == ranks]
        label = "Images per second"
        if len({row["ranks"] for row in rows}) > 1 or ranks > 1:
            label += f", {ranks} rank{'s' if ranks > 1 else ''} on this node"
        these = [ceiling for ceiling in ceilings if ceiling["ranks"] == ranks]
        chart = charts.rate_chart(here, these, label=label)
        panels.append(element("figure", element("h3", label), chart))
    bounds = [(False, "bound", "bound"), (True, "bound-plan", "bound with a plan")]
    entries = [
        (kind, name)
        for kind, name in LOADER_NAMES.items()
        if any(row["loader"] == kind for row in rows)
    ] + [
        (class_, name)
        for plan, class_, name in bounds
        if any(ceiling["plan"] is plan for ceiling in ceilings)
    ]
    return section(
        "Rate by workers",
        charts.legend(entries),
        element("div", *panels, class_="pair"),
        note(
            "Points are medians of the runs. Bars and the band reach from the smallest to the largest run. "
            f"The first {document['warmup_steps']} steps of a run are warm-up, and no rate counts them. "
        ),
        note(_bound_words(document)),
        id_="rate",
    )


def _bound_words(document: Json) -> str:
    roof = document["roofline"]
    if roof is None:
        return f"Bound: {UNKNOWN}, because no run timed a sample."
    step_ms = document["workload"]["step_ms"]
    words = [
        "The bound is an estimate, the lowest of these rates.",
        "Workers: each worker is as fast as the fastest one of any run, so no measured rate is above this one.",
        f"Cores: {roof['cores'] or UNKNOWN} cores do nothing but compute samples, in the least CPU time of any run.",
        f"Step: the simulated step of {step_ms:g} ms, which is also the rate on data in memory."
        if step_ms
        else "No step is simulated, so it sets no bound.",
    ]
    for pace in roof["paces"]:
        kind = "With a plan" if pace["plan"] else "With torchvision's transforms"
        times = f"{duration(pace['sample_s'])}, with {duration(pace['sample_cpu_s'])} of CPU"
        words.append(f"{kind}, a sample took at least {times}.")
    return " ".join(words)


def first_batch_panel(rows: Sequence[Json]) -> Markup:
    """Return a bar for each row."""
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
            "From iter() to the first batch. It includes the start of threads or processes, but not imports. With "
            "several ranks, the time of the last rank."
        ),
        id_="first",
    )


def stages_panel(document: Json) -> Markup:
    """Return a divided bar for each row of fastload's loader, with the share of ready batches and of waiting."""
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
        body = note(f"{UNKNOWN}: only fastload's loader times its stages, and it has no run here.")
        return section("Where the time goes", body, id_="stages")
    titles = ("loader", "time of the threads", "queue ready", "loop waited")
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
            "Shares of the worker threads' time in the run with the median rate, on rank 0. For serial loading, they "
            "are shares of the loop's time. Waiting for storage, a core or the GIL counts in the stage of the thread. "
            "Queue ready: share of the batches in flight that were ready when the loop asked for one. Near 0 %, the "
            "loader is the limit; near 100 %, the step is."
        ),
        definitions(findings),
        id_="stages",
    )


def timeline_panel(document: Json) -> Markup:
    """Return a lane for each thread, and one for the queue."""
    timeline = document["timeline"]
    if timeline is None:
        why = "a benchmark records it at its end, and only for fastload's loader."
        return section("Timeline of the threads", note(f"{UNKNOWN}: {why}"), id_="timeline")
    seconds = timeline["seconds"]
    lanes: list[Markup] = []

    def add(name: str, chart: Markup, said: str) -> None:
        lanes.extend((element("span", name), chart, element("span", said, class_="share")))

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
        chart = charts.queue_lane(timeline["queue"], seconds=seconds, label=f"queue: {said}")
        add("queue", chart, said)
    stages = dict.fromkeys(span["stage"] for one in timeline["lanes"] for span in one["spans"])
    words = {**_STAGES, "wait": "the loop in next()", "step": "the loop's step"}
    entries = [(charts.stage_class(stage), words.get(stage, stage)) for stage in stages]
    if timeline["queue"]:
        entries.append(("stage-ready", "share of batches in flight that are ready"))
    cut = " Later spans are left out, because there are too many." if timeline["cut"] else ""
    return section(
        "Timeline of the threads",
        charts.legend(entries),
        element("figure", element("div", *lanes, charts.time_axis(seconds), class_="lanes")),
        note(
            f"{timeline['run']}: the last {timeline['steps']} steps of a short run in one rank, recorded by torch's "
            "profiler. The profiler slows that run down, so no figure counts it. Point at a span to see its name."
            + cut
        ),
        id_="timeline",
    )


def _covered(spans: Sequence[Json], wanted: Callable[[str], bool]) -> float:
    """Return the seconds that the wanted spans of one thread cover. Count overlaps once."""
    covered = reached = 0.0
    for span in spans:  # sorted by start
        if wanted(span["stage"]):
            covered += max(0.0, span["to_s"] - max(reached, span["from_s"]))
            reached = max(reached, span["to_s"])
    return covered
