"""The record of two cores: what `python -m benchmarks --all` runs, how long that takes, and what of it is there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks._report import Row
from benchmarks._run import Case, Outcome, load
from fastload.measure.provenance import version

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks" / "results" / "two-cores.json"
UNFINISHED = ROOT / "results" / "bench-all.json"
"""What of a record is there, until all of it is. The next run at this commit goes on from it."""

ALL = {
    "images": "",
    "latency": r"\b(8|32|64)$",
    "small": "",
    "tensor_dataset": "",
    "memory": r"\b32(, fork)?$",
    "thread_cost": "",
    "processes": "",
    "step": "",
    "store": "",
    "sequences": "",
    "peers": "",
}
"""The benchmarks of the record, each with a pattern for the names of its cases."""
ALL_REPEATS, ALL_MINUTES = 7, 90


Outcomes = dict[str, dict[str, list[Outcome]]]
"""Of each benchmark, of each case: the outcome of each repeat."""


@dataclass(frozen=True, slots=True)
class Section:
    """A benchmark that was run."""

    title: str
    cases: Sequence[Case]
    outcomes: dict[str, list[Outcome]]
    rows: list[Row]
    versions: dict[str, str | None]
    """Of the packages that this benchmark alone measures, None for one that is not installed; and its `machine()`."""
    text: str = ""
    """What the benchmark shows beside the table, or ""."""

    @classmethod
    def of(cls, name: str, cases: Sequence[Case], outcomes: dict[str, list[Outcome]]) -> Section:
        """Make the rows of what was run."""
        benchmark = load(name)
        count = max(map(len, outcomes.values()))
        results = {
            case.name: ([run.figures for run in outcomes.get(case.name, [])] + [None] * count)[
                :count
            ]
            for case in cases
        }
        versions = {package: version(package) for package in getattr(benchmark, "PACKAGES", ())}
        versions |= getattr(benchmark, "machine", dict)()
        text = getattr(benchmark, "text", lambda _: "")(results)
        return cls(benchmark.TITLE, cases, outcomes, benchmark.rows(results), versions, text)


def document(origin: Any, sections: Mapping[str, Section], *, smoke: bool) -> dict[str, Any]:
    """Return everything as JSON values: provenance, rows, and the figures of each run."""
    return {
        "format": "fastload-benchmarks/1",
        "provenance": origin,
        "smoke": smoke,
        "benchmarks": {
            name: {
                "title": section.title,
                "versions": section.versions,
                "rows": [asdict(row) for row in section.rows],
                "runs": [
                    {"case": case.name, "options": case.options, "repeat": repeat} | asdict(outcome)
                    for case in section.cases
                    for repeat, outcome in enumerate(section.outcomes.get(case.name, []))
                ],
            }
            for name, section in sections.items()
        },
    }


def outcomes_of(content: dict[str, Any]) -> Outcomes:
    """Return the outcomes that a document has."""
    found: Outcomes = {}
    for name, section in content["benchmarks"].items():
        for run in section["runs"]:
            fields = {key: run[key] for key in Outcome.__dataclass_fields__}
            found.setdefault(name, {}).setdefault(run["case"], []).append(Outcome(**fields))
    return found


def unfinished(origin: dict[str, Any]) -> Outcomes:
    """Return what an interrupted run of `--all` has, if it was of this commit and machine."""
    if not UNFINISHED.exists():
        return {}
    content = json.loads(UNFINISHED.read_text())
    theirs = content["provenance"]
    same = all(theirs[key] == origin[key] for key in ("git_commit", "versions"))
    return (
        outcomes_of(content)
        if same and theirs["machine"]["cpu"] == origin["machine"]["cpu"]
        else {}
    )


class Progress:
    """Says which run comes next, and the time left, by what the cases took in the record."""

    def __init__(self, plan: Iterable[tuple[str, str]]) -> None:
        kept = outcomes_of(json.loads(RECORD.read_text())) if RECORD.exists() else {}
        known = {
            (name, case): median(run.seconds for run in runs)
            for name, cases in kept.items()
            for case, runs in cases.items()
        }
        other = fmean(known.values()) if known else 10.0  # a guess, for the first record
        self._expected = [known.get(key, other) for key in plan]
        self._took: list[float] = []

    def line(self, name: str, case: str, limit_s: float) -> str:
        """Return what is said before a run begins. The rest takes no longer than `limit_s` less what was spent."""
        done = sum(self._expected[: len(self._took)])
        left = (sum(self._took) / done if done else 1.0) * (sum(self._expected) - done)
        minutes = min(left, max(0.0, limit_s - sum(self._took))) / 60
        of = f"{len(self._took) + 1} of {len(self._expected)}"
        return f"{name}: {case} ({of}, some {minutes:.0f} min left)"

    def ended(self, seconds: float) -> None:
        """Note what that run took."""
        self._took.append(seconds)
