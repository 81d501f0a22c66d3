"""Promise: the program of Twister2Flow's README runs with its imports changed, and no task follows one that failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastload.compat.twister2flow import Twister2Environment
from tests.distributed.launching import ROOT, command

IMPORTS = "from fastload.compat.twister2flow import PipelineGraph, PythonTask, PytorchTask, Twister2Task\n"
BODY = """
plg = PipelineGraph.PipelineGraph(name="UNNAMED_TASK")

download_task = PythonTask(name="download_task")
download_task.set_command("python3")
download_task.set_script_path(script_path="MnistDownload.py")
download_task.set_exec_path(exec_path=None)

twister2_task = Twister2Task(name="t2_task")
twister2_task.set_command()
twister2_task.set_script_path(script_path="Twister2PytorchMnist.py")
twister2_task.set_exec_path(exec_path=None)

pytorch_task = PytorchTask(name="pytorch_task")
pytorch_task.set_command()
pytorch_task.set_script_path(script_path="PytorchMnistDist.py")
pytorch_task.set_exec_path(exec_path=None)

plg.add_task(download_task)
plg.add_task(twister2_task)
plg.add_task(pytorch_task)


print(str(plg))

plg.execute()
"""
RANK = "from fastload.distributed import detect_rank; rank = detect_rank().rank\n"


def run(folder: Path, launcher: str, download: str) -> subprocess.CompletedProcess[str]:
    home = Path(command(launcher, 4)[0]).parent
    (folder / "MnistDownload.py").write_text(download)
    for name in ("Twister2PytorchMnist", "PytorchMnistDist"):
        (folder / f"{name}.py").write_text(
            f"{RANK}open(f'{name}-{{rank.rank}}-of-{{rank.world_size}}', 'w')"
        )
    (folder / "Twister2FlowWithDisk.py").write_text(IMPORTS + BODY)
    environ = {
        **os.environ,
        "PATH": f"{home}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    if launcher == "openmpi":
        environ["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    return subprocess.run(
        [sys.executable, "Twister2FlowWithDisk.py"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpich", "openmpi"])
def test_the_program_runs_in_its_order_on_four_ranks(launcher: str, tmp_path: Path) -> None:
    ended = run(tmp_path, launcher, "open('raw', 'w')")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(
        "Task Id 0,\n  Name: download_task, Command: python3 MnistDownload.py"
    )
    for name in ("Twister2PytorchMnist", "PytorchMnistDist"):
        assert len(list(tmp_path.glob(f"{name}-*-of-4"))) == 4
    states = [line.split(",")[0] for line in ended.stderr.splitlines() if ": done" in line]
    assert states == ["download_task: done", "t2_task: done", "pytorch_task: done"]


def test_nothing_runs_after_a_download_that_failed(tmp_path: Path) -> None:
    ended = run(tmp_path, "mpich", "raise SystemExit('no such host')")
    assert ended.returncode == 1
    assert "FlowError: graph UNNAMED_TASK: task download_task failed: exit code 1" in ended.stderr
    assert "not run: t2_task, pytorch_task" in ended.stderr
    assert not list(tmp_path.glob("*-of-*"))


def test_what_is_not_there_names_what_takes_its_place() -> None:
    with pytest.raises(ImportError, match=r"fastload\.store\.prepare"):
        Twister2Environment(resources=[{"cpu": 1, "ram": 512, "instances": 4}])
