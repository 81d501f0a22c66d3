"""The tables of report.html, from a document of `report.document`: medians by row, and every run."""

from __future__ import annotations

from fastload.bench.page.markup import UNKNOWN, Child, Markup, grid, note, section
from fastload.bench.page.panels import Json


def _number(value: float | None, form: str = ".1f", *, scale: float = 1.0) -> str:
    return UNKNOWN if value is None else format(value * scale, form)


def _median(spread: Json | None, form: str = ".1f", *, scale: float = 1.0) -> str:
    return UNKNOWN if spread is None else _number(spread["median"], form, scale=scale)


def _range(spread: Json | None, form: str = ".1f") -> str:
    if spread is None:
        return UNKNOWN
    return f"{format(spread['low'], form)} to {format(spread['high'], form)}"


def figures_table(document: Json) -> Markup:
    """Return a table with a line for each row: medians, and the bound."""
    roof = document["roofline"]
    bounds = roof["ceilings"] if roof else []
    ceilings = {(c["plan"], c["ranks"], c["workers"]): c for c in bounds}

    def line(row: Json) -> list[Child]:
        ceiling = ceilings.get((row["loader"] == "plan", row["ranks"], row["workers"]))
        return [
            row["name"],
            _median(row["rate"]),
            _range(row["rate"]),
            _median(row["rank_rate"]),
            _median(row["ratio"], ".2f"),
            _number(ceiling and ceiling["rate"]),
            ceiling["by"] if ceiling else UNKNOWN,
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
        *("loader", "img/s", "smallest to largest", "img/s per rank", "x serial", "bound", "bound by"),
        *("1st batch s", "CPU s/1000", "peak MiB", "loop waited", "queue ready", "unique samples"),
        *("cached", "runs"),
    )  # fmt: skip
    caption = (
        "Medians; img/s of all ranks together, x serial compared with the same number of ranks"
    )
    return section(
        "Figures", grid(caption, titles, [line(row) for row in document["rows"]]), id_="figures"
    )


def runs_table(document: Json) -> Markup:
    """Return a table with a line for each run, failed ones included."""

    def line(number: int, run: Json) -> list[Child]:
        figures = run["figures"] or {}
        rates = figures.get("rank_rates", [])
        return [
            str(number),
            run["name"],
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
        grid("In the order in which they ran", titles, lines)
        if lines
        else note("No run was completed.")
    )
    return section("Every run", body, id_="runs")
