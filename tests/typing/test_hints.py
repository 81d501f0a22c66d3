"""Promise: mypy and pyright see the types of what users write, and find wrong calls.

An editor shows what pyright finds; basedpyright is pyright with its Node.js in a wheel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = Path(__file__).with_name("user_code.py")
PYRIGHT = {"extraPaths": [str(ROOT)], "typeCheckingMode": "strict", "include": [str(CODE)]}


@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_a_checker_finds_what_is_wrong_in_user_code_and_nothing_else(
    checker: str, tmp_path: Path
) -> None:
    """If it saw Any, it would miss calls that are wrong, and `assert_type` would fail."""
    pytest.importorskip(checker, reason="the extra `dev` has it")
    settings = tmp_path / "pyrightconfig.json"
    settings.write_text(json.dumps(PYRIGHT))
    of_pyright = ["--project", str(settings), "--pythonpath", sys.executable]
    run = subprocess.run(
        [sys.executable, "-m", checker, *(["--strict", CODE] if checker == "mypy" else of_pyright)],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(rf"{CODE.name}:(\d+)(?::\d+ -|:) error", run.stdout)
    lines = enumerate(CODE.read_text().splitlines(), 1)
    wrong = [number for number, line in lines if line.endswith("# wrong")]
    assert len(wrong) > 10
    assert sorted({*map(int, found)}) == wrong, run.stdout + run.stderr
