"""Which tests a change needs, and which of the slow tests its turn brings.

A *part* is a plug-in's folder; the root's files and the other folders are the part `core`. A change needs
the core's tests, the tests that it changed, and every test file that uses a part that changed, or a part that imports
one that did. A test file uses a part if it lies in the part's folder of tests, or if it or a helper of it names the
part. The tests of the pages use all parts. A change of the core, or of a file that no rule knows, needs all tests.
"""

from __future__ import annotations

import functools
import re
import subprocess
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.imports import imported

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / ".ci" / "base"
TURNS = 5
SALT = 57596
"""Shares the slow files of November 2026 out evenly."""
CORE = "core"
INSTALLED_FOR = ("tests/browser/", "tests/compat/")
"""Folders whose tests are all slow, and have packages installed for them."""
CORE_FOLDERS = (
    "_kit",
    "engine",
    "memory",
    "order",
    "random",
    "reading",
    "safety",
    "telemetry",
)
CORE_TESTS = (
    "tests/contracts/",
    "tests/promises/",
    "tests/random/",
    "tests/safety/",
    "tests/telemetry/",
    "tests/test_",
)
NOT_CORE_TESTS = tuple(
    f"tests/test_{name}" for name in ("benchmarks", "check", "cli", "examples", "peers")
)
ELSEWHERE = {
    ".github/": (),
    ".gitignore": (),
    "CITATION.cff": (),
    "benchmarks/": ("tests/docs/", "tests/test_benchmarks.py", "tests/test_peers.py"),
    "docs/": ("tests/docs/", "tests/test_examples.py"),
    "examples/": ("tests/docs/", "tests/test_examples.py"),
    "mkdocs.yml": ("tests/docs/",),
    "scripts/_docs.py": ("tests/docs/",),
    "submit/": ("tests/submit/",),
}
"""Tests for files outside of fastload, beside those that name the file. Markdown of the root belongs to docs."""


@dataclass(frozen=True)
class Choice:
    """The test files that a change needs, those left out, and why, in a line."""

    files: list[str]
    left_out: list[str]
    why: str


def git(*arguments: str) -> str | None:
    """Return what git prints, or None if it fails: no repository, no such commit."""
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return None if run.returncode else run.stdout


def base_commit() -> str | None:
    """Return the commit before this change, as `.ci/base` has it, or None if it is unknown here."""
    named = BASE.read_text().strip() if BASE.exists() else ""
    found = git("rev-parse", "--verify", "--quiet", f"{named}^{{commit}}") if named else None
    return found.strip() if found else None


def changes() -> int:
    """Return how often `.ci/base` changed; modulo `TURNS` it is the turn of this change. Without git it is 0."""
    return int((git("rev-list", "--count", "HEAD", "--", ".ci/base") or "0").strip())


def last_turns() -> list[str]:
    """Return the turn of this change and of the four before it, with date and commit."""
    begun = (git("log", f"-{TURNS}", "--format=%cs %h", "--", ".ci/base") or "").splitlines()
    return [f"{(changes() - k) % TURNS + 1} on {when}" for k, when in enumerate(begun)]


def changed_files(base: str) -> list[str]:
    """Return the files that differ from `base`, deleted and uncommitted ones included."""
    changed = git("diff", "--name-only", "--no-renames", base) or ""
    new = git("ls-files", "--others", "--exclude-standard") or ""
    return sorted({*changed.splitlines(), *new.splitlines()})


def test_files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def part_of(path: str) -> str | None:
    """Return the part that a file of fastload belongs to, or None for a file elsewhere."""
    head, *folders = path.split("/")
    if head != "fastload":
        return None
    if folders[0] == "__main__.py":
        return "cli"
    return CORE if len(folders) == 1 or folders[0] in CORE_FOLDERS else folders[0]


