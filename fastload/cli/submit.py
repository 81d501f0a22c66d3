"""`fastload submit`: run a script on many ranks, on this host, on listed hosts, or as a batch job."""

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

from fastload.cli import options as opt
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
@click.option(
    "--module", help="Module that every rank runs instead of a script, as python -m does."
)
@click.option(
    "--executor",
    default=sys.executable,
    show_default=False,
    help="Program that runs the script.  [default: this Python]",
)
@opt.count("--parallelism", default=1, help="Number of ranks.")
@opt.file(
    "--hostfile",
    exists=True,
    envvar="PBS_NODEFILE",
    show_envvar=True,
    help="File with one host per line: `host`, `host slots=N` or `host:N`.",
)
@opt.count(
    "--ppn",
    help="Ranks per host.  [default: slots of the host; all ranks on one host in a batch job]",
)
@opt.count(
    "--depth",
    help="Cores per rank. Without this option, ranks are not bound to cores, and a batch job requests one core each.",
)
@opt.choice(
    "--launcher",
    _CHOICES,
    help="Launcher of the ranks. auto: none (run directly) for one rank; otherwise mpiexec if it is on PATH, else srun "
    "inside a Slurm job, else torchrun.",
)
@opt.option(
    "--launcher-option options",
    multiple=True,
    help="Extra option for the launcher, passed unchanged. Repeatable.",
)
@opt.option(
    "--env names",
    multiple=True,
    help="Environment variable to pass to ranks on other hosts. Repeatable.",
)
@opt.option("--pbs system", flag_value="pbs", help="Submit the run as a PBS job (qsub).")
@opt.option("--slurm system", flag_value="slurm", help="Submit the run as a Slurm job (sbatch).")
@click.option(
    "--walltime", default="1:00:00", callback=walltime, help="Time limit of the batch job, H:MM:SS."
)
@opt.option(
    "--directive directives",
    multiple=True,
    help="Extra line for the batch job's header, such as '-A PROJECT' or '-l filesystems=home'. Repeatable.",
)
@opt.flag("--dry-run", help="Print what would run. Run nothing.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def submit(
    ctx: click.Context, /, system: BatchSystem | None, dry_run: bool, **options: Any
) -> None:
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

    if (options["script"] is None) == (options["module"] is None):
        raise click.UsageError("give either --script or --module")
    if missing := [name for name in options["names"] if name not in os.environ]:
        raise click.UsageError(
            f"--env {missing[0]}: the variable is not set. Set it, or remove the option."
        )
    exported = tuple(n for n in dict.fromkeys((*_EXPORTED, *options["names"])) if n in os.environ)
    if system is None:
        command, launcher = _command(exported, **options)
        if dry_run:
            click.echo(shlex.join(command))
        else:
            ctx.exit(execute(command, to_ranks=launcher == "openmpi"))
        return
    if ctx.get_parameter_source("hostfile") is ParameterSource.COMMANDLINE:
        raise click.UsageError(
            f"--hostfile cannot be used with --{system}, because the batch system chooses the hosts. "
            "Remove --hostfile."
        )
    command, text = _job(system, exported, **options)
    if dry_run:
        click.echo(f"# {shlex.join(command)} <<'END'\n{text}END")
        return
    if shutil.which(command[0]) is None:
        raise click.ClickException(
            f"{command[0]} is not on PATH. Run this command on a login node."
        )
    ctx.exit(subprocess.run(command, input=text, text=True, check=False).returncode)


def _command(exported: tuple[str, ...], **options: Any) -> tuple[list[str], Launcher]:
    """Return the argument list that starts the ranks from here, and its launcher."""
    from fastload.distributed import launch
    from fastload.distributed.execute import are_here, find_launcher, signal_options, start_line

    hostfile, ppn, ranks = options["hostfile"], options["ppn"], options["parallelism"]
    hosts: tuple[launch.Host, ...] = ()
    if hostfile is not None:
        listed = launch.parse_hosts(hostfile.read_text(errors="replace"), path=str(hostfile))
        hosts = launch.place(listed, ranks, path=str(hostfile), ppn=ppn)
    elif ppn is not None:
        raise click.UsageError(
            "--ppn needs --hostfile, --pbs or --slurm. Add one, or remove --ppn."
        )
    launcher = options["launcher"]
    if launcher == "auto":
        launcher = find_launcher(ranks, hosts)
    if launcher in ("torchrun", "none") and are_here(hosts):
        hosts = ()
    what = ["-m", options["module"]] if options["script"] is None else [options["script"]]
    job = launch.Job(
        program=(options["executor"], *what, *options["arguments"]),
        ranks=ranks,
        hosts=hosts,
        depth=options["depth"],
        export=exported,
        options=(*(signal_options() if launcher == "torchrun" else ()), *options["options"]),
    )
    return start_line(job, launcher), launcher


def _job(system: BatchSystem, exported: tuple[str, ...], **options: Any) -> tuple[list[str], str]:
    """Return the command that reads a batch job from standard input, and the job. The job runs this command again."""
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
