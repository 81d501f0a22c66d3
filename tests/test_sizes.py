"""Promises:
- No file has over 400 lines, no class over 20 methods, no function body over 60 lines of code.
- The lines of code that `fastload.DataLoader` loads do not grow.

Lines of code are lines that are neither blank, nor comments, nor docstrings.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fastload"
FILES = sorted(PACKAGE.rglob("*.py"))

FILE_LINES = 400
CLASS_METHODS = 20
FUNCTION_LINES = 60
"""Lines of code of the body: a signature of thirty arguments is thirty lines, and one thing to read."""

IMPORTED_LINES = 8_285
"""Lines of code of all files that `fastload.DataLoader` loads. The aim is 4,200."""

TOKENS_OF_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def lines_of_code(path: Path) -> set[int]:
    source = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {
        number
        for token in tokens
        if token.type not in TOKENS_OF_NO_CODE
        for number in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            assert node.end_lineno is not None
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return lines


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_longer_than_allowed(path: Path) -> None:
    longer = [
        f"{name} has {length}, allowed are {allowed}"
        for name, length, allowed in lengths(path)
        if length > allowed
    ]
    assert not longer, "divide or shorten: " + "; ".join(longer)


def imported_files() -> list[Path]:
    code = "import sys, fastload; fastload.DataLoader; print(*[n for n in sys.modules if n.startswith('fastload')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = [PACKAGE.parent.joinpath(*name.split(".")) for name in run.stdout.split()]
    return [m / "__init__.py" if m.is_dir() else m.with_suffix(".py") for m in modules]


def test_what_the_loader_loads_does_not_grow() -> None:
    found = sum(len(lines_of_code(path)) for path in imported_files())
    assert found <= IMPORTED_LINES, (
        "raise the figure only for what users need; see `git diff --stat fastload`"
    )
