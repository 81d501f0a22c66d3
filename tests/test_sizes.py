"""Promises:
- No file has over 400 lines, no class over 20 methods, no function body over 60 lines of code.
- No folder has more lines of code than its row in `tests/budgets.py` allows.
- The sum of all budgets only falls, but for the features that the table names.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.budgets import BUDGETS, FEATURES, ROOT, TABLE, git, lines_of_code, measured, sum_at_base

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


def test_a_folder_is_within_its_budget() -> None:
    found = measured()
    over = {row: found[row] - budget for row, budget in BUDGETS.items() if found[row] > budget}
    assert not over, (
        f"remove as many lines of code, or raise these rows in {TABLE} and lower others"
    )


# ---- the sum only falls, but for features ----


def commit(folder: Path) -> str:
    """Commit all files of a repository, and return the commit."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    git(folder, "add", "--all")
    git(folder, *who, "commit", "--quiet", "--allow-empty", "--message", "change")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with a table, and `.ci/base` that names its one commit."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for folder in (".ci", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / TABLE).write_text("BUDGETS = {'fastload/flow': 1_000, 'fastload/store': 3_000}\n")
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".ci" / "base").write_text(commit(tmp_path) + "\n")
    return tmp_path


def test_the_sum_is_read_from_the_base(repository: Path) -> None:
    (repository / TABLE).write_text("BUDGETS = {'fastload/flow': 9_000}\n")
    assert sum_at_base(repository) == 4_000
    commit(repository)
    assert sum_at_base(repository) == 4_000


def test_the_sum_of_all_budgets_only_falls_but_for_features() -> None:
    try:
        before = sum_at_base()
    except LookupError as reason:
        pytest.skip(f"cannot compare with the table of the change before: {reason}")
    assert sum(BUDGETS.values()) <= before + sum(FEATURES.values())
