"""Starting ranks, as pure values: host files, ranks per host, command lines, job scripts. Nothing runs here.

A host file has one host per line, as `host`, `host slots=N` or `host:N`. `#` begins a comment. A host without a number
has one slot, and the slots of repeated hosts add up. So a PBS node file (one line per process) and the host files of
Open MPI and Hydra keep their meaning.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fastload._kit.texts import counted
from fastload.errors import LaunchError

Launcher = Literal["openmpi", "hydra", "pals", "srun", "torchrun", "none"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
BatchSystem = Literal["pbs", "slurm"]
SUBMITTERS: dict[BatchSystem, str] = {"pbs": "qsub", "slurm": "sbatch"}

_HOST = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)(:(?P<a>\d+)|\s+slots=(?P<b>\d+))?", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A host, and its number of slots or of ranks."""

    name: str
    slots: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """The program of all ranks, and their hosts.

    `program` is the argument list of one rank. `hosts` are the used hosts, each with its number of ranks. Without them,
    the launcher chooses: this host, or those of the batch job. `depth` is the number of cores per rank. None: ranks are
    not bound. `export` names the variables for ranks on other hosts, if the launcher needs names. `options` are passed
    to the launcher unchanged.
    """

    program: tuple[str, ...]
    ranks: int
    hosts: tuple[Host, ...] = ()
    depth: int | None = None
    export: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def parse_hosts(text: str, *, path: str) -> tuple[Host, ...]:
    """Return the hosts of a file with this text, each once, in the order of their first lines.

    Raise `LaunchError`, which names `path` and the line, if a line is not a host or if there are no hosts.
    """
    slots: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        found = _HOST.fullmatch(entry)
        count = int(found["a"] or found["b"] or 1) if found else 0
        if not found or not count:
            raise LaunchError(
                f"{path}, line {number}: expected `host`, `host slots=N` or `host:N` with N of 1 or more, got {entry!r}"
            )
        slots[found["name"]] += count
    if not slots:
        raise LaunchError(f"{path} lists no hosts. Write one host per line")
    return tuple(Host(name, count) for name, count in slots.items())


def place(
    hosts: Sequence[Host], ranks: int, *, path: str, ppn: int | None = None
) -> tuple[Host, ...]:
    """Return the used hosts, each with its number of ranks. Hosts are filled in their order.

    `ppn`, if given, replaces the slots of each host. Raise `LaunchError` if there are more ranks than slots.
    """
    if ppn is not None:
        hosts = [Host(host.name, ppn) for host in hosts]
    room = sum(host.slots for host in hosts)
    if ranks > room:
        raise LaunchError(
            f"{ranks} ranks are too many: {path} has {room} slots on {len(hosts)} hosts. Start fewer ranks, write "
            "`host slots=N` into the file, or give the ranks per host with --ppn"
        )
    used = []
    for host in hosts:
        if ranks:
            used.append(Host(host.name, min(host.slots, ranks)))
            ranks -= used[-1].slots
    return tuple(used)


def classify(version: str, path: str) -> Launcher:
    """Return the launcher that an `mpiexec` is, from the output of `mpiexec --version` and the `path` of its file.

    PALS is also recognised by its path (/opt/cray/pals/...), because the output differs between its versions.
    """
    says = f"{version}\n{path}".lower()
    known: dict[str, Launcher] = {
        "open mpi": "openmpi",
        "open-mpi": "openmpi",
        "openrte": "openmpi",
        "pals": "pals",
        "hydra": "hydra",
        "intel(r) mpi": "hydra",
    }
    for word, launcher in known.items():
        if word in says:
            return launcher
    first = version.strip().partition("\n")[0]
    raise LaunchError(
        f"{path} is not Open MPI, Hydra (MPICH, Intel MPI) or PALS: its --version says {first!r}. "
        f"Put the mpiexec of your MPI first on PATH, or choose with --launcher: {', '.join(LAUNCHERS)}"
    )


