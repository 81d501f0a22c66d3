"""Promises:
- Programs that share process-wide state are read as by torch's loader, for one, two and eight workers,
  persistent or not, over three epochs. `worker_method="auto"` sees to it.
- While a loader runs and after it, the main thread's stdout, directory, environment, filters of warnings, default dtype
  and random states are as before. So are the types and identities of its objects.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.children import ROOT, run_python
from tests.safety.table_cases import TABLE
from tests.safety.table_run import EPOCHS, Program, ways
from tests.sizes_of_runs import in_full


def results(program: Program, folder: Path, given: list[str]) -> dict[str, Any]:
    """Run the program in a process of its own, in which nothing vouches for the tests, and return what it printed."""
    if program.needs and importlib.util.find_spec(program.needs) is None:
        pytest.skip(f"{program.needs} is not installed")
    arguments = ["-m", "tests.safety.table_run", program.name, folder, *given]
    env = {**os.environ, **program.env, "PYTHONPATH": str(ROOT)}
    done = run_python(*arguments, cwd=ROOT, env=env, timeout=200.0)
    assert done.returncode == 0, done.stderr[-2_000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compared(program: Program, folder: Path, given: list[str], *, kind: str) -> None:
    """Compare both loaders."""
    found = results(program, folder, given)
    assert len(found["results"]) == len(given)
    for way, pair in zip(given, found["results"], strict=True):
        torchs, ours = pair["torch"], pair["fastload"]
        assert bool(ours["error"]) == bool(torchs["error"]), (way, ours)
        assert ours["during"] == ours["after"] == [], way
        # torch draws its seed before it finds that the dataset cannot be pickled, and fastload after that.
        assert torchs["error"] or ours["torch_random"] == torchs["torch_random"], way
        assert ours["loop"] == torchs["loop"], way
        assert ours["epochs"] == torchs["epochs"], way
        assert torchs["error"] or [len(each) for each in ours["epochs"]] == (
            [program.length // program.batch] * EPOCHS
        )
    said = found["reasons"]
    if kind:
        assert any(f"workers are {kind}" in each for each in said), said


QUICK = [
    pytest.param(each, marks=pytest.mark.slow if each.rare or k % 10 else (), id=each.name)
    for k, each in enumerate(TABLE)
]
EACH = pytest.mark.parametrize("program", TABLE, ids=lambda program: program.name)


@pytest.mark.parametrize("program", QUICK)
def test_two_workers(program: Program, tmp_path: Path) -> None:
    compared(program, tmp_path, ways((2,)), kind="processes")


@EACH
@pytest.mark.slow
def test_one_worker_and_eight(program: Program, tmp_path: Path) -> None:
    compared(program, tmp_path, ways((1, 8)), kind="")


# Threads have no start method, and share such memory. A fork server pickles it, so torch's workers get copies, or fail.
PICKLED = [
    each for each in TABLE if "shared memory" not in each.name and in_full(True, not each.rare)
]


@pytest.mark.parametrize("program", PICKLED, ids=lambda program: program.name)
@pytest.mark.slow
def test_workers_of_a_fork_server(program: Program, tmp_path: Path) -> None:
    compared(program, tmp_path, ["2 False forkserver", "2 True forkserver"], kind="")
