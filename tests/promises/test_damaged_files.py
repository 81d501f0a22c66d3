"""Promises:
- No damage to a set, its index, a Parquet file or a mapped table that is put ends the process. Each read gives a
  value of the right form, or an error. See also `tests/promises/damaged_files.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
from tests.children import run_python
from tests.promises.damaged_files import FORMATS

QUICK = ["columns", "index", "packed-encoded", "parquet", "put"]
"""Of each kind of reader one. The others are read in `test_five_thousand_damaged_files_end_no_process`."""


def read_damaged(name: str, folder: Path, count: int) -> None:
    """Read damaged files in a process of their own."""
    run = run_python(
        "-m", "tests.promises.damaged_files", name, folder, str(count), "0", timeout=220
    )
    turn = (folder / "turn").read_text() if (folder / "turn").exists() else "none"
    assert run.returncode == 0, f"exit {run.returncode} in turn {turn}: {run.stderr[-3000:]}"
    done = json.loads(run.stdout)
    assert done["turns"] == count
    assert done["refused"] > count / 10
    if name not in ("index", "packed-index"):  # nearly all damage to an index is refused
        assert done["read"] > 0


@pytest.mark.parametrize("name", QUICK)
def test_a_damaged_file_is_an_error_and_never_the_end(name: str, tmp_path: Path) -> None:
    read_damaged(name, tmp_path / "files", 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_five_thousand_damaged_files_end_no_process(name: str, tmp_path: Path) -> None:
    read_damaged(name, tmp_path / "files", 5000)
