"""The budgets of the parts, in lines of code: what each part may have. `python -m tests.budgets` prints what it has.

A budget may only fall. A change that must raise one lowers others by as many lines. It names each raised row, in
backquotes, in a fragment under `changes/`, with the promise that the lines buy. A row may also wait for a part to come.
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

BUDGETS = {
    # files named in LISTED
    "the way of an index": 3_910,
    "loaded beside the way": 2_635,
    "the core's other files": 512,
    # folders, without the files and folders that have a row of their own
    "fastload/safety": 1_685,
    "fastload/telemetry": 278,
    "fastload/integrations": 714,
    "fastload/bench": 636,
    "fastload/check": 647,
    "fastload/cli": 1_577,
    "fastload/compat": 440,
    "fastload/datasets": 1_626,
    "fastload/datasets/packed": 1_672,
    "fastload/distributed": 1_740,
    "fastload/elastic": 712,
    "fastload/flow": 924,
    "fastload/image": 908,
    "fastload/image/kernels": 145,
    "kernels in C": 1_498,
    "fastload/measure": 672,
    "fastload/parameters": 1_693,
    "fastload/sequences": 1_330,
    "fastload/store": 2_978,
    "fastload/stream": 1_058,
    "fastload/train": 1_155,
    "benchmarks": 2_564,
    # parts of their own, and parts to come
    "process workers": 2_276,
    "verdicts and allow list": 194,
}

LISTED = {
    # Files that an index passes, from the loader's settings and the sampler to the batch. A stream has no indices.
    "the way of an index": """
        loader settings rows
        order/sampler order/sampler_state order/partition order/order order/drawing order/batches order/epochs
        order/state
        engine/iterator engine/readers engine/reports engine/window engine/waiting engine/workers engine/team
        engine/threads engine/pinning reading/worker_context reading/modes
        reading/fetch reading/sources reading/failures reading/filling reading/rows reading/runs
        memory/ticket memory/batch memory/collate memory/layout memory/slots
    """,
    # What else `fastload.DataLoader` loads, without safety/.
    "loaded beside the way": """
        __init__ errors order/__init__ engine/__init__ reading/__init__ memory/__init__
        order/lanes engine/epoch_counts reading/iterable reading/hub_streams reading/notices
        random/__init__ random/streams random/keys random/global_draws random/held random/numpy_memory
        random/numpy_random random/passes random/python_random random/torch_random random/worker_rng
        _kit/__init__ _kit/annotations _kit/cores _kit/hashing _kit/integers _kit/nested _kit/torch_private
        _kit/user_errors
        telemetry/__init__ telemetry/prediction telemetry/recorder telemetry/snapshot telemetry/stages telemetry/stats
    """,
    "process workers": """
        engine/crew processes/__init__ processes/outcome processes/beside processes/child processes/deaths
        processes/jobs processes/observed processes/open_files processes/packed_errors processes/packing
        processes/parent processes/pausing processes/preload processes/reader processes/remote processes/segments
        processes/starting processes/wire processes/work
    """,
    "verdicts and allow list": """
        engine/choice engine/choices
    """,
    "the core's other files": """
        __main__ memory/prefetch
        _kit/disk _kit/evaluating _kit/fingerprint _kit/guard _kit/options _kit/pool
    """,
}
"""The files of rows that are no folders, by their paths in fastload/."""

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


def rows_of(file: str) -> list[str]:
    """Return the rows that list a file. If there are none, return that of the innermost folder with a row."""
    if not file.endswith(".py"):
        return ["kernels in C"]
    inside = file.removeprefix("fastload/").removesuffix(".py")
    listed = [row for row, names in LISTED.items() for name in names.split() if name == inside]
    folders = [row for row in BUDGETS if file.startswith(f"{row}/")]
    return listed or sorted(folders, key=len)[-1:]


@cache
def measured() -> Counter[str]:
    """Return the lines of code of each row."""
    found = Counter(dict.fromkeys(BUDGETS, 0))
    for file in COUNTED:
        for row in rows_of(file):
            found[row] += len(lines_of_code(ROOT / file))
    return found


# ---- a budget may only fall ----


def faults(before: Mapping[str, int], now: Mapping[str, int], changelog: str) -> list[str]:
    """Return what is wrong with a change of the table, if these lines of the changelog came with it."""
    found = []
    if (more := sum(now.values()) - sum(before.values())) > 0:
        found.append(f"all budgets together rose by {more}: lower another row by {more}")
    said = " ".join(changelog.split())
    for row, budget in now.items():
        if budget > before.get(row, 0) and f"`{row}`" not in said:
            found.append(
                f"{row} rose from {before.get(row, 0)} to {budget}: name `{row}` in a new file changes/*.md, and say "
                "which promise the lines buy"
            )
    return found


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


def faults_since_base(root: Path = ROOT) -> list[str]:
    """Return what is wrong with the changes of the table since the commit in `.ci/base`.

    Raise LookupError if there is nothing to compare with: no such file, no git, or no table in that commit.
    """
    try:
        base = (root / ".ci" / "base").read_text().strip()
        before = table_in(git(root, "show", f"{base}:{TABLE}"))
        plain = ("--unified=0", "--no-color", "--no-ext-diff")
        changes = git(root, "diff", *plain, base, "--", "CHANGELOG.md", "changes")
        untracked = git(root, "ls-files", "--others", "--exclude-standard", "--", "changes")
    except OSError as error:
        raise LookupError(str(error)) from error
    except subprocess.CalledProcessError as error:
        raise LookupError(error.stderr.strip()) from error
    said = [line[1:] for line in changes.splitlines() if line.startswith("+")]
    said += [(root / file).read_text() for file in untracked.splitlines()]
    return faults(before, table_in((root / TABLE).read_text()), "\n".join(said))


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
