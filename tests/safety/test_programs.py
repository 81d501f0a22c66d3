"""Promises:
- Programs that share process-wide state are read as by torch's loader, for one, two and eight workers,
  persistent or not, over three epochs. `worker_method="auto"` sees to it.
- While a loader runs and after it, the main thread's stdout, directory, environment, filters of warnings, default dtype
  and random states are as before. So are the types and identities of its objects.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.children import ROOT, run_python

WAYS = {
    "two": ["2 False", "2 True"],
    "one and eight": ["1 False", "1 True", "8 False", "8 True"],
    "of a fork server": ["2 False forkserver", "2 True forkserver"],
}


@pytest.mark.parametrize(
    "workers",
    [pytest.param(each, marks=() if each == "two" else pytest.mark.slow) for each in WAYS],
)
def test_programs_see_what_torch_s_workers_show_them(
    workers: str, subtests: pytest.Subtests, tmp_path: Path
) -> None:
    """In a process of their own, in which nothing declares the tests thread-safe."""
    arguments = ["-m", "tests.safety.programs_of_process", str(tmp_path), *WAYS[workers]]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python(*arguments, cwd=ROOT, env=env, timeout=500.0)
    assert done.returncode == 0, done.stderr[-2_000:]
    results, reasons = json.loads((tmp_path / "results.json").read_text())
    for name, of_ways in results.items():
        # A fork server pickles such memory, so torch's workers get copies.
        if workers == "of a fork server" and "shared memory" in name:
            continue
        for way, (torchs, ours) in zip(WAYS[workers], of_ways, strict=True):
            with subtests.test(name, way=way):
                assert ours["changed"] == []
                assert ours["epochs"] == torchs["epochs"]
                assert ours["torch"] == torchs["torch"]
    assert sum("workers are processes" in each for each in reasons) >= 5, reasons
