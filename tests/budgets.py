"""The budgets of the folders, in lines of code. `python -m tests.budgets` prints what each has.

A file counts in the innermost folder with a row. The sum of all budgets may only fall: who raises one lowers
another, or names a feature in `FEATURES`.
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

BUDGETS = {
    "fastload": 675,
    "fastload/_kit": 887,
    "fastload/bench": 500,
    "fastload/check": 515,
    "fastload/cli": 1_239,
    "fastload/compat": 431,
    "fastload/datasets": 1_295,
    "fastload/datasets/packed": 1_352,
    "fastload/distributed": 1_345,
    "fastload/elastic": 693,
    "fastload/engine": 1_713,
    "fastload/flow": 735,
    "fastload/image": 764,
    "fastload/image/kernels": 1_456,
    "fastload/integrations": 726,
    "fastload/measure": 591,
    "fastload/memory": 684,
    "fastload/order": 1_249,
    "fastload/parameters": 1_503,
    "fastload/processes": 2_006,
    "fastload/random": 985,
    "fastload/reading": 1_091,
    "fastload/remote": 1_678,
    "fastload/safety": 1_591,
    "fastload/sequences": 1_237,
    "fastload/store": 2_689,
    "fastload/stream": 853,
    "fastload/streams": 1_206,
    "fastload/telemetry": 1_117,
    "fastload/train": 1_095,
    "benchmarks": 2_581,
}

FEATURES: dict[str, int] = {
    "streams: generators of the user's own, counts of samples, runs of samples": 345,
    "object stores, their cache and benchmark, and datasets that hear what is read next": 2688,
}
"""Lines that features have added since the commit in `.ci/base`. Empty it when that file names a newer commit."""

ROOT = Path(__file__).parent.parent
TABLE = "tests/budgets.py"
COUNTED = [
    str(path.relative_to(ROOT))
    for folder in ("fastload", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".c", ".h")
]

TOKENS_OF_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def lines_of_code(path: Path) -> set[int]:
    """Return the numbers of the lines that are neither blank, nor comments, nor docstrings."""
    source = path.read_text()
    if path.suffix != ".py":
        return lines_of_c(source)
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


def lines_of_c(source: str) -> set[int]:
    blanked = re.sub(
        r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), source, flags=re.DOTALL
    )
    return {number for number, line in enumerate(blanked.splitlines(), 1) if line.strip()}


def row_of(file: str) -> str:
    """Return the innermost folder with a row that holds a file. Raise ValueError if none does."""
    return max((row for row in BUDGETS if file.startswith(f"{row}/")), key=len)


@cache
def measured() -> Counter[str]:
    """Return the lines of code of each row."""
    found = Counter(dict.fromkeys(BUDGETS, 0))
    for file in COUNTED:
        found[row_of(file)] += len(lines_of_code(ROOT / file))
    return found


# ---- their sum may only fall, but for features ----


def table_in(source: str) -> dict[str, int]:
    """Return the table in the source of this file at some commit. Raise LookupError if it has none."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BUDGETS":
            table: dict[str, int] = ast.literal_eval(node.value)
            return table
    raise LookupError(f"{TABLE} has no table")


def git(root: Path, *arguments: str) -> str:
    """Return what git prints in a repository, even if this process is a hook of another one."""
    command = ["git", "-C", str(root), *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env["LC_ALL"] = "C"  # an error in English
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return ended.stdout.strip()


def sum_at_base(root: Path = ROOT) -> int:
    """Return the sum of all budgets at the commit in `.ci/base`.

    Raise LookupError if there is nothing to compare with: no such file, no git, or no table in that commit.
    """
    try:
        base = (root / ".ci" / "base").read_text().strip()
        return sum(table_in(git(root, "show", f"{base}:{TABLE}")).values())
    except OSError as error:
        raise LookupError(str(error)) from error
    except subprocess.CalledProcessError as error:
        raise LookupError(error.stderr.strip()) from error


def table() -> str:
    """Return a line for each row: its lines of code, its budget, and what is left of it."""
    found = measured()
    lines = [f"{'part':26}{'code':>8}{'budget':>8}{'left':>7}"]
    for row, budget in [*BUDGETS.items(), ("all", sum(BUDGETS.values()))]:
        code = found.total() if row == "all" else found[row]
        lines.append(f"{row:26}{code:8,}{budget:8,}{budget - code:7,}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
