"""Promises:
- The documentation is built strictly. A broken link, anchor or reference fails, as does a page outside the navigation.
- The documentation needs no network once it is built.
- The reference has every public name. Every parameter that a docstring describes exists.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name

import pytest

import fastload.errors
from tests.docs.pages import DOCS, FENCE, PAGES, ROOT

PACKAGE = ROOT / "fastload"
NOT_DOCUMENTED = {"fastload.safety"}  # the loader's own, as its files are
NO_OBJECTS = {"fastload.__version__", "fastload.errors"}
DOCUMENTED = [
    name
    for page in sorted((DOCS / "reference").glob("*.md"))
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), flags=re.M)
]
INHERITED = """\
INHERIT: {root}/mkdocs.yml
docs_dir: docs
nav: [index.md, workers.md]
hooks: [{root}/scripts/_docs.py]
watch: [docs]
"""


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", site],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_site_is_built_and_needs_no_network(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stderr
    pages = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert len(pages) > 30
    loaded = [
        f"{path.name}: {tag}"
        for path, text in pages.items()
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", text)
        if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag) and 'rel="canonical"' not in tag
    ]
    assert not loaded
    for name in DOCUMENTED:
        assert any(f'id="{name}"' in text for text in pages.values()), name
    commands = pages[tmp_path / "reference" / "cli.html"]
    assert all(f'id="fastload-{name}"' in commands for name in ("bench", "set-serve", "flow-run"))
    assert "__index = {" in (tmp_path / "search" / "search_index.js").read_text()[:20]
    assert "```" not in "".join(pages.values()), "a fence is shown, not read"


@pytest.mark.slow
def test_what_is_broken_on_a_page_and_a_name_that_is_gone_fail_the_build(tmp_path: Path) -> None:
    """Of a small site with the settings of ours."""
    docs, config = tmp_path / "docs", tmp_path / "mkdocs.yml"
    docs.mkdir()
    (docs / "index.md").write_text(
        "# Index\n\n[a](nowhere.md) [b](workers.md#no-heading) [c](#no-own-heading) [d][fastload.nothing] "
        "![e](nowhere.png) [f](../examples/nowhere.py)\n"
    )
    (docs / "workers.md").write_text("# Workers\n")
    (docs / "outside.md").write_text("# Outside\n")
    config.write_text(INHERITED.format(root=ROOT))
    done = build(config, tmp_path / "site")
    assert done.returncode != 0
    for broken in (
        *("'nowhere.md'", "'#no-heading'", "'#no-own-heading'", "'fastload.nothing'"),
        *("'nowhere.png'", "'../examples/nowhere.py'", "outside.md"),
    ):
        assert broken in done.stderr, done.stderr
    (docs / "index.md").write_text("# Index\n\n::: fastload.nothing\n")
    done = build(config, tmp_path / "site")
    assert done.returncode != 0
    assert "fastload.nothing" in done.stderr


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_the_readme_lead_somewhere() -> None:
    """It is no page of the site."""
    links = re.findall(r"\]\(((?!https?:)[^)\s]*)\)", (ROOT / "README.md").read_text())
    assert len(links) > 10
    for link in links:
        name, _, anchor = link.partition("#")
        assert (ROOT / name).exists(), link
        assert not anchor or anchor in anchors(ROOT / (name or "README.md")), link


def public_names() -> list[str]:
    """Return all names that a module's `__all__` has, and those of modules without one that users import from."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names += [f"{module}.{name}" for name in ast.literal_eval(node.value)]
    names += [
        f"fastload.errors.{name}"
        for name, value in vars(fastload.errors).items()
        if inspect.isclass(value) and value.__module__ == "fastload.errors" and name[0] != "_"
    ]
    return [n for n in names if n.rpartition(".")[0] not in NOT_DOCUMENTED and n not in NO_OBJECTS]


def test_every_public_name_is_in_the_reference() -> None:
    pytest.importorskip("PIL")
    pytest.importorskip("pyarrow")
    pytest.importorskip("watchdog")
    assert len(DOCUMENTED) == len(set(DOCUMENTED))
    documented = [resolve_name(name) for name in DOCUMENTED]
    missing = [
        name for name in public_names() if not any(resolve_name(name) is one for one in documented)
    ]
    assert not missing


def described(docstring: str) -> list[str]:
    """Return the parameters that a docstring describes below "Args:"."""
    _, _, below = inspect.cleandoc(docstring).partition("Args:\n")
    block = re.match(r"(?:(?: {4}.*)?\n?)*", below)
    assert block
    names = re.findall(r"^ {4}((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*):", block[0], flags=re.M)
    return [name.strip("* ") for entry in names for name in entry.split(",")]


def test_a_docstring_describes_parameters_that_there_are() -> None:
    """Griffe, which renders them, does not know entries for two parameters, so it does not check them."""
    pytest.importorskip("PIL")
    pytest.importorskip("pyarrow")
    pytest.importorskip("watchdog")
    faults = []
    for found in map(resolve_name, DOCUMENTED):
        public = (
            [v for key, v in vars(found).items() if key[0] != "_"] if inspect.isclass(found) else []
        )
        for value in filter(callable, [found, *public]):
            names = set(described(value.__doc__ or ""))
            if names and (unknown := names - {*inspect.signature(value).parameters}):
                faults.append(f"{value}: {unknown}")
    assert not faults


def test_parameters_are_read_from_a_docstring() -> None:
    docstring = [
        "Do.",
        "",
        "Args:",
        "    a, b: two",
        "        lines: of one.",
        "    **c: more.",
        "",
    ]
    assert described("\n".join([*docstring, "Then d: this."])) == ["a", "b", "c"]


def test_a_list_begins_after_an_empty_line() -> None:
    """GitHub shows one in any case, the site shows a paragraph with dashes."""
    item = re.compile(r"(?:[-*]|\d+\.) ")
    wrong = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in PAGES
        for before, line in pairwise(FENCE.sub("", page.read_text()).splitlines())
        if item.match(line) and before and not re.match(r"(?:[-*]|\d+\.) | ", before)
    ]
    assert not wrong
