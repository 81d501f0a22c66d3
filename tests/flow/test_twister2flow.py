"""Promise: The graphs of Twister2's two documents run in their order, and no task follows one that failed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fastload.compat.twister2flow import Twister2Task
from tests.flow.twister2_programs import DOCUMENTS, run_flow

RANK = "from fastload.distributed import detect_rank; rank = detect_rank().rank\n"


def run(
    folder: Path, launcher: str, download: str, program: str
) -> subprocess.CompletedProcess[str]:
    """Run a document's graph, of tasks that only say that they ran."""
    (folder / "MnistDownload.py").write_text(download)
    for name in ("Twister2PytorchMnist", "PytorchMnistDist"):
        (folder / f"{name}.py").write_text(
            f"{RANK}open(f'{name}-{{rank.rank}}-of-{{rank.world_size}}', 'w')"
        )
    shutil.copy(DOCUMENTS / "disk" / program, folder)
    return run_flow(launcher, folder / program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "program"),
    [("mpich", "Twister2Flow.py"), ("openmpi", "Twister2FlowWithDisk.py")],
)
def test_the_program_runs_in_its_order_on_four_ranks(
    launcher: str, program: str, tmp_path: Path
) -> None:
    ended = run(tmp_path, launcher, "open('raw', 'w')", program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(
        "Task Id 0,\n  Name: download_task, Command: python3 MnistDownload.py"
    )
    for name in ("Twister2PytorchMnist", "PytorchMnistDist"):
        assert len(list(tmp_path.glob(f"{name}-*-of-4"))) == 4
    states = [line.split(",")[0] for line in ended.stderr.splitlines() if ": done" in line]
    assert states == ["download_task: done", "t2_task: done", "pytorch_task: done"]


@pytest.mark.slow
def test_nothing_runs_after_a_download_that_failed(tmp_path: Path) -> None:
    ended = run(tmp_path, "mpich", "raise SystemExit('no such host')", "Twister2FlowWithDisk.py")
    assert ended.returncode == 1
    assert "FlowError: graph UNNAMED_TASK: task download_task failed: exit code 1" in ended.stderr
    assert "not run: t2_task, pytorch_task" in ended.stderr
    assert not list(tmp_path.glob("*-of-*"))


def test_twister2s_own_launcher_is_not_needed(tmp_path: Path) -> None:
    task = Twister2Task("t2_task", script="prepare.py", launcher="hydra", parallelism=3)
    usual = task.argv(tmp_path)
    assert usual[:3] == ["mpiexec", "-n", "3"]
    task.set_command("twister2 submit standalone python")
    assert task.argv(tmp_path) == usual
    task.set_command("python3 -u")
    assert task.argv(tmp_path) == ["python3", "-u", "prepare.py"]
