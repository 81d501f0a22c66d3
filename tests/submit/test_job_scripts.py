"""Promises:
- The scripts in `submit/` run under stand-ins of qsub, sbatch, mpiexec and srun.
- A job script takes nodes from the node file, loops over numbers of workers, stages the set and keeps logs. A fault
  ends the job.
- A job that dies early leaves its output in the folder of submission. A job without Python stops with a sentence.

`qsub`, `sbatch`, `mpiexec`, `srun`, `module`, `conda` are stand-ins (in stand_ins/), and so is `python`, which takes
notes instead of training. A job starts as under PBS: out of a spool directory, in the home directory, with PBS's
variables and no others.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUBMIT = ROOT / "submit"
STAND_INS = Path(__file__).parent / "stand_ins"
DATA = "BASE_DIR=/data,FILE_LIST=train.txt"
JOBS = ["polaris.pbs", "aurora.pbs", "generic.pbs", "perlmutter.slurm", "generic.slurm"]

PYTHON = """#!/usr/bin/env bash
case "$*" in
--version | -c* | -\\ * | "-m fastload submit"*) exec {python} "$@" ;;
esac
rank="${{PMI_RANK:-none}}/${{PMI_SIZE:-none}}"
[[ -z "${{SLURM_STEP_ID:-}}" ]] || rank="$SLURM_PROCID/$SLURM_STEP_NUM_TASKS"
echo "rank $rank master ${{MASTER_ADDR:-none}}: $*" >>"$NOTES"
[[ -z "${{CCL_WORKER_AFFINITY:-}}" ]] || echo "oneCCL's workers on $CCL_WORKER_AFFINITY" >>"$NOTES"
echo "output of $*"
[[ -z "${{FAIL_ON:-}}" || "$*" != *"$FAIL_ON"* ]] || exit 3
"""


@dataclass(frozen=True)
class Site:
    """A login node: a clone of the project, a home, and the stand-ins on the PATH."""

    root: Path

    @property
    def clone(self) -> Path:
        return self.root / "the clone"

    def run(self, *command: str | Path, **environ: str) -> tuple[int, str, list[str]]:
        """Run a command in the clone: exit status, its output, the notes that the stand-ins took."""
        notes = self.root / "notes"
        notes.write_text("")
        home = self.root / "home"
        path = f"{self.root / 'bin'}:{STAND_INS}:{os.environ['PATH']}"
        run = subprocess.run(
            command,
            cwd=self.clone,
            env={"HOME": str(home), "PATH": path, "NOTES": str(notes), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
        assert list(home.iterdir()) == []  # everything is written in the clone
        return run.returncode, run.stdout, notes.read_text().splitlines()

    def qsub(
        self, script: str, settings: str, *options: str, **environ: str
    ) -> tuple[int, str, list[str]]:
        """Run a job to its end: exit status, the output that PBS delivered, the notes that the stand-ins took."""
        command = ["qsub", "-A", "me", *options, "-v", settings, f"submit/{script}"]
        status, said, notes = self.run(*command, **environ)
        assert said == ""
        return status, (self.clone / "job.o123").read_text(), notes

    def sbatch(self, script: str, settings: str, *options: str) -> tuple[int, str, list[str]]:
        """Run a job to its end: its exit status, its output, the notes that the stand-ins took."""
        exported = f"--export=ALL,{settings}"
        status, said, notes = self.run("sbatch", "--wait", *options, exported, f"submit/{script}")
        assert said == "Submitted batch job 123\n"
        return status, (self.clone / "slurm-123.out").read_text(), notes


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    for name in ("home", "bin", "the clone"):
        (tmp_path / name).mkdir()
    for name in ("fastload", "submit", "scripts", "pyproject.toml"):
        (site.clone / name).symlink_to(ROOT / name)
    python = tmp_path / "bin" / "python"
    python.write_text(PYTHON.format(python=f"'{sys.executable}'"))
    python.chmod(0o755)
    return site


def launches(notes: list[str]) -> list[str]:
    return [line for line in notes if line.startswith(("mpiexec", "srun"))]


def phases(output: str) -> list[str]:
    """The lines that begin with the seconds since the start, without these."""
    return [line.split("] ", 1)[1] for line in output.splitlines() if re.match(r"\[\d+\] ", line)]


@pytest.mark.parametrize("script", JOBS)
def test_a_job_script_stops_at_the_first_fault(script: str) -> None:
    lines = (SUBMIT / script).read_text().splitlines()
    code = [line for line in lines if line and not line.startswith("#")]
    workdir = "SLURM_SUBMIT_DIR" if script.endswith("slurm") else "PBS_O_WORKDIR"
    assert code[:2] == ["set -euo pipefail", f'cd "${workdir}"']


def test_polaris_trains_on_four_ranks_of_each_node_once_for_each_number_of_workers(
    site: Site,
) -> None:
    status, output, notes = site.qsub("polaris.pbs", "WORKERS=0 2,NSTEPS=20", "-q", "debug")
    assert status == 0, output
    assert notes[:3] == ["module use /soft/modulefiles", "module load conda", "conda activate"]
    data = "--base-dir /lus/eagle/projects/datasets/ImageNet/ILSVRC "
    data += "--file-list-path ilsvrc_train_filelist.txt"
    train = "-m fastload train --nworkers {} --nbatch 64 --nsteps 20 --logdir logdir " + data
    for workers, ran in ((0, notes[3:12]), (2, notes[12:])):
        asked = train.format(workers)
        bound = "list:24-31,56-63:16-23,48-55:8-15,40-47:0-7,32-39"  # GPU 0 is next to core 24
        assert ran[0] == f"mpiexec -n 8 --ppn 4 --depth 16 --cpu-bind {bound} python {asked}"
        assert ran[1:] == [f"rank {rank}/8 master node1: {asked}" for rank in range(8)]
        log = (site.clone / "logdir" / f"123-w{workers}.log").read_text()
        assert log.splitlines() == [f"output of {asked}"] * 8
    said = phases(output)
    assert said[0] == "environment: conda conda activate"
    assert said[2:] == [
        "NODES=2 RANKS_PER_NODE=4 RANKS=8 MASTER_ADDR=node1",
        "train with 0 workers",
        "train with 2 workers",
        "done",
    ]


def test_aurora_binds_twelve_ranks_to_cores_of_neither_the_system_nor_oneccl(site: Site) -> None:
    settings = f"WORKERS=1,{DATA},CCL_WORKER_AFFINITY=5"
    status, output, notes = site.qsub("aurora.pbs", settings)
    assert status == 0, output
    assert notes[0] == "module load frameworks"
    (launch,) = launches(notes)
    assert launch.startswith("mpiexec -n 24 --ppn 12 --depth 4 --cpu-bind list:4-7:8-11:")
    ranges = re.search(r"list:([\d:-]+)", launch)
    assert ranges is not None
    cores = [
        core
        for first, last in (piece.split("-") for piece in ranges[1].split(":"))
        for core in range(int(first), int(last) + 1)
    ]
    assert len(cores) == len(set(cores)) == 12 * 4
    assert {core // 52 for core in cores[:24]} == {0}
    assert {core // 52 for core in cores[24:]} == {1}
    assert not {0, 52, *range(40, 52), *range(92, 104)} & set(cores)
    assert "oneCCL's workers on 5" not in notes  # they choose among their own cores


def test_a_generic_pbs_takes_the_ranks_of_the_node_file_and_any_mpiexec(site: Site) -> None:
    status, output, notes = site.qsub(
        "generic.pbs", f"WORKERS=3,{DATA},STEP_MS=5,PROFILE=--profile"
    )
    assert status == 0, output
    asked = "-m fastload train --nworkers 3 --nbatch 64 --nsteps 100 --logdir logdir "
    asked += "--base-dir /data --file-list-path train.txt --profile --step-ms 5"
    launch = f"mpiexec -n 2 --ppn 1 --hosts node1,node2 --cpu-bind none python {asked}"
    assert notes == [launch, f"rank 0/2 master node1: {asked}", f"rank 1/2 master node1: {asked}"]
    assert "NODES=2 RANKS_PER_NODE=1 RANKS=2 MASTER_ADDR=node1" in phases(output)


def test_perlmutter_trains_under_slurm(site: Site) -> None:
    status, output, notes = site.sbatch("perlmutter.slurm", f"WORKERS=1,{DATA}", "--account=me")
    assert status == 0, output
    assert notes[0] == "module load pytorch"
    assert launches(notes)[0].startswith(
        "srun --mpi none --nodes 2 --cpus-per-task 32 --cpu-bind map_ldom:3,2,1,0 --ntasks 8 "
        "--ntasks-per-node 4 python "
    )
    assert sum(line.startswith("rank ") for line in notes) == 8


def test_a_generic_slurm_takes_the_ranks_of_the_job_and_names_the_mpi_of_srun(site: Site) -> None:
    options = ("--ntasks-per-node=3", "--cpus-per-task=8")
    status, output, notes = site.sbatch("generic.slurm", f"WORKERS=1,{DATA}", *options)
    assert status == 0, output
    asked = "-m fastload train --nworkers 1 --nbatch 64 --nsteps 100 --logdir logdir "
    asked += "--base-dir /data --file-list-path train.txt"
    launch = "srun --mpi none --nodes 2 --cpus-per-task 8 --cpu-bind cores --ntasks 6 "
    assert notes == [
        f"{launch}--ntasks-per-node 3 python {asked}",
        *(f"rank {rank}/6 master node1: {asked}" for rank in range(6)),
    ]
    settings = "WORKERS=1,PACKED=/set,STAGE=/local/set,MPI=pmi2"
    status, output, notes = site.sbatch("generic.slurm", settings)
    assert status == 0, output
    stage, train = launches(notes)
    launch = "srun --mpi pmi2 --nodes 2 --cpus-per-task 4 --cpu-bind cores --ntasks 2 "
    assert stage == f"{launch}--ntasks-per-node 1 python -m fastload set stage /set /local/set"
    assert train.startswith(f"{launch}--ntasks-per-node 1 python -m fastload train ")


def test_a_job_without_a_python_says_so(site: Site) -> None:
    command = ("/bin/bash", "-c", "source submit/_job.sh && MODULES= load_environment")
    status, output, _ = site.run(*command, PATH="/nowhere")
    assert status == 1
    said = (
        "fastload: there is no python on PATH. Name modules that have one in MODULES, or set VENV."
    )
    assert output.splitlines()[-1] == said


def test_a_packed_set_is_staged_once_on_each_node_of_the_node_file_and_trained_on_there(
    site: Site,
) -> None:
    settings = "WORKERS=1 2,PACKED=/project/a set,STAGE=/local/set"
    status, output, notes = site.qsub("polaris.pbs", f"{settings},RANKS_PER_NODE=2", NODES="3")
    assert status == 0, output
    first, *others = launches(notes)
    assert first.startswith("mpiexec -n 3 --ppn 1 ")
    assert first.endswith("python -m fastload set stage /project/a set /local/set")
    assert len(others) == 2
    assert all(launch.startswith("mpiexec -n 6 --ppn 2 ") for launch in others)
    assert all(" --packed /local/set" in line and "file-list" not in line for line in others)


def test_a_run_that_fails_ends_the_job_with_its_status(site: Site) -> None:
    status, output, notes = site.qsub("polaris.pbs", "WORKERS=0 1 2,FAIL_ON=--nworkers 1")
    assert status == 3
    assert len(launches(notes)) == 2
    assert phases(output)[-1] == "train with 1 workers"


def test_local_makes_images_and_trains_here_or_stages_a_packed_set_as_a_job_does(
    site: Site,
) -> None:
    venv = site.root / "venv" / "bin"
    venv.mkdir(parents=True)
    shutil.copy(site.root / "bin" / "python", venv / "python")
    (venv / "activate").write_text(f"export PATH='{venv}':$PATH\n")
    environ = {"FASTLOAD_VENV": str(venv.parent), "WORKERS": "2"}
    status, output, notes = site.run("submit/local.sh", **environ)
    assert status == 0, output
    here = f"rank none/none master {socket.gethostname()}: -m fastload "
    asked = "train --nworkers 2 --nbatch 64 --nsteps 20 --logdir logdir "
    asked += "--base-dir samples --file-list-path filelist.txt"
    assert notes[-2].endswith("-m fastload images samples --count 512")
    assert notes[-1] == here + asked
    assert (site.clone / "logdir" / "local-w2.log").exists()
    stage = {"PACKED": "/project/a set", "STAGE": "/local/set"}
    status, output, notes = site.run("submit/local.sh", **environ, **stage)
    assert status == 0, output
    assert notes[-2].endswith("-m fastload set stage /project/a set /local/set")
    assert notes[-1].endswith(" --packed /local/set")
