"""Promises:
- `fastload flow submit` makes a batch job of each task, with the scheduler's own dependencies and the task's
  resources. Stand-ins replace PBS and Slurm.
- A refused job cancels the jobs before it.

The schedulers are stand-ins, which behave as OpenPBS 23.06 and Slurm 22.05 were seen to. `tests/submit/test_slurm.py`
runs a real Slurm.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fastload.cli import main
from tests.distributed.launching import ROOT

STAND_IN = f"""#!{sys.executable}
import json, os, re, subprocess, sys
from pathlib import Path
name, args, jobs = Path(sys.argv[0]).name, sys.argv[1:], Path(os.environ["JOBS"])
known = json.loads(jobs.read_text()) if jobs.exists() else {{}}
if name in ("qsub", "sbatch"):
    script = sys.stdin.read()
    if os.environ.get("REFUSED", "no such word") in script:
        sys.exit("queue is closed")
    number = str(len(known) + 1) + (".server" if name == "qsub" else "")
    said = " ".join(args)
    after = re.search(r"afterok:(\\S+)", said)
    before = after[1].split(":") if after else []
    code, state = None, "dropped"
    if "REFUSED" in os.environ:
        state = "queued"
    elif all(known[one]["code"] == 0 for one in before):
        own = {{"PBS_O_WORKDIR": os.getcwd(), "SLURM_SUBMIT_DIR": os.getcwd(), "HOME": os.environ["HOME"],
               "PATH": "/usr/bin:/bin"}}
        code, state = subprocess.run(["bash"], input=script, text=True, env=own, stdout=2).returncode, "ended"
    known[number] = {{"args": args, "script": script, "code": code, "state": state}}
    jobs.write_text(json.dumps(known))
    print(number if name == "qsub" else number + ";cluster")
else:
    jobs.write_text(json.dumps({{**known, "cancelled": args}}))
"""
FILE = """
[[task]]
name = "get"
command = ["sh", "-c", "echo get >> notes"]
[[task]]
name = "left"
command = ["sh", "-c", "echo left >> notes; test ! -e wrong"]
after = ["get"]
[[task]]
name = "right"
command = ["sh", "-c", "echo right >> notes"]
after = ["get"]
walltime = "0:10:00"
cores = 3
directives = ["-A PROJECT"]
[[task]]
name = "join"
kind = "pytorch"
script = "join.py"
parallelism = 8
ppn = 4
launcher = "none"
after = ["left", "right"]
"""
COMMANDS = ("qsub", "qdel", "sbatch", "scancel")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A graph in a folder with a space, and stand-ins for the schedulers on the PATH."""
    (tmp_path / "bin").mkdir()
    for name in COMMANDS:
        (tmp_path / "bin" / name).write_text(STAND_IN)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JOBS", str(tmp_path / "jobs"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "join.py").write_text("open('notes', 'a').write('join\\n')")
    (folder / "pipe.toml").write_text(FILE.replace("parallelism = 8\nppn = 4", "parallelism = 1"))
    monkeypatch.chdir(tmp_path)
    return folder / "pipe.toml"


def flow(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["flow", *map(str, arguments)])


def jobs(file: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads((file.parent.parent / "jobs").read_text())
    return found


def test_jobs_follow_one_another(file: Path) -> None:
    result = flow("submit", file, "--slurm")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "get: job 1",
        "left: job 2, after 1",
        "right: job 3, after 1",
        "join: job 4, after 2, 3",
    ]
    depends = {number: str(about["args"]) for number, about in jobs(file).items()}
    assert "--dependency=afterok:2:3" in depends["4"]
    assert all("--kill-on-invalid-dep=yes" in text for text in depends.values())
    assert sorted((file.parent / "notes").read_text().split()) == ["get", "join", "left", "right"]
    again = flow("submit", file, "--slurm", "--resume")
    assert again.output.splitlines() == [
        f"{name}: fresh" for name in ("get", "left", "right", "join")
    ]


@pytest.mark.slow
def test_a_job_that_failed_keeps_those_after_it_from_running(file: Path) -> None:
    (file.parent / "wrong").touch()
    result = flow("submit", file, "--pbs")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "get: job 1.server",
        "left: job 2.server, after 1.server",
        "right: job 3.server, after 1.server",
        "join: job 4.server, after 2.server, 3.server",
    ]
    assert jobs(file)["1.server"]["args"] == []
    assert jobs(file)["4.server"]["args"] == ["-W", "depend=afterok:2.server:3.server"]
    assert sorted((file.parent / "notes").read_text().split()) == ["get", "left", "right"]
    (file.parent / "wrong").unlink()
    result = flow("submit", file, "--pbs", "--resume")
    assert [line.split(":")[0] for line in result.output.splitlines() if "fresh" in line] == [
        "get",
        "right",
    ]
    assert (file.parent / "notes").read_text().split()[-2:] == ["left", "join"]


def test_each_task_asks_for_its_own_resources(file: Path) -> None:
    file.write_text(FILE)
    result = flow("submit", file, "--pbs", "--dry-run")
    assert result.exit_code == 0, result.output
    right, join = result.output.split("# qsub")[3:]
    assert "#PBS -l walltime=0:10:00" in right
    assert "#PBS -A PROJECT" in right
    assert "#PBS -l select=1:ncpus=3:mpiprocs=1" in right
    assert "-W depend=afterok:ID-OF-left:ID-OF-right" in join
    assert "#PBS -l select=2:ncpus=4:mpiprocs=4" in join
    assert not (file.parent.parent / "jobs").exists()
    slurm = flow("submit", file, "--slurm", "--dry-run").output
    assert "#SBATCH --ntasks=8" in slurm
    assert "#SBATCH --ntasks-per-node=4" in slurm
    assert "#SBATCH --cpus-per-task=3" in slurm
    # The folder of the graph has a space, which the schedulers take each in a way of its own.
    assert "#SBATCH --output=.fastload-flow/pipe/jobs/join.log\n" in slurm
    assert "#PBS -o .fastload-flow/pipe/jobs/join.log\n" in join


def test_a_task_may_have_any_name(file: Path) -> None:
    file.write_text('[[task]]\nname = "jobs"\ncommand = "true"\n')
    assert flow("submit", file, "--pbs").exit_code == 0
    assert flow("run", file).exit_code == 0
    assert flow("submit", file, "--pbs", "--resume").output == "jobs: fresh\n"


def test_a_launcher_may_be_on_compute_nodes_alone(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(FILE.replace('launcher = "none"', "").replace('"pytorch"', '"mpi"'))
    monkeypatch.setenv("PATH", str(file.parent.parent / "bin"))
    assert flow("submit", file, "--pbs", "--dry-run").exit_code == 0


def test_a_refused_job_cancels_those_before_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSED", "--task right")
    result = flow("submit", file, "--pbs")
    assert result.exit_code == 1
    assert "task right: qsub refused the job: queue is closed" in result.output
    assert jobs(file)["cancelled"] == ["1.server", "2.server"]


def test_what_cannot_be_asked_is_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no batch system is given" in flow("submit", file).output
    monkeypatch.setenv("PATH", "/nowhere")
    assert "qsub is not on PATH" in flow("submit", file, "--pbs").output
