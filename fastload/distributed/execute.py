"""Running a launcher: finding it, its signals, its exit code, its end (`_kit/guard`)."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from fastload._kit import guard
from fastload.distributed.launch import Host, Job, Launcher, classify, command_line
from fastload.errors import LaunchError

_VERSION_TIMEOUT_S = 60


def find_launcher(ranks: int, hosts: Sequence[Host]) -> Launcher:
    """Return the launcher for these ranks and hosts: "none" for one rank here, else `mpiexec`, else srun or torchrun.

    Raise `LaunchError` if `mpiexec` is unknown, or if it is missing and other hosts are named.
    """
    if ranks == 1 and are_here(hosts):
        return "none"
    mpiexec = shutil.which("mpiexec")
    if mpiexec is not None:
        return classify(_version_of(mpiexec), os.path.realpath(mpiexec))
    if "SLURM_JOB_ID" in os.environ and shutil.which("srun"):
        return "srun"
    if are_here(hosts):
        return "torchrun"
    raise LaunchError(
        f"mpiexec is not on PATH, and the ranks must run on {', '.join(host.name for host in hosts)}. "
        "Load a module or install an MPI"
    )


def start_line(job: Job, launcher: Launcher) -> list[str]:
    """Return the argument list that starts the job's ranks from this process, see `launch.command_line`."""
    return command_line(job, launcher, python=sys.executable, root=os.geteuid() == 0)


def _version_of(mpiexec: str) -> str:
    """Return what `mpiexec --version` prints, or "" if it hangs."""
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(
            [mpiexec, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        ).stdout
    return ""


def are_here(hosts: Sequence[Host]) -> bool:
    """Return True if all of these hosts are names of this one. An empty list counts as this host."""
    name = socket.gethostname()
    return {host.name for host in hosts} <= {"localhost", "127.0.0.1", name, name.partition(".")[0]}


def signal_options() -> list[str]:
    """Return the options that make torchrun pass on SIGUSR1 and SIGUSR2, or [] if this torch has none.

    By default, these signals kill torchrun, and its ranks keep running.
    """
    from torch.distributed.launcher.api import LaunchConfig

    if "signals_to_handle" not in LaunchConfig.__dataclass_fields__:
        return []
    return ["--signals-to-handle", ",".join(number.name for number in guard.FORWARDED)]


def execute(command: Sequence[str], *, to_ranks: bool = False) -> int:
    """Run `command` and all that it starts. Return its exit code, or 128 + n if signal n ended it.

    Signals that ask this process to end, and SIGUSR1 and SIGUSR2, go to the command's process group instead, but not
    those that repeat a request (`guard.Request`). With `to_ranks`, SIGINT, SIGTERM and SIGHUP go to Open MPI's ranks on
    this host, because their launcher would kill them soon after. Signals that this process ignores stay ignored. No
    process of the command outlives this one, even after SIGKILL. Call this in the main thread.

    Raises:
        LaunchError: the program does not exist.
    """
    with guard.held() as before:
        child = guard.start_guarded(command, to_ranks=to_ranks)
        with guard.forwarding(child.send_signal):
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            status = child.wait()
    return 128 - status if status < 0 else status  # negative if the guard itself was killed
