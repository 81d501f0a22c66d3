"""Promise: docs/examples.md has a section for each example, and its images are those of the graphs. A test runs each
example.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fastload.flow.pipefile import read_pipeline
from fastload.flow.show import as_svg

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".toml"))
PIPELINES = [path for path in EXAMPLES if path.suffix == ".toml"]
PAGE = (ROOT / "docs" / "examples.md").read_text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_has_a_section_and_a_test(path: Path) -> None:
    assert f"(../examples/{path.name})" in PAGE
    tests = (test for test in (ROOT / "tests").rglob("test_*.py") if test != Path(__file__))
    assert any(path.name in test.read_text() for test in tests)


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.name)
def test_the_drawing_of_a_graph_is_what_show_draws(path: Path, tmp_path: Path) -> None:
    """To draw it anew: copy the file to an empty folder, and `fastload flow show COPY --svg docs/NAME.svg`."""
    copy = shutil.copy(path, tmp_path)
    assert f"![The graph of {path.name}]({path.stem}.svg)" in PAGE
    assert (ROOT / "docs" / f"{path.stem}.svg").read_text() == as_svg(read_pipeline(copy))
