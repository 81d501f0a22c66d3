"""The figures of a benchmark as CSV: a line for each run, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
from typing import Any

COLUMNS = (
    *("loader", "workers", "ranks", "repeat", "img_per_s", "rank_img_per_s_min", "rank_img_per_s_max"),
    *("first_batch_s", "steady_s", "total_s", "close_s", "wait_share", "occupancy", "cpu_s_per_1000"),
    *("peak_bytes", "samples", "unique_samples", "cached_share", "others_share", "intraop_threads"),
    *("batch_size", "steps", "warmup_steps", "cache", "transform", "step", "partial"),
    *("date", "git_commit", "cpu", "cores_usable", "torch", "error"),
)  # fmt: skip
"""In the order of the columns. Shares are 0 to 1; what is not known is empty, as are the figures of a failed run."""


def to_csv(document: dict[str, Any]) -> str:
    """A header and a line for each run of a document of `report.document`; what all have in common is in each."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    common = _common(document) if document["runs"] else {}
    writer.writerows({**common, **_line(run)} for run in document["runs"])
    return text.getvalue()


def _common(document: dict[str, Any]) -> dict[str, Any]:
    origin, work = document["provenance"], document["workload"]
    return {
        **{name: work[name] for name in ("batch_size", "steps", "cache", "transform")},
        "warmup_steps": document["warmup_steps"],
        "step": document["step"],
        "partial": document["partial"],
        "date": origin["date"],
        "git_commit": origin["git_commit"],
        "cpu": origin["machine"]["cpu"],
        "cores_usable": origin["machine"]["cores_usable"],
        "torch": origin["versions"]["torch"],
    }


def _line(run: dict[str, Any]) -> dict[str, Any]:
    figures = run["figures"] or {}
    rates = figures.get("rank_rates", [])
    stats = figures.get("loader_stats") if run["workers"] else None
    return {
        **{
            name: run[name]
            for name in (
                *("loader", "workers", "ranks", "repeat", "error"),
                *("cached_share", "others_share"),
            )
        },
        **{name: figures[name] for name in COLUMNS if name in figures},
        "img_per_s": figures.get("rate"),
        "rank_img_per_s_min": min(rates, default=None),
        "rank_img_per_s_max": max(rates, default=None),
        "occupancy": stats and stats["occupancy"],
        "peak_bytes": run["memory"] and run["memory"]["allocated"],
    }
