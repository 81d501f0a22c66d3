"""Promise: The notebook of the examples runs in Jupyter, with worker processes that read a class of a cell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT

NOTEBOOK = ROOT / "examples" / "first.ipynb"


def cells_of(path: Path) -> list[Any]:
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]


def test_the_notebook_lies_here_without_its_outputs() -> None:
    cells = cells_of(NOTEBOOK)
    assert len(cells) > 8
    assert not [cell for cell in cells if cell["outputs"] or cell["execution_count"]]


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    for name in ("nbclient", "ipykernel", "PIL", "pyarrow"):
        pytest.importorskip(name)
    main = "from nbclient.cli import main; main()"  # `jupyter execute`
    run = subprocess.run(
        [sys.executable, "-c", main, NOTEBOOK, "--output", tmp_path / "ran", "--timeout", "60"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    outputs = [output for cell in cells_of(tmp_path / "ran.ipynb") for output in cell["outputs"]]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert "Chosen(kind='process'" in printed
    assert "__main__.Photos" in printed
    shown = ["".join(output.get("data", {}).get("text/plain", "")) for output in outputs]
    assert len([text for text in shown if text.startswith("epoch 0")]) == 2, shown
