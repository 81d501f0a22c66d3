"""Promise: docs/examples.md has a section for each example, and shows a graph as `fastload flow show` does. A test
runs each example.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from textwrap import indent

import pytest

from fastload.flow.pipefile import read_pipeline
from fastload.flow.show import as_text

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.is_file())
PAGE = (ROOT / "docs" / "examples.md").read_text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_has_a_section_and_a_test(path: Path) -> None:
    assert f"(../examples/{path.name})" in PAGE
    tests = (test for test in (ROOT / "tests").rglob("test_*.py") if test != Path(__file__))
    assert any(path.name in test.read_text() for test in tests)


def test_the_page_shows_a_graph_as_show_does(tmp_path: Path) -> None:
    copy = shutil.copy(ROOT / "examples" / "mnist.toml", tmp_path)
    assert indent(as_text(read_pipeline(copy)), "    ") in PAGE
