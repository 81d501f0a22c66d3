"""Promises:
- `fastload predict` on real ranks of torchrun and MPICH makes the bytes of one process. The test is marked slow.
- `fastload predict` on real ranks resumes after a rank failed or died.

Each launch shows several things, as importing torch in each process is what takes the time.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fastload import store
from tests.distributed.launching import Ended, command, run
from tests.files import arrow_files

pytestmark = pytest.mark.slow

MODULE = """
import os, torch
from torch.utils.data import Dataset

class Data(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.full((2,), float(index)), index

def model(x):
    first = int(x[0, 0])
    with open("asked", "a") as file:
        file.write("".join(f"{int(value)}\\n" for value in x[:, 0]))
    if os.path.exists("fail") and first == 25:
        raise LookupError("no answer for 25")
    if os.path.exists("die") and first == 25:
        os._exit(9)
    return x * 2
"""


def predict(launcher: str, ranks: int, folder: Path, name: str = "set") -> tuple[Ended, list[int]]:
    """Predict into `folder`/sets/NAME. Return how that ended, and the samples that models were asked for."""
    (folder / "project.py").write_text(MODULE)
    (folder / "asked").unlink(missing_ok=True)
    arguments = ["-m", "fastload", "predict", "project:model", "project:Data"]
    arguments += ["--name", f"sets/{name}", "--parts", "8", "-b", "3", "-w", "1", "--device", "cpu"]
    options = ("--oversubscribe",) if launcher == "openmpi" else ()
    ended = run(command(launcher, ranks, *arguments, options=options), folder)
    asked = folder / "asked"
    return ended, sorted(map(int, asked.read_text().split())) if asked.exists() else []


@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", ["torchrun", "mpich"])
def test_ranks_fail_and_die_and_others_go_on(launcher: str, tmp_path: Path) -> None:
    alone, asked = predict(launcher, 1, tmp_path, "alone")
    assert alone.code == 0, alone.text
    assert asked == list(range(40))

    (tmp_path / "fail").touch()
    failed, _ = predict(launcher, 3, tmp_path)
    assert failed.code != 0
    assert re.search(r"Error: rank \d of 3 failed \(LookupError: no answer for 25\)", failed.text)
    assert 'File "' in failed.text, "the traceback of the rank that failed"
    assert not (tmp_path / "sets" / "set").exists()
    (tmp_path / "fail").unlink()

    (tmp_path / "die").touch()
    died, asked = predict(launcher, 2, tmp_path)
    assert died.code != 0
    assert {25, 26, 27} <= set(asked) <= set(range(25, 40))
    (tmp_path / "die").unlink()

    there = len(list((tmp_path / "sets" / ".unsealed" / "set").glob("*.json")))
    ended, asked = predict(launcher, 4, tmp_path)
    assert ended.code == 0, ended.text
    assert len(asked) == 40 - 5 * there
    assert 25 in asked
    assert ended.text.count("40 rows of y float32[2], after ") == 1, "rank 0 alone says it"
    assert arrow_files(tmp_path / "sets" / "set") == arrow_files(tmp_path / "sets" / "alone")
    found = store.get(tmp_path / "sets" / "set", data="y")
    assert torch.equal(torch.stack([found[i] for i in range(40)])[:, 0], 2.0 * torch.arange(40))

    again, asked = predict(launcher, 2, tmp_path)
    assert (again.code, asked) == (0, []), again.text


@pytest.mark.timeout(200)
def test_a_users_error_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "sets" / "set").mkdir(parents=True)
    store.put({"x": torch.zeros(3)}, tmp_path / "sets" / "taken")
    ended, asked = predict("mpich", 2, tmp_path, "taken")
    assert ended.code == 1
    assert not asked
    assert "Traceback" not in ended.text
    errors = {line for line in ended.text.splitlines() if "Error: " in line}
    assert len(errors) == 1, "each rank prints the same line"
    assert "which predictions() did not make. Choose another name, or pass --replace" in ended.text
