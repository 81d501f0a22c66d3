"""`fastload flow`: run a few commands as a graph of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastload.cli import options as opt
from fastload.cli._common import sigterm_raises

if TYPE_CHECKING:
    from fastload.distributed.launch import BatchSystem

_file = click.argument(
    "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PIPE.toml"
)


@click.group()
def flow() -> None:
    """Run a few commands in order: download, prepare, train, predict.

    A TOML file describes the tasks, with one table per task:

    \b
        [[task]]
        name = "prepare"
        script = "prepare.py"
        outputs = ["mnist.set"]

    \b
        [[task]]
        name = "train"
        kind = "pytorch"
        script = "train.py"
        parallelism = 4

    A task runs after the one above it. `after = ["NAME", ...]` names other tasks to wait for, and `after = []` makes
    the task independent.

    \b
    kind            python, mpi, pytorch, function or command
    all kinds       args, command, exec_path, inputs, outputs, env
    mpi, pytorch    parallelism, hostfile, launcher, launcher_options
    function        function = "module:name", kwargs
    batch jobs      walltime, ppn, cores, directives
    """


@flow.command()
@_file
@opt.flag("--resume", help="Skip tasks whose last run is still valid.")
@opt.flag("--dry-run", help="Print what would run, and why. Run nothing.")
@opt.count("--max-parallel", help="Maximum number of tasks at the same time.  [default: no limit]")
@opt.option(
    "--task only",
    multiple=True,
    help="Name of the only task to run. Repeatable.  [default: all tasks]",
)
def run(file: Path, **options: Any) -> None:
    """Run the tasks of PIPE.toml, each after the tasks that it waits for.

    If a task fails, the tasks that wait for it do not run, and the exit code is 1. The log of a task is in the folder
    `.fastload-flow/NAME/` next to the file. It is also printed once the task has ended. Ctrl-C and SIGTERM end all
    processes of all tasks.

    With --resume, a task is skipped if its last run succeeded and nothing has changed since. It runs if its script,
    arguments, inputs or outputs have changed, or if a task that it waits for runs.

    \b
    Examples:
        fastload flow run mnist.toml
        fastload flow run mnist.toml --resume --dry-run
        fastload flow run mnist.toml --task train
    """
    from fastload.flow.pipefile import read_pipeline
    from fastload.flow.runner import run as run_graph

    graph = read_pipeline(file)
    with sigterm_raises():
        run_graph(graph, **options)


@flow.command()
@_file
def show(file: Path) -> None:
    """Show the tasks of PIPE.toml in order, with the result of their last runs.

    \b
    Example:
        fastload flow show mnist.toml
    """
    from fastload.flow.pipefile import read_pipeline
    from fastload.flow.show import as_text

    click.echo(as_text(read_pipeline(file)))


@flow.command()
@_file
@opt.option("--pbs system", flag_value="pbs", help="Submit with qsub.")
@opt.option("--slurm system", flag_value="slurm", help="Submit with sbatch.")
@opt.flag("--resume", help="Skip tasks whose last run is still valid.")
@opt.flag("--dry-run", help="Print the jobs. Submit nothing.")
def submit(file: Path, system: BatchSystem | None, **options: bool) -> None:
    """Submit each task of PIPE.toml as a batch job.

    A job starts when the jobs that it waits for have succeeded. The batch system starts them, so no fastload
    process keeps running. Each task requests its own resources:

    \b
    parallelism    number of ranks
    ppn            ranks per host
    cores          cores per rank
    walltime       time limit, H:MM:SS
    directives     extra lines for the header of the batch job, such as ["-A PROJECT"]

    The files and this Python must have the same paths on all nodes.

    \b
    Examples:
        fastload flow submit mnist.toml --pbs
        fastload flow submit mnist.toml --slurm --resume --dry-run
        fastload flow status mnist.toml
    """
    from fastload.flow.pipefile import read_pipeline
    from fastload.flow.submit import submit as submit_graph

    if system is None:
        raise click.UsageError("no batch system is given: add --pbs or --slurm")
    submit_graph(read_pipeline(file), file, system, say=click.echo, **options)


@flow.command()
@_file
def status(file: Path) -> None:
    """Show the state of the jobs of `fastload flow submit`.

    The state comes from the batch system and from the record of each task's last run.

    \b
    Example:
        fastload flow status mnist.toml
    """
    from fastload.flow.pipefile import read_pipeline
    from fastload.flow.submit import status as status_of

    click.echo(status_of(read_pipeline(file)))
