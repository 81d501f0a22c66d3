"""Starts a program under a real launcher, and sees to it that nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.children import READ_TOO_EARLY

ROOT = Path(__file__).parent.parent.parent
LAUNCHERS = ("mpich", "openmpi", "torchrun")
LIMIT_S = 100.0


@dataclass(frozen=True)
class Ended:
    """How a job ended: the launcher's exit code, the moment on the monotonic clock, and all that was printed."""

    code: int
    moment: float
    text: str


def command(launcher: str, ranks: int, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    """Return the command that starts `python ARGUMENT...` as so many ranks; skips the test without the launcher."""
    if launcher == "torchrun":
        started_by = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        return [*started_by, *arguments]
    home = Path(sys.prefix) / "mpi" / launcher / "bin"
    if not (home / "mpiexec").exists():
        pytest.skip(f"no {launcher} in {home}: scripts/test installs it where it can")
    return [str(home / "mpiexec"), *options, "-n", str(ranks), str(home / "python"), *arguments]


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without what a launcher around it set, and with `extra`."""
    launchers = ("PMI", "PMIX", "OMPI", "PALS", "SLURM", "PBS", "TORCHELASTIC", "MPI")
    own = {name: text for name, text in os.environ.items() if name.split("_")[0] not in launchers}
    return own | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **extra,
    }


def warm_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return `clean_environment(extra)` for `tests.children`, whose programs cannot change what Python reads first."""
    given = {name: os.environ[name] for name in READ_TOO_EARLY if name in os.environ}
    own = clean_environment(extra)
    return {name: text for name, text in own.items() if name not in READ_TOO_EARLY} | given


def run(arguments: list[str], cwd: Path, extra: Mapping[str, str] | None = None) -> Ended:
    """Run a job to its end; one that takes too long is ended, its ranks by their launcher, and fails the test."""
    with (
        (cwd / "output").open("w+") as output,
        subprocess.Popen(
            arguments,
            cwd=cwd,
            env=clean_environment(extra or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as job,
    ):
        try:
            code = job.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            job.terminate()
            try:
                job.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
            code = None
        moment = time.monotonic()
    text = (cwd / "output").read_text()
    assert code is not None, f"the job was not over in {LIMIT_S:g} s\n{text}"
    return Ended(code, moment, text)


def is_over(pid: int) -> bool:
    """Whether a process ended; one that only waits to be reaped did."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end between open and read
        return True
