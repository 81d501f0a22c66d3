"""A graph as batch jobs, one per task. The scheduler starts each job after those that it waits for have succeeded.

No process of fastload keeps running. Each job runs `fastload flow run FILE --task NAME`, so that logs, records and
outputs are those of a run without a scheduler. The job ids are in `.fastload-flow/GRAPH/jobs/ids.json`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastload._kit.disk import write_file
from fastload.distributed.launch import BatchSystem, job_script
from fastload.errors import FlowError
from fastload.flow.graph import PipelineGraph
from fastload.flow.record import FOLDER, folder_of, read, state_of
from fastload.flow.runner import run
from fastload.flow.tasks import EXPORTED, MPITask, Task

_JOBS = "jobs"  # not the name of a file of a task, because those have suffixes
_IDS = f"{_JOBS}/ids.json"
_CANCEL = {"pbs": "qdel", "slurm": "scancel"}
_PBS = {"Q": "queued", "H": "held", "W": "waiting", "R": "running", "E": "ending", "F": "ended"}


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
    states = run(
        graph,
        resume=resume,
        dry_run=True,
        say=lambda line: None,
        check=False,  # compute nodes may have a launcher that this node lacks
    ).states
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
    if not dry_run:
        kept = json.dumps({"system": system, "jobs": jobs}, indent=1).encode()
        write_file(folder_of(graph) / _IDS, kept, durable=False)
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
    ended = _ended(command, input=script, cwd=base)
    found = ended.stdout.split()
    if ended.returncode or not found:
        said = ended.stderr.strip() or ended.stdout.strip()
        raise FlowError(f"task {task}: {command[0]} refused the job: {said}")
    return found[-1].partition(";")[0]


def _ended(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of the batch system to its end."""
    if shutil.which(command[0]) is None:
        raise FlowError(f"{command[0]} is not on PATH. Run this command on a login node")
    return subprocess.run(command, text=True, capture_output=True, check=False, **options)


# ---- what became of them ----


def status(graph: PipelineGraph) -> str:
    """Return a line for each task: its job, the state of the job in the batch system, and its last run.

    Raise FlowError if the graph was not submitted, or if the batch system cannot be asked.
    """
    folder = folder_of(graph)
    try:
        kept = json.loads((folder / _IDS).read_bytes())
    except FileNotFoundError:
        raise FlowError(
            f"graph {graph.name}: no jobs were submitted from {graph.base}. Run fastload flow submit first"
        ) from None
    jobs: dict[str, str] = kept["jobs"]
    ask = {"pbs": _ask_pbs, "slurm": _ask_slurm}[kept["system"]]
    known = ask(list(jobs.values())) if jobs else {}
    lines = []
    for name in graph.order():
        number = jobs.get(name)
        state = known.get(number or "", "forgotten by the batch system")
        said = f"job {number} {state}" if number else "not submitted"
        lines.append(f"{name}: {said}; last run: {state_of(folder, name, read(folder, name))}")
    return "\n".join(lines)


def _ask_pbs(numbers: list[str]) -> dict[str, str]:
    """Return the state of each job that PBS knows, with its exit code if it ended.

    Not as JSON: qstat of OpenPBS 23.06 then prints the first job only.
    """
    text = _said(["qstat", "-x", "-f", "-F", "dsv", *numbers], unknown="Unknown Job Id")
    states = {}
    for line in text.splitlines():
        first, *fields = re.split(r"(?<!\\)\|", line)  # a | in a value is written as \|
        about = _pairs(fields)
        state = _PBS.get(about["job_state"], about["job_state"])
        code = about.get("Exit_status")
        number = first.removeprefix("Job Id: ")
        states[number] = state if code is None else f"{state}, exit code {code}"
    return states


def _ask_slurm(numbers: list[str]) -> dict[str, str]:
    """Return the state of each job that Slurm knows, with its exit code if it ended."""
    try:
        ask = ["sacct", "-X", "-n", "-P", "-o", "JobID,State,ExitCode", "-j"]
        rows = [line.split("|") for line in _said([*ask, ",".join(numbers)]).splitlines()]
    except FlowError:  # There is no accounting database. The controller forgets jobs after minutes.
        rows = []
        for number in numbers:
            text = _said(["scontrol", "-o", "show", "job", number], unknown="Invalid job id")
            about = _pairs(text.split())
            rows += [[number, about["JobState"], about["ExitCode"]]] if about else []
    running = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED")
    return {
        number: state.lower() + (f", exit code {code}" if state not in running else "")
        for number, state, code in rows
    }


def _pairs(words: list[str]) -> dict[str, str]:
    """Return the values of words such as NAME=VALUE, by name."""
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _said(command: list[str], *, unknown: str = "") -> str:
    """Return the output of a command. It may fail with the message `unknown`, for jobs that it does not know."""
    ended = _ended(command)
    if ended.returncode and not (unknown and unknown in ended.stderr):
        raise FlowError(f"{command[0]} failed: {(ended.stderr or ended.stdout).strip()}")
    return ended.stdout
