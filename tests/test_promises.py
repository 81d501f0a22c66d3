"""Promises:
- Each sentence that a test held when the baseline was drawn up still has its test, or CHANGELOG.md says that it is
  given up.
- Each of the ten promises of the README names a test or a benchmark that holds it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
BASELINE = ROOT / "tests" / "data" / "promises.json"
"""Part to rows. A row is a sentence, and what holds it: `FILE` or `FILE::TEST`, without parameters."""


def exists(test: str) -> bool:
    """Return whether there is such a file or folder, with a test of that name."""
    file, *names = test.split("::")
    path = ROOT / file
    text = path.read_text() if names and path.is_file() else ""
    defined = set(re.findall(r"^ *(?:def|class) (\w+)", text, flags=re.M))
    return path.exists() and set(names) <= defined


def given_up(changelog: str) -> str:
    """Return the sections "Given up" of the changelog, each line break a space."""
    found = re.findall(r"^(#+) Given up\n(.*?)(?=^#|\Z)", changelog, flags=re.M | re.S)
    return " ".join(" ".join(text.split()) for _, text in found)


def lost(rows: list[list[str]], changelog: str) -> list[str]:
    """Return the sentences that no test holds, and that are not given up, with the tests that are gone."""
    said = given_up(changelog)
    gone = [
        (sentence, [t for t in tests if not exists(t)] or not tests) for sentence, *tests in rows
    ]
    return [f"{sentence} {tests}" for sentence, tests in gone if tests and sentence not in said]


def test_each_promise_of_the_baseline_has_its_test_or_is_given_up() -> None:
    rows = [row for part in json.loads(BASELINE.read_text()).values() for row in part]
    assert len(rows) > 600
    faults = lost(rows, (ROOT / "CHANGELOG.md").read_text())
    assert not faults, (
        f"name the test that holds each of these in {BASELINE.relative_to(ROOT)}, or write the sentence, and what a "
        "user does instead, below a heading `Given up` of CHANGELOG.md:\n" + "\n".join(faults)
    )


def test_a_promise_without_a_test_is_found() -> None:
    here = "tests/test_promises.py"
    held = [["A.", here], ["B.", f"{here}::exists"]]
    assert lost(held, "") == []
    gone = [["C d.", "tests/none.py"], ["D.", here, f"{here}::none"], ["E."]]
    assert [fault[0] for fault in lost([*held, *gone], "C d. D. E.")] == ["C", "D", "E"]
    assert lost(gone, "### Given up\n\n- C\n  d. Do e.\n- E.\n\n### New\n\n- D.\n")[0][0] == "D"


def test_the_ten_promises_of_the_readme_name_their_tests() -> None:
    text = (ROOT / "README.md").read_text()
    section = text.partition("\n## Ten promises\n")[2].partition("\n## ")[0]
    promises = re.split(r"^\d+\. ", section, flags=re.M)[1:]
    tests = [re.findall(r"\]\(((?:tests|benchmarks)/[^)]+)\)", promise) for promise in promises]
    assert len(promises) == 10
    assert all(tests), tests
    assert [test for found in tests for test in found if not exists(test)] == []