@functools.cache
def sources() -> dict[str, list[Path]]:
    """Return the files of each part."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "fastload").rglob("*.py")):
        found.setdefault(str(part_of(str(path.relative_to(ROOT)))), []).append(path)
    return found


@functools.cache
def imports_of(path: Path, package: str) -> frozenset[str]:
    try:
        return frozenset(name for name, _ in imported(path.read_text(), package))
    except SyntaxError:  # the checks name the file, and so do its tests
        return frozenset()


@functools.cache
def needs() -> dict[str, frozenset[str]]:
    """Return which parts each part imports, itself and what those import included."""
    direct = {part: {part} for part in sources()}
    for part, paths in sources().items():
        for path in paths:
            if path.parent.name == "fastload" and path.name == "__init__.py":
                continue  # it names `fastload.predict`, which it imports when a program asks for it
            package = ".".join(path.relative_to(ROOT).parent.parts)
            names = (name.split(".") for name in imports_of(path, package))
            direct[part] |= {
                name[1] if name[1] in sources() else CORE
                for name in names
                if name[0] == "fastload" and len(name) > 1
            }
    while True:
        wider = {part: set().union(*(direct[p] for p in parts)) for part, parts in direct.items()}
        if wider == direct:
            return {part: frozenset(parts) for part, parts in direct.items()}
        direct = wider


@functools.cache
def helpers_of(path: Path) -> frozenset[Path]:
    """Return a file of the tests, the helpers that it imports, and what lies in its folder for all its tests."""
    found, left = set(), [path]
    if path.parent != ROOT / "tests":
        left += [p for p in path.parent.rglob("*.py") if not p.name.startswith("test_")]
    while left:
        helper = left.pop()
        if helper in found or not helper.is_file() or ROOT not in helper.parents:
            continue
        found.add(helper)
        for name in imports_of(helper, "tests"):
            head, *rest = name.split(".")
            if head == "tests":  # tests.module or tests.module.name
                left += [ROOT.joinpath(head, *rest[:end]).with_suffix(".py") for end in (-1, None)]
    return frozenset(found)


@functools.cache
def text_of(test: str) -> str:
    return "\n".join(path.read_text() for path in helpers_of(ROOT / test))


@functools.cache
def used_by(test: str) -> frozenset[str]:
    """Return the parts that a test file uses: those that it, its name, its folder or a helper names, and their imports.

    A test that calls a command uses the command line, and the part of the command by the test's folder. It does not
    use the parts of all other commands.
    """
    text = text_of(test)
    named = set(re.findall(r"\bfastload[./](\w+)", text))
    for names in re.findall(r"\bfrom fastload import \(?([\w\s,]+)", text):
        named |= set(re.findall(r"\w+", names))
    named |= (
        {"cli"} if re.search(r"""["']-m["'],\s*["']fastload["']|-m fastload""", text) else set()
    )
    own = {Path(test).parts[1], *Path(test).stem.split("_")}
    whole = (named - {"cli"} | own) & sources().keys()
    return frozenset(named & {"cli"}).union(*(needs()[part] for part in whole))


def needed_by(path: str, tests: Iterable[str]) -> set[str] | None:
    """Return the test files that a changed file needs, or None if it needs all."""
    part = part_of(path)
    if path == ".ci/base":
        return set()  # each change names another one
    if part is not None:
        if part == CORE or part not in sources():
            return None
        return {test for test in tests if part in used_by(test) or test.startswith("tests/docs/")}
    if path.startswith("tests/"):
        is_here = path.endswith(".py") and (ROOT / path).exists()
        name = Path(path).name
        if not name.startswith("test_") and (path.count("/") == 1 or not is_here):
            return None  # conftest.py and helpers of all tests, data, and helpers that are gone
        return {t for t in tests if ROOT / path in helpers_of(ROOT / t) or name in text_of(t)}
    folder = "docs/" if "/" not in path and path.endswith(".md") else path
    known = [also for prefix, also in ELSEWHERE.items() if folder.startswith(prefix)]
    if not known:
        return None
    named = {test for test in tests if Path(path).name in text_of(test)}
    return named | {test for test in tests if test.startswith(known[0])}


def choose(changed: Iterable[str] | None) -> Choice:
    """Return the tests that a change of these files needs; None stands for a change that is unknown."""
    tests = test_files()
    if changed is None:
        return Choice(tests, [], "all tests, because the commit in .ci/base is unknown here")
    chosen = {t for t in tests if t.startswith(CORE_TESTS) and not t.startswith(NOT_CORE_TESTS)}
    for path in changed:
        needed = needed_by(path, tests)
        if needed is None:
            return Choice(tests, [], f"all tests, because {path} changed")
        chosen |= needed
    parts = sorted({part_of(path) or path.split("/")[0] for path in changed})
    why = f"the core's tests, and those of what changed ({', '.join(parts) or 'nothing'})"
    return Choice(sorted(chosen), sorted({*tests} - chosen), why)


def slow_files() -> list[str]:
    """Return the test files that have slow tests, of their own or by a contract."""
    contracts = ROOT / "tests" / "contracts"
    return [
        test
        for test in test_files()
        if test.startswith(INSTALLED_FOR)
        or any(
            "mark.slow" in path.read_text()
            for path in helpers_of(ROOT / test)
            if path == ROOT / test or path.parent == contracts
        )
    ]


def fifth(number: int) -> list[str]:
    """Return the files whose slow tests run in this turn. A file keeps its turn when others come and go."""
    return [
        test
        for test in slow_files()
        if zlib.crc32(f"{SALT} {key_of(test)}".encode()) % TURNS == number
    ]


def key_of(test: str) -> str:
    """Return what decides on a file's turn: its folder where a folder needs an installation of its own."""
    return test.rpartition("/")[0] if test.startswith(INSTALLED_FOR) else test
