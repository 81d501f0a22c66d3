"""`fastload flow`: run a few commands as a graph of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import click

from fastload._kit.options import Count, ExistingFile, Option, options
from fastload.cli._command import Command
from fastload.cli._common import Batch, sigterm_raises


@options
class Pipe:
    """A graph."""

    file: Annotated[ExistingFile, Option("PIPE.toml")]


@options
class Resumed:
    """What a run leaves out."""

    resume: bool = False
    """Skip tasks whose last run is still valid."""


@options
class RunOptions(Resumed):
    """Which tasks run."""

    dry_run: bool = False
    """Print what would run, and why. Run nothing."""
    max_parallel: Count | None = None
    """Maximum number of tasks at the same time. [default: no limit]"""
    only: Annotated[Sequence[str], Option("--task")] = ()
    """Name of the only task to run. Repeatable. [default: all tasks]"""


@Command
def run(pipe: Pipe, choice: RunOptions) -> None:
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

    graph = read_pipeline(pipe.file)
    with sigterm_raises():
        run_graph(graph, **asdict(choice))


@Command
def show(pipe: Pipe) -> None:
    """Show the tasks of PIPE.toml in order, with the result of their last runs.

    \b
    Example:
        fastload flow show mnist.toml
    """
    from fastload.flow.pipefile import read_pipeline
    from fastload.flow.show import as_text

    click.echo(as_text(read_pipeline(pipe.file)))


@Command
def submit(pipe: Pipe, batch: Batch, resumed: Resumed) -> None:
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
    """
    from fastload.flow.pipefile import read_pipeline
    from fastload.flow.submit import submit as submit_graph

    if batch.system is None:
        raise click.UsageError("no batch system is given: add --pbs or --slurm")
    how = {"resume": resumed.resume, "dry_run": batch.dry_run}
    submit_graph(read_pipeline(pipe.file), pipe.file, batch.system, say=click.echo, **how)


@click.group(commands=[run, show, submit])
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
    kind            python, mpi, pytorch or command
    all kinds       args, command, exec_path, inputs, outputs, env
    mpi, pytorch    parallelism, hostfile, launcher, launcher_options
    batch jobs      walltime, ppn, cores, directives
    """
