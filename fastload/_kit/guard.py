"""The one runner of child processes, and the signals that ask a process to end.

`start_guarded` starts a command under a guard, which is this file as a program. The guard kills what the command leaves
when it ends, and all of it when the process that asked for it ends in any way. It is started by path, so it imports
nothing of fastload. `asked_to_end` and `forwarding` serve every command.

The guard runs the command in a separate session. A batch system signals every process of the job's session. If the
launcher were in it, Open MPI's launcher would get the signal as well as its ranks, and kill them half a second later.
Here only the process that started the guard sends signals.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_ABORTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""At these, Open MPI's launcher kills its ranks half a second later, and srun at once."""
_OPEN_MPI_RANK = b"OMPI_COMM_WORLD_RANK="
PARENT_DIED = signal.SIGALRM  # not a forwarded signal
TOGETHER_S = 2.0
"""Seconds after the first SIGINT or SIGTERM in which others belong to the same request."""


class Request:
    """A request to end this process, which may come as several signals.

    A batch system and a launcher signal the same process. At Slurm's time limit a rank gets SIGTERM from slurmstepd and
    from srun, up to 60 ms apart. One Ctrl-C reaches it from the terminal and from its launcher. So all SIGINT and
    SIGTERM within `TOGETHER_S` of the first are one request. Later, SIGINT asks for an end at once. SIGTERM never does.
    """

    def __init__(self) -> None:
        self.number = 0
        """The first signal, or 0."""
        self._at = 0.0

    def takes(self, number: int) -> bool:
        """Return False for a signal that repeats the request."""
        if number not in (signal.SIGINT, signal.SIGTERM):
            return True
        if not self.number:
            self.number, self._at = number, time.monotonic()
            return True
        return number == signal.SIGINT and time.monotonic() - self._at > TOGETHER_S


_open: list[Request] = []
"""The request of each block that is open. Nested blocks have the same one."""


@contextmanager
def asked_to_end(ask: Callable[[int], None]) -> Iterator[Request]:
    """Call `ask` with the first SIGINT or SIGTERM in the block, and yield the request. Use it in the main thread only.

    A SIGINT that asks for an end at once acts as it does outside the block. If SIGINT is ignored, as in a job that a
    shell started in the background, it stays ignored. SIGTERM is always handled. A job script may ignore it, and its
    ranks inherit that, but they must still write their checkpoint.
    """

    def act(number: int, outside: Any) -> None:
        if outside is None:
            ask(number)
        else:
            signal.signal(number, outside)
            signal.raise_signal(number)

    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    with _handling((signal.SIGTERM,) if ignored else (signal.SIGINT, signal.SIGTERM), act) as one:
        yield one


@contextmanager
def forwarding(send: Callable[[int], None]) -> Iterator[None]:
    """Call `send` for each signal of `FORWARDED` to this process, but once for those that are one request.

    Launchers count signals too: a second one makes MPICH's and torchrun's kill their ranks. Signals that this process
    ignores stay ignored.
    """

    def forward(number: int, outside: Any) -> None:
        with suppress(ProcessLookupError):  # It has just ended.
            send(number)

    with _handling([n for n in FORWARDED if signal.getsignal(n) is not signal.SIG_IGN], forward):
        yield


@contextmanager
def _handling(numbers: Iterable[int], act: Callable[[int, Any], None]) -> Iterator[Request]:
    """Call `act(number, outside)` for each signal that repeats no request. `outside` is None for the first one.

    For a later one, it is the signal's handler outside of the block.
    """
    request = _open[-1] if _open else Request()

    def arrive(number: int, frame: FrameType | None) -> None:
        first = not request.number
        if request.takes(number):
            act(number, None if first else before[number])

    before = {number: signal.getsignal(number) for number in numbers}
    _open.append(request)
    try:
        for number in before:
            signal.signal(number, arrive)
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _open.pop()


@contextmanager
def held() -> Iterator[Iterable[int]]:
    """Let the forwarded signals wait in the block. Yield what was blocked before.

    A signal between the start of a process and its entry in a list would leave the process alone.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_guarded(
    command: Sequence[str], *, to_ranks: bool = False, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `command` under a guard, and return the guard. Its exit code is the command's, or 128 + n.

    Signals to the guard are forwarded to the command's process group. `PARENT_DIED` kills all processes of the command,
    and so does the end of the calling thread. `options` are those of Popen. Raise `LaunchError` if the program does
    not exist.

    Args:
        to_ranks: SIGINT, SIGTERM and SIGHUP go to Open MPI's ranks on this host, not to their launcher.
    """
    import shutil  # the guard itself needs neither, and starts faster

    from fastload.errors import LaunchError

    program = command[0]
    if os.path.dirname(program):
        program = os.path.join(options.get("cwd") or "", program)
    if shutil.which(program, path=(options.get("env") or os.environ).get("PATH")) is None:
        raise LaunchError(
            f"cannot run {command[0]}: it does not exist, or is not executable. Load the module that has it, "
            "or give its path"
        )
    started = [str(os.getpid()), "ranks" if to_ranks else "group", *command]
    with held():  # until the guard forwards them
        return subprocess.Popen(
            [sys.executable, "-IS", __file__, *started], start_new_session=True, **options
        )


def end_with_parent(parent: int, number: int) -> None:
    """Let the kernel send this process a signal when the thread that started it ends. Exit if `parent` has ended."""
    PR_SET_PDEATHSIG = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def main(parent: str, to_ranks: str, *command: str) -> int:
    """Run `command`, and end all its processes when it or the process `parent` ends. Return an exit code."""
    PR_SET_CHILD_SUBREAPER = 36
    signal.signal(PARENT_DIED, _stop)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    end_with_parent(int(parent), PARENT_DIED)
    try:
        return _run(command, to_ranks == "ranks")
    finally:
        signal.signal(PARENT_DIED, signal.SIG_IGN)
        _kill_descendants()


def _stop(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signal.SIGKILL)


def _run(command: tuple[str, ...], to_ranks: bool) -> int:
    try:
        launcher = subprocess.Popen(command, process_group=0, preexec_fn=_unblock)
    except OSError as error:
        print(f"Error: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 126

    def send(signum: int) -> None:
        if launcher.returncode is not None:
            return
        if signum in _ABORTS and os.path.basename(command[0]) == "srun":
            signum = signal.SIGINT  # srun kills its tasks at the others, and passes this one on
        ranks = _open_mpi_ranks(launcher.pid) if to_ranks and signum in _ABORTS else []
        for group in ranks or [launcher.pid]:
            with suppress(ProcessLookupError):  # One rank may have ended before the others.
                os.killpg(group, signum)

    with forwarding(send):
        _unblock()
        status = launcher.wait()
    return 128 - status if status < 0 else status


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def _parents() -> dict[int, int]:
    """Return the parent of each process."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            found[int(name)] = int(stat.read().rpartition(b")")[2].split()[1])
    return found


def _open_mpi_ranks(launcher: int) -> list[int]:
    """Return the ranks on this host. Each leads a process group."""
    ranks = []
    for pid, parent in _parents().items():
        if parent == launcher:
            with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
                if any(entry.startswith(_OPEN_MPI_RANK) for entry in environ.read().split(b"\0")):
                    ranks.append(pid)
    return ranks


def _kill_descendants() -> None:
    """Kill all descendants of this process. It adopts orphans, as their subreaper."""
    with suppress(ChildProcessError):
        while True:
            parents = _parents()
            below = {os.getpid()}
            while more := {pid for pid, parent in parents.items() if parent in below} - below:
                below |= more
            for pid in below - {os.getpid()}:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.wait()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
