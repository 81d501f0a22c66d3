"""`fastload submit`: run a script on many ranks, on this host, on listed hosts, or as a batch job."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from fastload._kit.options import Count, ExistingFile, Option, options
from fastload.cli._command import Command
from fastload.cli._common import Batch
from fastload.errors import UsageError

if TYPE_CHECKING:
    from fastload.distributed.launch import BatchSystem, Launcher

_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")


@options
class Ranks:
    """What runs on which hosts."""

    script: Annotated[str | None, Option(exists=True, dir_okay=False, resolve_path=True)] = None
    """Script that every rank runs."""
    module: str | None = None
    """Module that every rank runs instead of a script, as python -m does."""
    executor: str | None = None
    """Program that runs the script. [default: this Python]"""
    parallelism: Count = 1
    """Number of ranks."""
    hostfile: ExistingFile | None = None
    """File with one host per line: `host`, `host slots=N` or `host:N`. [default: $PBS_NODEFILE, if it is set]"""
    ppn: Count | None = None
    """Ranks per host. [default: slots of the host; all ranks on one host in a batch job]"""
    depth: Count | None = None
    """Cores per rank. Without this option, ranks are not bound to cores, and a batch job requests one core each."""
    launcher: Literal["auto", "openmpi", "hydra", "pals", "srun", "torchrun", "none"] = "auto"
    """Launcher of the ranks. auto: none (run directly) for one rank; otherwise mpiexec if it is on PATH, else srun
    inside a Slurm job, else torchrun."""
    launcher_option: Sequence[str] = ()
    """Extra option for the launcher, passed unchanged. Repeatable."""
    env: Sequence[str] = ()
    """Environment variable to pass to ranks on other hosts. Repeatable."""
    walltime: str = "1:00:00"
    """Time limit of the batch job, H:MM:SS."""
    directive: Sequence[str] = ()
    """Extra line for the batch job's header, such as '-A PROJECT' or '-l filesystems=home'. Repeatable."""
    arguments: Annotated[Sequence[str], Option("[ARGUMENTS]...")] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(\d+-)?\d+(:[0-5]?\d){0,2}", self.walltime, re.ASCII):
            raise UsageError(
                f"--walltime {self.walltime!r} is not a duration. Give H:MM:SS, such as 1:30:00."
            )
        if (self.script is None) == (self.module is None):
            raise UsageError("give either --script or --module")
        if missing := [name for name in self.env if name not in os.environ]:
            raise UsageError(
                f"--env {missing[0]}: the variable is not set. Set it, or remove the option."
            )

    @property
    def program(self) -> str:
        """The program that runs the script."""
        return self.executor or sys.executable

    @property
    def exported(self) -> tuple[str, ...]:
        """The names of the variables that ranks on other hosts get."""
        return tuple(n for n in dict.fromkeys((*_EXPORTED, *self.env)) if n in os.environ)


@Command
def submit(ranks: Ranks, batch: Batch) -> None:
    """Run a script on many ranks, with mpiexec, srun or torchrun.

    ARGUMENTS, after --, are the arguments of the script. The exit code is that of the job, or 128 + n if signal n
    ended it. Signals are forwarded, and no process of the job outlives this command.

    With --pbs or --slurm, the run is submitted as a batch job. It requests enough hosts for all ranks, with --ppn ranks
    per host.

    \b
    Examples:
        fastload submit --script train.py --parallelism 4 -- --epochs 3
        fastload submit --script train.py --parallelism 8 --hostfile hosts --dry-run
        fastload submit --script train.py --parallelism 8 --ppn 4 --pbs --directive '-A PROJECT'
    """
    from fastload.distributed.execute import execute

    system, end = batch.system, click.get_current_context().exit
    if system is None:
        command, launcher = _command(ranks)
        if batch.dry_run:
            click.echo(shlex.join(command))
        else:
            end(execute(command, to_ranks=launcher == "openmpi"))
        return
    if ranks.hostfile:
        raise click.UsageError(
            f"--hostfile cannot be used with --{system}, because the batch system chooses the hosts. "
            "Remove --hostfile."
        )
    command, text = _job(system, ranks)
    if batch.dry_run:
        click.echo(f"# {shlex.join(command)} <<'END'\n{text}END")
        return
    if shutil.which(command[0]) is None:
        raise click.ClickException(
            f"{command[0]} is not on PATH. Run this command on a login node."
        )
    end(subprocess.run(command, input=text, text=True, check=False).returncode)


def _command(ranks: Ranks) -> tuple[list[str], Launcher]:
    """Return the argument list that starts the ranks from here, and its launcher."""
    from fastload.distributed import launch
    from fastload.distributed.execute import are_here, find_launcher, signal_options, start_line

    path, count = ranks.hostfile or os.environ.get("PBS_NODEFILE"), ranks.parallelism
    hosts: tuple[launch.Host, ...] = ()
    if path:
        listed = launch.parse_hosts(Path(path).read_text(errors="replace"), path=str(path))
        hosts = launch.place(listed, count, path=str(path), ppn=ranks.ppn)
    elif ranks.ppn is not None:
        raise click.UsageError(
            "--ppn needs --hostfile, --pbs or --slurm. Add one, or remove --ppn."
        )
    launcher = find_launcher(count, hosts) if ranks.launcher == "auto" else ranks.launcher
    if launcher in ("torchrun", "none") and are_here(hosts):
        hosts = ()
    what = ("-m", ranks.module) if ranks.module else (str(ranks.script),)
    job = launch.Job(
        program=(ranks.program, *what, *ranks.arguments),
        ranks=count,
        hosts=hosts,
        depth=ranks.depth,
        export=ranks.exported,
        options=(*(signal_options() if launcher == "torchrun" else ()), *ranks.launcher_option),
    )
    return start_line(job, launcher), launcher


def _job(system: BatchSystem, ranks: Ranks) -> tuple[list[str], str]:
    """Return the command that reads a batch job from standard input, and the job. The job runs this command again."""
    from fastload.distributed import launch

    count, ppn = ranks.parallelism, min(ranks.ppn or ranks.parallelism, ranks.parallelism)
    launcher = "srun" if (system, ranks.launcher) == ("slurm", "auto") else ranks.launcher
    command = [sys.executable, "-m", "fastload", "submit", "--parallelism", str(count)]
    command += ["--launcher", launcher, "--executor", ranks.program]
    command += ["--ppn", str(ppn)] if system == "pbs" else []
    command += ["--depth", str(ranks.depth)] if ranks.depth else []
    command += [f"--launcher-option={value}" for value in ranks.launcher_option]
    command += [f"--env={name}" for name in ranks.env]
    command += [f"--module={ranks.module}" if ranks.module else f"--script={ranks.script}"]
    text = launch.job_script(
        system,
        [*command, "--", *ranks.arguments],
        name=Path(ranks.module or str(ranks.script)).stem,
        ranks=count,
        ppn=ppn,
        depth=ranks.depth,
        walltime=ranks.walltime,
        directives=ranks.directive,
        environ={name: os.environ[name] for name in ranks.exported},
    )
    return [launch.SUBMITTERS[system]], text
