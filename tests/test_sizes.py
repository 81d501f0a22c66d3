"""Promises:
- No file has over 400 lines, no class over 20 methods, no function body over 60 lines of code.
- No part has more lines of code than its row in `tests/budgets.py` allows, and every file is in one row.
- Budgets only fall: a row that rises is named in the changelog, and others fall by as many lines.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.budgets import (
    BUDGETS,
    COUNTED,
    LISTED,
    ROOT,
    TABLE,
    faults,
    faults_since_base,
    git,
    lines_of_code,
    measured,
    rows_of,
)

PACKAGE = ROOT / "fastload"

FILE_LINES = 400
CLASS_METHODS = 20
FUNCTION_LINES = 60
"""Lines of code of the body: a signature of thirty arguments is thirty lines, and one thing to read."""


def lengths(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield what is in a file by name, with its length and the length that is allowed."""
    name = str(path.relative_to(PACKAGE))
    yield name, len(path.read_text().splitlines()), FILE_LINES
    code = lines_of_code(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            methods = [
                n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            yield f"{name}: {node.name}", len(methods), CLASS_METHODS
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            body = set(range(node.body[0].lineno, node.end_lineno + 1))
            yield f"{name}: {node.name}()", len(code & body), FUNCTION_LINES


def test_nothing_is_longer_than_allowed() -> None:
    longer = [
        f"{name} has {length}, allowed are {allowed}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, length, allowed in lengths(path)
        if length > allowed
    ]
    assert not longer, "divide or shorten: " + "; ".join(longer)


def test_a_part_is_within_its_budget() -> None:
    found = measured()
    over = {row: found[row] - budget for row, budget in BUDGETS.items() if found[row] > budget}
    assert not over, (
        f"remove as many lines of code. If users need them, raise these rows in {TABLE}, lower others by as many, and "
        "name them in backquotes in a new file changes/*.md"
    )


def test_every_file_is_in_one_row_and_every_name_in_the_table_is_that_of_a_file() -> None:
    rows = {file: rows_of(file) for file in COUNTED}
    assert {file: found for file, found in rows.items() if len(found) != 1} == {}, (
        f"list a file of the core in {TABLE}, or give its folder a row"
    )
    listed = [f"fastload/{name}.py" for names in LISTED.values() for name in names.split()]
    assert set(listed) <= set(COUNTED)
    assert LISTED.keys() <= BUDGETS.keys()


def loaded_files() -> set[str]:
    code = "import sys, fastload; fastload.DataLoader; print(*[n for n in sys.modules if n.startswith('fastload')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    paths = [ROOT.joinpath(*name.split(".")) for name in run.stdout.split()]
    files = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths]
    return {str(file.relative_to(ROOT)) for file in files}


VERDICTS = "verdicts and allow list"


def test_what_the_loader_loads_is_in_five_rows() -> None:
    loaded = loaded_files()
    rows = {"the way of an index", "loaded beside the way", "process workers", VERDICTS}
    named = {file for file in COUNTED if rows & {*rows_of(file)}}
    others = {file for file in loaded if rows_of(file) != ["fastload/safety"]}
    assert others == named, f"move these between the rows of {TABLE}: {sorted(others ^ named)}"


# ---- a budget may only fall ----

BEFORE = {"fastload/flow": 1_000, "fastload/store": 3_000}


@pytest.mark.parametrize(
    ("now", "changelog", "found"),
    [
        (BEFORE, "", []),
        ({"fastload/flow": 990, "fastload/store": 3_000}, "", []),
        ({"fastload/store": 3_000}, "", []),
        (
            {"fastload/flow": 1_010, "fastload/store": 3_000},
            "`fastload/flow`",
            ["all budgets together rose by 10"],
        ),
        (
            {"fastload/flow": 1_010, "fastload/store": 2_990},
            "fastload/flow runs",
            ["fastload/flow rose from 1000 to 1010: name `fastload/flow`"],
        ),
        ({"fastload/flow": 1_010, "fastload/store": 2_990}, "The budget `fastload/flow`", []),
        (
            {**BEFORE, "fastload/new": 10},
            "",
            ["all budgets together rose by 10", "fastload/new rose from 0 to 10"],
        ),
        ({"fastload/flow": 990, "fastload/store": 3_000, "new part": 10}, "`new\npart`", []),
    ],
)
def test_a_budget_that_rises_without_another_that_falls_or_without_a_word_is_a_fault(
    now: dict[str, int], changelog: str, found: list[str]
) -> None:
    faults_found = faults(BEFORE, now, changelog)
    assert len(faults_found) == len(found)
    for fault, beginning in zip(faults_found, found, strict=True):
        assert fault.startswith(beginning)


def commit(folder: Path) -> str:
    """Commit all files of a repository, and return the commit."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    git(folder, "add", "--all")
    git(folder, *who, "commit", "--quiet", "--allow-empty", "--message", "change")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with a table, a changelog, and `.ci/base` that names its one commit."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for folder in (".ci", "changes", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / TABLE).write_text(f"BUDGETS = {BEFORE}\n")
    (tmp_path / "CHANGELOG.md").write_text("`fastload/flow` of an earlier change\n")
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".ci" / "base").write_text(commit(tmp_path) + "\n")
    return tmp_path


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("file", ["CHANGELOG.md", "changes/flow.md"])
def test_the_table_is_compared_with_that_of_the_base(
    repository: Path, file: str, committed: bool
) -> None:
    def fault() -> str:
        if committed:
            commit(repository)
        return "; ".join(faults_since_base(repository))

    assert fault() == ""
    (repository / TABLE).write_text("BUDGETS = {'fastload/flow': 1_010, 'fastload/store': 3_000}\n")
    assert "together rose by 10" in fault()
    (repository / TABLE).write_text("BUDGETS = {'fastload/flow': 1_010, 'fastload/store': 2_990}\n")
    assert fault().startswith("fastload/flow rose from 1000 to 1010")
    with (repository / file).open("a") as changelog:
        changelog.write("More in the budget `fastload/flow`, so that a graph can wait.\n")
    assert fault() == ""


def test_what_cannot_be_compared_is_named(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = repository / ".ci" / "base"
    base.write_text("1" * 40)
    with pytest.raises(LookupError, match="1111"):
        faults_since_base(repository)
    (repository / TABLE).write_text("OTHER = {}")
    base.write_text(commit(repository))
    with pytest.raises(LookupError, match="has no table"):
        faults_since_base(repository)
    (repository / TABLE).unlink()
    base.write_text(commit(repository))
    with pytest.raises(LookupError, match=f"'{TABLE}' does not exist"):
        faults_since_base(repository)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        with pytest.raises(LookupError, match="git"):
            faults_since_base(repository)
    base.unlink()
    with pytest.raises(LookupError, match="No such file"):
        faults_since_base(repository)


def test_budgets_only_fall() -> None:
    try:
        found = faults_since_base()
    except LookupError as reason:
        pytest.skip(f"cannot compare with the table of the change before: {reason}")
    assert not found, "; ".join(found)