def command_line(job: Job, launcher: Launcher, *, python: str, root: bool = False) -> list[str]:
    """Return the argument list that starts the job's ranks. `python` is the one with torch, for torchrun.

    Hosts are an argument, not a file, so the printed command is complete. `root`: add the option that lets Open MPI run
    as root. Raise `LaunchError` if the launcher cannot start the job.
    """
    names = ",".join(host.name for host in job.hosts)
    slots = ",".join(f"{host.name}:{host.slots}" for host in job.hosts)
    ranks, depth = str(job.ranks), str(job.depth)
    command: list[str]
    match launcher:
        case "openmpi":
            command = ["mpiexec", "-n", ranks, *(["--allow-run-as-root"] if root else [])]
            command += ["--host", slots] if slots else []
            command += ["--map-by", f"slot:PE={depth}" if job.depth else "slot"]
            command += ["--bind-to", "core" if job.depth else "none"]
            for name in job.export:
                command += ["-x", name]
        case "hydra":
            command = ["mpiexec", "-n", ranks, *(["-hosts", slots] if slots else [])]
            command += ["-bind-to", f"core:{depth}"] if job.depth else []
        case "pals":
            command = ["mpiexec", "-n", ranks]
            command += ["--ppn", _per_host(job, "PALS"), "--hosts", names] if names else []
            command += ["--depth", depth] if job.depth else []
            command += ["--cpu-bind", "depth" if job.depth else "none"]
        case "srun":
            # Otherwise a first SIGINT makes srun print the state of the tasks, and does not reach them.
            command = ["srun", "--disable-status", "--ntasks", ranks]
            if names:
                command += ["--nodes", str(len(job.hosts)), "--nodelist", names]
                command += ["--ntasks-per-node", _per_host(job, "srun")]
            command += ["--cpus-per-task", depth] if job.depth else []
            command += ["--cpu-bind", "cores" if job.depth else "none"]
        case "torchrun":
            _refuse_hosts(job, launcher)
            command = [python, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", ranks, *job.options, "--no-python"]
            return [*command, *job.program]
        case "none":
            _refuse_hosts(job, launcher)
            if job.ranks > 1 or job.options:
                raise LaunchError(
                    f"--launcher none starts one rank without options, but "
                    f"{counted(job.ranks, 'rank is', 'ranks are')} requested"
                    f"{' with ' + shlex.join(job.options) if job.options else ''}. Choose another --launcher"
                )
            return list(job.program)
    if ":" in job.program:
        raise LaunchError(
            f"an argument is ':', and {launcher} would run what follows as another program. Give the argument in "
            "another form, put it into a file, or use --launcher torchrun or none"
        )
    return [*command, *job.options, *job.program]


def _per_host(job: Job, launcher: str) -> str:
    """Return the number of ranks per host, which must be the same for all hosts but the last one."""
    first, last = job.hosts[0].slots, job.hosts[-1].slots
    if any(host.slots != first for host in job.hosts[:-1]) or last > first:
        counts = ", ".join(f"{host.name} {host.slots}" for host in job.hosts)
        raise LaunchError(
            f"{launcher} starts the same number of ranks on each host, but the host file asks for {counts}. "
            "Give one number with --ppn"
        )
    return str(first)


def _refuse_hosts(job: Job, launcher: str) -> None:
    if job.hosts:
        raise LaunchError(
            f"--launcher {launcher} starts ranks on this host only, but the host file lists "
            f"{', '.join(host.name for host in job.hosts)}. Choose one of openmpi, hydra, pals, srun"
        )


def job_script(
    system: BatchSystem,
    command: Sequence[str],
    *,
    name: str,
    ranks: int,
    ppn: int,
    depth: int | None,
    walltime: str,
    directives: Sequence[str] = (),
    environ: Mapping[str, str],
) -> str:
    """Return the script of a batch job that runs `command` on hosts for `ranks` ranks, with `ppn` ranks per host.

    `command` runs once, on the first host, in the folder of the submission, with `environ` set. `directives` are
    extra directives, such as "-A PROJECT". `walltime` is H:MM:SS, and `depth` the cores per rank (1 if None).
    """
    hosts = -(-ranks // ppn)
    name = (re.sub(r"[^A-Za-z0-9]", "", name).lstrip("0123456789") or "fastload")[:15]
    if system == "pbs":
        asked = [
            f"-N {name}",
            f"-l select={hosts}:ncpus={ppn * (depth or 1)}:mpiprocs={ppn}",
            f"-l walltime={walltime}",
            "-k doe",  # else what the ranks print after the signal at the end of the walltime is lost
        ]
        mark, workdir = "#PBS", "PBS_O_WORKDIR"
    else:
        asked = [f"--job-name={name}", f"--nodes={hosts}", f"--ntasks={ranks}"]
        asked += [f"--ntasks-per-node={ppn}", f"--time={walltime}"]
        asked += [f"--cpus-per-task={depth}"] if depth else []
        mark, workdir = "#SBATCH", "SLURM_SUBMIT_DIR"
    if broken := [line for line in (*asked, *directives) if "\n" in line]:
        raise LaunchError(f"a directive must be one line, got {broken[0]!r}")
    lines = ["#!/bin/bash", *(f"{mark} {line}" for line in (*asked, *directives))]
    lines += ["set -euo pipefail"]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in environ.items()]
    lines += [f'cd "${workdir}"', f"exec {shlex.join(command)}"]
    return "\n".join(lines) + "\n"
