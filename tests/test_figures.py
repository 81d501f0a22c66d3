"""Promises:
- Each figure of README and docs that is of the record stands there as the record has it. All others have a date.
- A record names its commit, day, machine and versions, and its medians are those of its runs.
- `--all` says what runs and how long the rest may take, and goes on where an earlier run at the same commit ended.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import pytest

from benchmarks import __main__ as command
from benchmarks import figures, record
from benchmarks._run import Case, Outcome

RECORD, TEXTS = figures.content()
EXPECTED = figures.lines(RECORD, TEXTS)
NUMBERS = (record.ROOT / "docs" / "numbers.md").read_text()
MEASURED, _, EARLIER = NUMBERS.partition("\n## Earlier, and on other machines\n")
EXEMPT = {
    "Single figures",
    "Packed rows on a GPU",
    "The first batch on each Python",
    "Without the GIL",
}
"""What needs other machines, other Pythons, or recipes that are gone."""


def rows_of(text: str) -> list[str]:
    """Return the rows of the tables of a page, without their heads."""
    lines = text.split("\n")
    return [
        line
        for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False)
        if line.startswith("| ") and not after.startswith("|--")
    ]


@pytest.mark.parametrize("page", EXPECTED)
def test_each_figure_of_a_page_is_that_of_the_record(page: str) -> None:
    text = (record.ROOT / page).read_text()
    written = figures.filled(page, text, EXPECTED[page])
    wrong = sorted(set(text.split("\n")) - set(written.split("\n")))
    assert not wrong, f"not of the record; run `python -m benchmarks.figures`: {wrong}"


@pytest.mark.parametrize("page", EXPECTED)
def test_a_figure_that_is_edited_by_hand_is_found(page: str) -> None:
    text = (record.ROOT / page).read_text()
    for (_, line), template in zip(EXPECTED[page], TEXTS["pages"][page], strict=True):
        *_, last = figures.PLACE.finditer(template)
        end = len(line) - (len(template) - last.end())
        edited = text.replace(line, f"{line[: end - 1]}~{line[end:]}")
        assert edited != text
        assert figures.filled(page, edited, EXPECTED[page]) == text


def test_a_line_that_a_page_lacks_is_named() -> None:
    with pytest.raises(ValueError, match=r"a\.md has this line 0 times: 3 x"):
        figures.filled("a.md", "4 times", [(".*? x", "3 x")])
    with pytest.raises(ValueError, match="2 times"):
        figures.filled("a.md", "4 x\n5 x", [(".*? x", "3 x")])


def test_numbers_shows_the_record_and_what_has_a_date_and_nothing_else() -> None:
    of_record = {line for _, line in EXPECTED["docs/numbers.md"]}
    assert rows_of(MEASURED)
    assert [row for row in rows_of(MEASURED) if row not in of_record] == []
    sections = dict(part.split("\n", 1) for part in re.split("^### ", EARLIER, flags=re.M)[1:])
    assert sections.keys() == EXEMPT
    assert [name for name, text in sections.items() if "November 2026" not in text] == []


def test_a_ratio_in_a_table_of_the_readme_is_of_the_record() -> None:
    of_record = {line for _, line in EXPECTED["README.md"]}
    rows = rows_of((record.ROOT / "README.md").read_text())
    measured = [row for row in rows if re.search(r"\d (x|ms|us|MiB)\b", row)]
    assert [row for row in measured if row not in of_record] == []
    assert 0 < len(measured) <= 8


def test_the_record_names_where_it_is_from_and_its_medians_are_those_of_its_runs() -> None:
    origin = RECORD["provenance"]
    assert {"date", "command", "machine", "versions", "git_commit"} <= origin.keys()
    trial = RECORD["smoke"] or all(
        run["repeat"] == 0 for each in RECORD["benchmarks"].values() for run in each["runs"]
    )
    assert NUMBERS.startswith(
        "# Numbers\n\nA trial, to be replaced. " if trial else "# Numbers\n\nMeasured on "
    )
    measured = RECORD["benchmarks"].keys()
    assert measured < record.ALL.keys() if RECORD["smoke"] else measured == record.ALL.keys()
    outcomes = record.outcomes_of(RECORD)
    for name, content in RECORD["benchmarks"].items():
        cases = [Case(case, {}) for case in outcomes[name]]
        found = [asdict(row) for row in record.Section.of(name, cases, outcomes[name]).rows]
        assert json.loads(json.dumps(found)) == content["rows"], name


def test_every_name_is_a_row_and_is_shown() -> None:
    shown = {
        place.strip("{}").partition(":")[0]
        for lines in TEXTS["pages"].values()
        for line in lines
        for place in figures.PLACE.findall(line)
    }
    assert shown >= TEXTS["names"].keys()
    lacking = copy.deepcopy(RECORD)
    del lacking["benchmarks"]["peers"]
    known = figures.names(lacking, TEXTS)
    assert f"{known['plan']:fs}" == "not measured"
    assert {name for name in shown if name in figures.names(RECORD, TEXTS)} == shown


def test_the_plot_has_few_bars_and_its_title_is_of_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "PLOT", tmp_path / "plot.png")
    known = figures.names(RECORD, TEXTS)
    assert len(figures.BARS) <= 12
    assert f"{known['plan']:x} x as fast as torch" in figures.title(known)
    figures.draw(known)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# ---- running it ----


def test_progress_says_what_runs_and_how_long_the_rest_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = Outcome(None, seconds=90.0), Outcome(None, seconds=30.0)
    cases = [Case("slow", {}), Case("fast", {})]
    section = record.Section("a", cases, {"slow": [slow], "fast": [fast]}, [], {})
    kept = tmp_path / "record.json"
    kept.write_text(json.dumps(record.document({}, {"a": section}, smoke=False)))
    monkeypatch.setattr(record, "RECORD", kept)
    progress = record.Progress([("a", "slow"), ("a", "fast"), ("a", "new")])
    assert progress.line("a", "slow", math.inf) == "a: slow (1 of 3, some 3 min left)"
    progress.ended(180.0)  # twice as long as in the record, and so is the rest
    assert progress.line("a", "fast", math.inf) == "a: fast (2 of 3, some 3 min left)"
    assert progress.line("a", "fast", 240.0) == "a: fast (2 of 3, some 1 min left)"


def test_a_run_of_all_goes_on_where_an_earlier_one_at_its_commit_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "UNFINISHED", tmp_path / "all.json")
    origin: dict[str, Any] = RECORD["provenance"]
    assert record.unfinished(origin) == {}
    runs = [Outcome({"rate": 2.0}, seconds=1.0), Outcome(None, "broke", failed=True)]
    case = Case("threads, 4", {"kind": "thread"})
    section = record.Section("collate", [case], {case.name: runs}, [], {"grain": None})
    record.UNFINISHED.write_text(
        json.dumps(record.document(origin, {"collate": section}, smoke=False))
    )
    assert record.unfinished(origin) == {"collate": {case.name: runs}}
    assert record.unfinished(origin | {"git_commit": "another"}) == {}
    assert record.unfinished(origin | {"versions": {}}) == {}
    assert record.unfinished(origin | {"machine": origin["machine"] | {"cpu": "Another"}}) == {}


def test_repeats_have_all_cases_and_none_begins_that_would_end_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(0, 60)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(command, "execute", lambda name, case: Outcome({"rate": 1.0}))
    first, second = Case("first", {}), Case("second", {})
    planned = command.plan({"a": [first, second], "b": [first]}, {"a": 4, "b": 1})
    assert [(repeat, name, case.name) for repeat, name, case in planned[:5]] == [
        (0, "a", "first"),
        (0, "a", "second"),
        (0, "b", "first"),
        (1, "a", "second"),
        (1, "a", "first"),
    ]
    outcomes: record.Outcomes = {}
    runs = command.run(planned, outcomes, minutes=7.0)
    list(itertools.islice(runs, 4))  # interrupted: 3 minutes, and one
    assert {name: [*map(len, each.values())] for name, each in outcomes.items()} == {
        "a": [1, 2],
        "b": [1],
    }
    list(command.run(planned, outcomes, minutes=7.0))  # 5 of 7 minutes; a third repeat takes 2.5
    assert [*map(len, outcomes["a"].values())] == [2, 2]
    list(command.run(planned, outcomes, minutes=None))
    assert [*map(len, outcomes["a"].values())] == [4, 4]


def test_all_takes_no_names() -> None:
    done = click.testing.CliRunner().invoke(command.main, ["--all", "images"])
    assert done.exit_code == 2
    assert "Leave out the names" in done.stderr
