"""Running a launcher: which one is here, its signals, its exit code."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from fastload.distributed.launch import Host, Launcher, classify
from fastload.errors import LaunchError

_FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_VERSION_TIMEOUT_S = 60


def find_launcher(ranks: int, hosts: Sequence[Host]) -> Launcher:
    """The launcher for so many ranks on these hosts: none for one rank here, else `mpiexec`, else srun or torchrun.

    Raises `LaunchError` where there is no `mpiexec` and other hosts are named, or it is none that is known.
    """
    if ranks == 1 and are_here(hosts):
        return "none"
    mpiexec = shutil.which("mpiexec")
    if mpiexec is not None:
        says = subprocess.run(
            [mpiexec, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
        return classify(says.stdout, os.path.realpath(mpiexec))
    if "SLURM_JOB_ID" in os.environ and shutil.which("srun"):
        return "srun"
    if are_here(hosts):
        return "torchrun"
    raise LaunchError(
        f"no mpiexec is on the PATH, and ranks are to run on {', '.join(host.name for host in hosts)}: "
        "load a module or install an MPI"
    )


def are_here(hosts: Sequence[Host]) -> bool:
    """Whether all of these hosts, or none at all, are names of this one."""
    name = socket.gethostname()
    return {host.name for host in hosts} <= {"localhost", "127.0.0.1", name, name.partition(".")[0]}


def signal_options() -> list[str]:
    """What makes torchrun pass on SIGUSR1 and SIGUSR2: of itself it dies of them, and its ranks live on.

    Empty for a torch that cannot.
    """
    from torch.distributed.launcher.api import LaunchConfig

    if "signals_to_handle" not in LaunchConfig.__dataclass_fields__:
        return []
    return ["--signals-to-handle", ",".join(number.name for number in _FORWARDED)]


def execute(command: Sequence[str]) -> int:
    """Run `command` in a process group of its own; return its exit code, or 128 + n where signal n ended it.

    Signals that ask this process to end, and SIGUSR1 and SIGUSR2, go to that group instead, from the first moment on:
    the launcher tells its ranks, and its exit code comes back. Those that this process ignores stay ignored. To be
    called on the main thread. Raises `LaunchError` where the program cannot be started.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(signum)
        elif child.returncode is None:
            with suppress(ProcessLookupError):  # It has just ended.
                os.killpg(child.pid, signum)

    taken = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in taken}
    try:
        try:
            child = subprocess.Popen(command, start_new_session=True)
        except OSError as error:
            raise LaunchError(f"cannot run {command[0]}: {error.strerror}") from error
        for signum in early:
            forward(signum, None)
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status
