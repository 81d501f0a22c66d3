"""How ranks are started, as values: host files, ranks of each host, command lines, job scripts. Nothing runs here.

A host file has a host on each line, as `host`, `host slots=N` or `host:N`; `#` begins a comment. A host that stands
there without a number has one slot, and the slots of a host that stands there several times add up: so a PBS node file
(a line for each process) and the files of Open MPI and Hydra all mean what they mean there.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fastload.errors import LaunchError

Launcher = Literal["openmpi", "hydra", "pals", "srun", "torchrun", "none"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
BatchSystem = Literal["pbs", "slurm"]
SUBMITTERS: dict[BatchSystem, str] = {"pbs": "qsub", "slurm": "sbatch"}

_HOST = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)(:(?P<a>\d+)|\s+slots=(?P<b>\d+))?", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it has room for, or gets."""

    name: str
    slots: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to run on every rank, and where.

    `program` is the argument list of one rank, `hosts` are those used, each with the number of its ranks; without any,
    ranks run where the launcher puts them: on this host, or on those of the batch job. `depth` are the cores of each
    rank, None: ranks are not bound. `export` names the variables that ranks on other hosts get, where the launcher asks
    for names; `options` go to the launcher as they are.
    """

    program: tuple[str, ...]
    ranks: int
    hosts: tuple[Host, ...] = ()
    depth: int | None = None
    export: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def parse_hosts(text: str, *, path: str) -> tuple[Host, ...]:
    """The hosts of a file with this text, each once, in the order in which they first stand there.

    Raises `LaunchError`, which names `path` and the line, where a line is no host or no host is there.
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
        raise LaunchError(f"{path}: no host is named there")
    return tuple(Host(name, count) for name, count in slots.items())


def place(
    hosts: Sequence[Host], ranks: int, *, path: str, ppn: int | None = None
) -> tuple[Host, ...]:
    """The hosts that are used, each with the number of its ranks: hosts are filled in their order.

    `ppn`, where given, stands for the slots of each host. Raises `LaunchError` where there are more ranks than slots.
    """
    if ppn is not None:
        hosts = [Host(host.name, ppn) for host in hosts]
    room = sum(host.slots for host in hosts)
    if ranks > room:
        raise LaunchError(
            f"{ranks} ranks, and {path} has {room} slots on {len(hosts)} hosts: ask for fewer ranks, say "
            "`host slots=N` there, or give the ranks of each host with --ppn"
        )
    used = []
    for host in hosts:
        if ranks:
            used.append(Host(host.name, min(host.slots, ranks)))
            ranks -= used[-1].slots
    return tuple(used)


def classify(version: str, path: str) -> Launcher:
    """Which launcher an `mpiexec` is, by what `mpiexec --version` prints and by the `path` of its file.

    PALS is known by its path (/opt/cray/pals/...) too, as its versions differ in what they print.
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
        f"{path} is none of Open MPI, Hydra (MPICH, Intel MPI), PALS: its --version says {first!r}. "
        f"Choose with --launcher: {', '.join(LAUNCHERS)}"
    )


def command_line(job: Job, launcher: Launcher, *, python: str, root: bool = False) -> list[str]:
    """The argument list that starts the job's ranks. `python` is the one that has torch, for torchrun.

    Hosts are given as an argument, not as a file: so what is shown is all that there is. `root`: Open MPI refuses to
    run as root unless it is told to. Raises `LaunchError` where the launcher cannot do what is asked.
    """
    names = ",".join(host.name for host in job.hosts)
    counted = ",".join(f"{host.name}:{host.slots}" for host in job.hosts)
    ranks, depth = str(job.ranks), str(job.depth)
    command: list[str]
    match launcher:
        case "openmpi":
            command = ["mpiexec", "-n", ranks, *(["--allow-run-as-root"] if root else [])]
            command += ["--host", counted] if counted else []
            command += ["--map-by", f"slot:PE={depth}" if job.depth else "slot"]
            command += ["--bind-to", "core" if job.depth else "none"]
            for name in job.export:
                command += ["-x", name]
        case "hydra":
            command = ["mpiexec", "-n", ranks, *(["-hosts", counted] if counted else [])]
            command += ["-bind-to", f"core:{depth}"] if job.depth else []
        case "pals":
            command = ["mpiexec", "-n", ranks]
            command += ["--ppn", _per_host(job, "PALS"), "--hosts", names] if names else []
            command += ["--depth", depth] if job.depth else []
            command += ["--cpu-bind", "depth" if job.depth else "none"]
        case "srun":
            command = ["srun", "--ntasks", ranks]
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
                    f"--launcher none starts one rank and takes no options, and {job.ranks} ranks are asked for"
                    f"{' with ' + shlex.join(job.options) if job.options else ''}"
                )
            return list(job.program)
    if ":" in job.program:
        raise LaunchError(
            f"an argument is ':', behind which {launcher} would look for another program to run: "
            "give it in another form, or through a file; torchrun and none take it"
        )
    return [*command, *job.options, *job.program]


def _per_host(job: Job, launcher: str) -> str:
    """The one number of ranks that every host gets, save that the last one may get fewer."""
    first, last = job.hosts[0].slots, job.hosts[-1].slots
    if any(host.slots != first for host in job.hosts[:-1]) or last > first:
        counts = ", ".join(f"{host.name} {host.slots}" for host in job.hosts)
        raise LaunchError(
            f"{launcher} puts the same number of ranks on each host, and the host file asks for {counts}: "
            "give one number with --ppn"
        )
    return str(first)


def _refuse_hosts(job: Job, launcher: str) -> None:
    if job.hosts:
        raise LaunchError(
            f"--launcher {launcher} starts ranks on this host only, and the host file names "
            f"{', '.join(host.name for host in job.hosts)}: choose one of openmpi, hydra, pals, srun"
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
    """The script of a batch job that runs `command` where there is room for `ranks` ranks, `ppn` a host.

    `command` runs once, on the first host, in the directory of the submission, with `environ` set. `directives` are
    further ones, such as "-A PROJECT"; `walltime` is H:MM:SS, `depth` the cores of each rank (1 if None).
    """
    hosts = -(-ranks // ppn)
    name = (re.sub(r"[^A-Za-z0-9]", "", name).lstrip("0123456789") or "fastload")[:15]
    if system == "pbs":
        asked = [
            f"-N {name}",
            f"-l select={hosts}:ncpus={ppn * (depth or 1)}:mpiprocs={ppn}",
            f"-l walltime={walltime}",
        ]
        mark, workdir = "#PBS", "PBS_O_WORKDIR"
    else:
        asked = [f"--job-name={name}", f"--nodes={hosts}", f"--ntasks={ranks}"]
        asked += [f"--ntasks-per-node={ppn}", f"--time={walltime}"]
        asked += [f"--cpus-per-task={depth}"] if depth else []
        mark, workdir = "#SBATCH", "SLURM_SUBMIT_DIR"
    if broken := [line for line in (*asked, *directives) if "\n" in line]:
        raise LaunchError(f"a directive is one line, got {broken[0]!r}")
    lines = ["#!/bin/bash", *(f"{mark} {line}" for line in (*asked, *directives))]
    lines += ["set -euo pipefail"]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in environ.items()]
    lines += [f'cd "${workdir}"', f"exec {shlex.join(command)}"]
    return "\n".join(lines) + "\n"
