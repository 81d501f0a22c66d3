"""`fastload flow`: a few commands as a graph."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastload.cli._common import sigterm_raises

if TYPE_CHECKING:
    from fastload.distributed.launch import BatchSystem

_file = click.argument(
    "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PIPE.toml"
)


@click.group()
def flow() -> None:
    """Run a few commands in their order: download, prepare, train, predict.

    A TOML file describes them, a table for each task:

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

    A task follows the one above it, unless `after = ["NAME", ...]` says which; `after = []` makes it independent.
    Kinds: python, mpi, pytorch, function, command. Further keys: args, command, exec_path, inputs, outputs, env,
    retries, time_limit_s; parallelism, hostfile, launcher, launcher_options of ranks; function = "module:name" and
    kwargs of functions; walltime, ppn, cores, directives of batch jobs.
    """


@click.command()
@_file
@click.option("--resume", is_flag=True, help="Leave out tasks whose last run still holds.")
@click.option("--dry-run", is_flag=True, help="Say what would run, and why; run nothing.")
@click.option(
    "--max-parallel",
    type=click.IntRange(min=1),
    help="Most tasks at once.  [default: all that can]",
)
@click.option("--task", "only", multiple=True, help="Run this task alone; repeatable.")
@click.option("--quiet", is_flag=True, help="Do not print the tasks' output; their logs have it.")
def run(
    file: Path,
    resume: bool,
    dry_run: bool,
    max_parallel: int | None,
    only: tuple[str, ...],
    quiet: bool,
) -> None:
    """Run the tasks of PIPE.toml, each after those that it waits for.

    If a task fails, those that wait for it do not run, and the exit status is 1. Each has a log in
    `.fastload-flow/NAME/` beside the file. Ctrl-C and SIGTERM end all processes of all tasks.

    With --resume a task runs again only if it failed or never ended, if its script, arguments, inputs or outputs have
    changed, or if a task before it runs.

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
        run_graph(
            graph,
            resume=resume,
            dry_run=dry_run,
            max_parallel=max_parallel,
            echo=not quiet,
            only=only,
        )


@click.command()
@_file
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the graph here, with the states and times of its tasks.",
)
def show(file: Path, svg: Path | None) -> None:
    """Show the tasks of PIPE.toml in order, and what became of them.

    \b
    Examples:
        fastload flow show mnist.toml
        fastload flow show mnist.toml --svg mnist.svg
    """
    from fastload.flow.pipefile import read_pipeline
    from fastload.flow.show import as_text

    graph = read_pipeline(file)
    click.echo(as_text(graph))
    if svg is not None:
        graph.to_svg(svg)
        click.echo(f"Picture: {svg}")


@click.command()
@_file
@click.option("--pbs", "system", flag_value="pbs", help="Submit with qsub.")
@click.option("--slurm", "system", flag_value="slurm", help="Submit with sbatch.")
@click.option("--resume", is_flag=True, help="Leave out tasks whose last run still holds.")
@click.option("--dry-run", is_flag=True, help="Print the jobs, and submit nothing.")
def submit(file: Path, system: BatchSystem | None, resume: bool, dry_run: bool) -> None:
    """Make each task of PIPE.toml a batch job, which starts once the jobs that it waits for have succeeded.

    No process of fastload waits for that. Each task asks for its own resources: parallelism ranks, ppn on each host,
    cores of each rank, walltime, and further directives, such as directives = ["-A PROJECT"]. The files and this Python
    must be at the same place on all nodes.

    \b
    Examples:
        fastload flow submit mnist.toml --pbs
        fastload flow submit mnist.toml --slurm --resume --dry-run
        fastload flow status mnist.toml
    """
    from fastload.flow.pipefile import read_pipeline
    from fastload.flow.submit import submit as submit_graph

    if system is None:
        raise click.UsageError("say which batch system: --pbs or --slurm")
    submit_graph(read_pipeline(file), file, system, resume=resume, dry_run=dry_run, say=click.echo)


@click.command()
@_file
def status(file: Path) -> None:
    """Say what became of the jobs of `fastload flow submit`: what the scheduler knows, and each task's last run.

    \b
    Example:
        fastload flow status mnist.toml
    """
    from fastload.flow.pipefile import read_pipeline
    from fastload.flow.submit import status as status_of

    click.echo(status_of(read_pipeline(file)))


for command in (run, show, submit, status):
    flow.add_command(command)
