"""A graph as batch jobs, one per task. The scheduler starts each job after those that it waits for have succeeded.

No process of fastload keeps running. Each job runs `fastload flow run FILE --task NAME`, so that logs, records and
outputs are those of a run without a scheduler.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from fastload.distributed.launch import BatchSystem, job_script
from fastload.errors import FlowError
from fastload.flow.graph import PipelineGraph
from fastload.flow.record import FOLDER, folder_of
from fastload.flow.runner import run
from fastload.flow.tasks import EXPORTED, MPITask, Task

_JOBS = "jobs"  # not the name of a file of a task, because those have suffixes
_CANCEL = {"pbs": "qdel", "slurm": "scancel"}


def submit(
    graph: PipelineGraph,
    file: Path,
    system: BatchSystem,
    *,
    resume: bool = False,
    dry_run: bool = False,
    say: Callable[[str], object] = print,
) -> dict[str, str]:
    """Submit the tasks of the graph in `file`, and return the job id of each.

    Args:
        resume: skip tasks whose last run is still valid, as `run` does.
        dry_run: only print what would be submitted, with the names of tasks as ids.
        say: called with a line, or a script, for each task.

    Raise FlowError if a job is refused, after cancelling the jobs submitted before it.
    """
    states = run(graph, resume=resume, dry_run=True, say=lambda line: None).states
    if not dry_run:
        os.makedirs(folder_of(graph) / _JOBS, exist_ok=True)
    jobs: dict[str, str] = {}
    for name in graph.order():
        if states[name] == "fresh":
            say(f"{name}: fresh")
            continue
        before = [jobs[one] for one in graph.after(name) if one in jobs]
        command, script = _job(graph, graph.tasks[name], file, system, before)
        if dry_run:
            jobs[name] = f"ID-OF-{name}"
            say(f"# {shlex.join(command)} <<'END'\n{script}END")
            continue
        try:
            jobs[name] = _submitted(name, command, script, graph.base)
        except FlowError:
            if jobs:
                subprocess.run([_CANCEL[system], *jobs.values()], check=False)
            raise
        say(f"{name}: job {jobs[name]}" + (f", after {', '.join(before)}" if before else ""))
    return jobs


def _job(
    graph: PipelineGraph, task: Task, file: Path, system: BatchSystem, before: list[str]
) -> tuple[list[str], str]:
    """Return the command that submits a task, to start after the jobs `before`, and the script that it reads."""
    ranks = task.parallelism if isinstance(task, MPITask) else 1
    # A path from the graph's folder has no spaces, which the schedulers quote in different ways.
    log = os.path.join(FOLDER, graph.name, _JOBS, f"{task.name}.log")
    if system == "pbs":
        command = ["qsub", *(["-W", f"depend=afterok:{':'.join(before)}"] if before else [])]
        directives = [f"-o {log}", "-j oe"]
    else:
        # Otherwise a job whose dependency failed would wait forever.
        command = ["sbatch", "--parsable", "--kill-on-invalid-dep=yes"]
        command += [f"--dependency=afterok:{':'.join(before)}"] if before else []
        directives = [f"--output={log}"]
    run_it = ["flow", "run", str(file.absolute()), "--task", task.name]
    script = job_script(
        system,
        [sys.executable, "-m", "fastload", *run_it],
        name=task.name,
        ranks=ranks,
        ppn=min(task.resources.ppn or ranks, ranks),
        depth=task.resources.cores,
        walltime=task.resources.walltime,
        directives=(*directives, *task.resources.directives),
        environ={name: os.environ[name] for name in EXPORTED if name in os.environ},
    )
    return command, script


def _submitted(task: str, command: list[str], script: str, base: Path) -> str:
    """Submit a job, and return its id."""
    if shutil.which(command[0]) is None:
        raise FlowError(f"{command[0]} is not on PATH. Run this command on a login node")
    ended = subprocess.run(
        command, input=script, cwd=base, text=True, capture_output=True, check=False
    )
    found = ended.stdout.split()
    if ended.returncode or not found:
        said = ended.stderr.strip() or ended.stdout.strip()
        raise FlowError(f"task {task}: {command[0]} refused the job: {said}")
    return found[-1].partition(";")[0]
