"""`fastload submit`: a script on many ranks, here, on the hosts of a file, or by way of a batch system."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from fastload.cli._common import walltime

if TYPE_CHECKING:
    from fastload.distributed.launch import BatchSystem, Launcher

_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
_CHOICES = ["auto", "openmpi", "hydra", "pals", "srun", "torchrun", "none"]


@click.command()
@click.option(
    "--script",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="Script that every rank runs.",
)
@click.option("--module", help="Module that every rank runs in place of a script, as by python -m.")
@click.option(
    "--executor", default=sys.executable, help="Program that runs it; by default this Python."
)
@click.option(
    "--parallelism",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Number of ranks.",
)
@click.option(
    "--hostfile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="PBS_NODEFILE",
    show_envvar=True,
    help="Hosts to run on, one a line: `host`, `host slots=N` or `host:N`.",
)
@click.option(
    "--ppn", type=click.IntRange(min=1), help="Ranks on each host, in place of its slots."
)
@click.option(
    "--depth",
    type=click.IntRange(min=1),
    help="Cores of each rank. By default ranks are not bound, and a batch job asks for one each.",
)
@click.option(
    "--launcher",
    default="auto",
    show_default=True,
    type=click.Choice(_CHOICES),
    help="auto: the mpiexec that is on the PATH; none of them for one rank, torchrun where there is no mpiexec.",
)
@click.option(
    "--launcher-option",
    "options",
    multiple=True,
    help="Given to the launcher as it is; repeatable.",
)
@click.option(
    "--env",
    "names",
    multiple=True,
    help="Variable that ranks on other hosts are to have; repeatable.",
)
@click.option("--pbs", "system", flag_value="pbs", help="Submit a PBS job that does this (qsub).")
@click.option(
    "--slurm", "system", flag_value="slurm", help="Submit a Slurm job that does this (sbatch)."
)
@click.option(
    "--walltime",
    default="1:00:00",
    show_default=True,
    callback=walltime,
    help="Of the batch job, H:MM:SS.",
)
@click.option(
    "--directive",
    "directives",
    multiple=True,
    help="Further line of the batch job, such as '-A PROJECT' or '-l filesystems=home'; repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Print what would run, and run nothing.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def submit(
    ctx: click.Context, /, system: BatchSystem | None, dry_run: bool, **options: Any
) -> None:
    """Run a script on many ranks, by mpiexec, srun or torchrun. ARGUMENTS, after --, are the script's.

    The exit code is the job's, 128 + n if signal n ended it. Signals are forwarded, and no process of the job outlives
    this command. With --pbs or --slurm the same is done in a batch job, on as many hosts as the ranks need, --ppn on
    each (by default all on one).

    \b
    Examples:
        fastload submit --script train.py --parallelism 4 -- --epochs 3
        fastload submit --script train.py --parallelism 8 --hostfile hosts --dry-run
        fastload submit --script train.py --parallelism 8 --ppn 4 --pbs --directive '-A PROJECT'
    """
    from fastload.distributed.execute import execute

    if (options["script"] is None) == (options["module"] is None):
        raise click.UsageError("give one of --script and --module")
    if missing := [name for name in options["names"] if name not in os.environ]:
        raise click.UsageError(f"--env {missing[0]}: the variable is not set here")
    exported = tuple(n for n in dict.fromkeys((*_EXPORTED, *options["names"])) if n in os.environ)
    if system is None:
        command, launcher = _command(exported, **options)
        if dry_run:
            click.echo(shlex.join(command))
        else:
            ctx.exit(execute(command, to_ranks=launcher == "openmpi"))
        return
    if ctx.get_parameter_source("hostfile") is ParameterSource.COMMANDLINE:
        raise click.UsageError(f"--hostfile does not go with --{system}, which chooses the hosts")
    command, text = _job(system, exported, **options)
    if dry_run:
        click.echo(f"# {shlex.join(command)} <<'END'\n{text}END")
        return
    if shutil.which(command[0]) is None:
        raise click.ClickException(f"{command[0]} is not on the PATH: submit on a login node")
    ctx.exit(subprocess.run(command, input=text, text=True, check=False).returncode)


def _command(exported: tuple[str, ...], **options: Any) -> tuple[list[str], Launcher]:
    """The argument list that starts the ranks from here, and the launcher in it."""
    from fastload.distributed import launch
    from fastload.distributed.execute import are_here, find_launcher, signal_options

    hostfile, ppn, ranks = options["hostfile"], options["ppn"], options["parallelism"]
    hosts: tuple[launch.Host, ...] = ()
    if hostfile is not None:
        listed = launch.parse_hosts(hostfile.read_text(errors="replace"), path=str(hostfile))
        hosts = launch.place(listed, ranks, path=str(hostfile), ppn=ppn)
    elif ppn is not None:
        raise click.UsageError("--ppn goes with --hostfile, --pbs or --slurm")
    launcher = options["launcher"]
    if launcher == "auto":
        launcher = find_launcher(ranks, hosts)
    if launcher in ("torchrun", "none") and are_here(hosts):
        hosts = ()
    job = launch.Job(
        program=_program(**options),
        ranks=ranks,
        hosts=hosts,
        depth=options["depth"],
        export=exported,
        options=(*(signal_options() if launcher == "torchrun" else ()), *options["options"]),
    )
    root = os.geteuid() == 0
    return launch.command_line(job, launcher, python=sys.executable, root=root), launcher


def _job(system: BatchSystem, exported: tuple[str, ...], **options: Any) -> tuple[list[str], str]:
    """The command that takes a batch job on its standard input, and the job: this command, without --pbs or --slurm."""
    from fastload.distributed import launch

    ranks, depth = options["parallelism"], options["depth"]
    ppn = min(options["ppn"] or ranks, ranks)
    launcher = (
        "srun" if system == "slurm" and options["launcher"] == "auto" else options["launcher"]
    )
    command = [sys.executable, "-m", "fastload", "submit", "--parallelism", str(ranks)]
    command += ["--launcher", launcher, "--executor", options["executor"]]
    command += ["--ppn", str(ppn)] if system == "pbs" else []
    command += ["--depth", str(depth)] if depth else []
    for flag, values in (("--launcher-option", options["options"]), ("--env", options["names"])):
        command += [f"{flag}={value}" for value in values]
    script, module = options["script"], options["module"]
    command += [f"--script={script}" if script is not None else f"--module={module}"]
    text = launch.job_script(
        system,
        [*command, "--", *options["arguments"]],
        name=Path(script or module).stem,
        ranks=ranks,
        ppn=ppn,
        depth=depth,
        walltime=options["walltime"],
        directives=options["directives"],
        environ={name: os.environ[name] for name in exported},
    )
    return [launch.SUBMITTERS[system]], text


def _program(**options: Any) -> tuple[str, ...]:
    """The argument list of one rank."""
    script, module = options["script"], options["module"]
    what = [script] if script is not None else ["-m", module]
    return (options["executor"], *what, *options["arguments"])
