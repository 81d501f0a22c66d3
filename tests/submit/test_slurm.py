"""Promises:
- Under a real Slurm, a time limit, `scancel` and a signal to `fastload submit` leave the checkpoint of the last step
  and the closing lines.
- Under its srun without a PMI, ranks train together, and what uses MPI raises with the remedy. Ranks also meet under
  `--mpi=cray_shasta` and `--mpi=pmi2`, beside an mpi4py of another MPI.

A controller, one node and munge run as children of the test, from a folder of its own. They need root and the packages
slurm-wlm and munge of Debian or Ubuntu. Each has a guard (`fastload._kit.guard`), which kills all that it has
started when the test process ends, in whatever way. A time limit of Slurm is a minute at least.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastload._kit.guard import PARENT_DIED, start_guarded
from fastload.train.checkpoint import Checkpoint
from tests.distributed.launching import clean_environment, command
from tests.promises.reading import wait_until

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
MISSING = [name for name in NEEDED if shutil.which(name, path=PATH) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: no {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd starts tasks as root only"),
]

CONF = """
ClusterName=fastload
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A Slurm of one node."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """The environment of its commands and jobs, with this Python as `python`."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{PATH}"
        return clean_environment({"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path})

    def run(self, *words: str | Path, cwd: Path | None = None) -> tuple[int, str]:
        """Run a command to its end: its exit status, and what it printed."""
        done = subprocess.run(
            list(map(str, words)),
            cwd=cwd or self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        found = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in found]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm that takes jobs, until the tests of this file are over."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key-file").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key-file").chmod(0o600)
    host, ports = socket.gethostname().partition(".")[0], free_ports(2)
    conf = CONF.format(host=host, folder=folder, ports=ports, cpus=os.cpu_count())
    (folder / "slurm.conf").write_text(conf)
    (folder / "cgroup.conf").write_text("IgnoreSystemd=yes\n")
    files = ("key-file", "pid-file", "log-file", "seed-file", "socket")
    munge = [f"--{name}={folder / 'munge'}.{name}" for name in files]
    found = Slurm(folder)
    daemons = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf")],
        ["slurmd", "-D", "-c", "-f", str(folder / "slurm.conf")],
    ]
    with ExitStack() as running, (folder / "daemons.log").open("wb") as log:

        def end(guard: subprocess.Popen[bytes]) -> None:
            """End a daemon, and every process that it has started."""
            guard.send_signal(PARENT_DIED)
            guard.wait()

        for daemon in daemons:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            running.callback(end, start_guarded(daemon, env=found.environ, **options))
            if daemon[0] == "munged":
                wait_until((folder / "munge.socket").exists, "munged is up", 30)

        def is_idle() -> bool:
            return "State=IDLE" in found.run("scontrol", "show", "node")[1]

        try:
            wait_until(is_idle, "the node is idle", 60)
        except AssertionError:
            logs = [path.read_text(errors="replace")[-3000:] for path in folder.glob("*.log")]
            pytest.fail("\n".join(["this Slurm does not start", *logs]))
        yield found


@contextmanager
def ended(job: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Wait for a process after the block, or kill it if the block raises."""
    try:
        yield job
        job.wait()
    finally:
        job.kill()
        job.wait()


def end_with_the_test() -> None:
    """Have the kernel kill this process when the process of the tests ends, in whatever way."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextmanager
def submitted(slurm: Slurm, clone: Path, *options: str) -> Iterator[str]:
    """Start a training of two ranks by `submit/generic.slurm`, and yield its number. After the block, wait for it."""
    settings = "WORKERS=1,BATCH_SIZE=4,NSTEPS=100000,FILE_LIST=samples/list.txt,DEVICE=cpu"
    settings += ",STEP_MS=300,ARGUMENTS=--checkpoint ckpt --image-size 16 --status-print-interval 1"
    words = ["sbatch", "--wait", "--ntasks-per-node=2", "--cpus-per-task=1", "--overcommit"]
    words += ["--output=job.out", *options, f"--export=ALL,CPU_BIND=none,{settings}"]
    job = subprocess.Popen(
        [*words, "submit/generic.slurm"],
        cwd=clone,
        env=slurm.environ,
        stdout=subprocess.PIPE,
        preexec_fn=end_with_the_test,
    )
    assert job.stdout is not None
    with job.stdout as said, ended(job):
        found = re.fullmatch(rb"Submitted batch job (\d+)\n", said.readline())
        assert found
        yield found[1].decode()


def output_of(clone: Path) -> str:
    """Return what a job has printed."""
    return (clone / "job.out").read_text() if (clone / "job.out").exists() else ""


def check_closing_lines(clone: Path, *, by: str = "SIGTERM") -> None:
    output = output_of(clone)
    stopped = re.search(rf"^Stopped by {by} after step (\d+) of 100000$", output, re.MULTILINE)
    assert stopped, output
    kept = Checkpoint.load(clone / "ckpt")
    assert kept is not None
    assert kept.step == int(stopped[1]) > 0
    assert len(kept.randomness) == 2, "two ranks trained together"
    assert re.search(r"^All Done: ", output, re.MULTILINE), output


def test_a_time_limit_leaves_the_checkpoint_of_the_last_step(slurm: Slurm, clone: Path) -> None:
    with submitted(slurm, clone, "--time=1"):
        pass
    check_closing_lines(clone)
    assert " DUE TO TIME LIMIT " in output_of(clone)


def test_scancel_leaves_the_checkpoint_of_the_last_step(slurm: Slurm, clone: Path) -> None:
    with submitted(slurm, clone) as number:
        wait_until(lambda: "\nstep_img_rate: " in output_of(clone), "it trains", 100)
        assert slurm.run("scancel", number)[0] == 0
    check_closing_lines(clone)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_submit_reach_the_ranks_of_srun(
    number: signal.Signals, slurm: Slurm, clone: Path
) -> None:
    """srun would kill its tasks at SIGTERM. It passes SIGINT on, so the ranks get that."""
    train = "train --file-list-path samples/list.txt -b 4 -s 100000 -w 1 --image-size 16 "
    train += (
        "--device cpu --step-ms 300 --status-print-interval 1 --checkpoint ckpt --logdir logdir"
    )
    words = [sys.executable, "-m", "fastload", "submit", "--launcher", "srun", "--parallelism", "2"]
    words += ["--launcher-option=--overcommit", "--launcher-option=--mpi=none"]
    words += ["--module", "fastload", "--", *train.split()]
    options = {"cwd": clone, "env": slurm.environ, "preexec_fn": end_with_the_test}
    with (
        (clone / "job.out").open("wb") as output,
        ended(subprocess.Popen(words, stdout=output, stderr=output, **options)) as job,
    ):
        wait_until(lambda: "\nstep_img_rate: " in output_of(clone), "it trains", 100)
        for _ in range(2):
            job.send_signal(number)
    check_closing_lines(clone, by="SIGINT")
    assert job.returncode == 130


def test_without_a_pmi_what_uses_mpi_raises_with_the_remedy(slurm: Slurm, tmp_path: Path) -> None:
    *_, python, program = command("mpich", 1, "program.py")
    (tmp_path / program).write_text(
        "import torch\n"
        "from mpi4py import MPI\n"
        "from fastload.distributed import WindowDataset\n"
        "WindowDataset({'x': torch.zeros(10)}, MPI.COMM_WORLD)\n"
    )
    srun = ("srun", "--mpi=none", "--ntasks=2", "--overcommit")
    status, said = slurm.run(*srun, python, program, cwd=tmp_path)
    assert status != 0
    assert said.count("SLURM_STEP_NUM_TASKS=2, but mpi4py says rank 0 of 1. ") == 2, said
    assert said.count("`srun --mpi=list`") == 2


@pytest.mark.parametrize("plugin", ["cray_shasta", "pmi2"])
def test_ranks_meet_whatever_srun_sets_for_an_mpi(
    plugin: str, slurm: Slurm, tmp_path: Path
) -> None:
    *_, python, _ = command("openmpi", 1, "")  # with an mpi4py that knows no PMI of these
    srun = ("srun", f"--mpi={plugin}", "--ntasks=2", "--overcommit")
    status, said = slurm.run(*srun, python, "-m", "fastload", "env", "--meet", cwd=tmp_path)
    assert status == 0, said
    for rank in range(2):
        assert f"rank {rank} of 2: local rank {rank} of 2 on " in said
    assert said.count("launcher slurm\n") == said.count("the ranks add up to 1\n") == 2, said
