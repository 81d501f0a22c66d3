"""Promises:
- A graph runs its tasks on any executor, with the same order, failures and resume: threads, processes, Dask, mpi4py.
- A run that is interrupted drops what another executor has not begun, and waits for the rest.
"""

from __future__ import annotations

import os
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

import pytest

from fastload.errors import FlowError
from fastload.flow import PipelineGraph, Task, run, runner
from fastload.flow.record import folder_of, read
from tests.children import run_python
from tests.distributed.launching import command
from tests.distributed.launching import run as run_ranks

PROGRAM = str(Path(__file__).parent / "programs" / "on_executor.py")


def shell(name: str, text: str, **options: Any) -> Task:
    return Task(name, command=["sh", "-c", text], **options)


def shows_order_failures_and_resume(executor: Executor, folder: Path) -> None:
    """Run a graph whose branch fails, repair it, and resume."""
    graph = PipelineGraph("g", folder=folder)
    graph.add_task(
        shell("word", "echo one > word; echo made; echo word >> notes", outputs=["word"])
    )
    graph.add_task(shell("read", "cat word; echo $WORD; echo read >> notes", env={"WORD": "yes"}))
    graph.add_task(shell("bad", "echo bad >> notes; test -e right"), ["word"])
    graph.add_task(Task("after", command="true"), ["bad"])
    graph.add_task(Task("unknown", command="no-such-program"), [])
    said: list[str] = []
    try:
        run(graph, executor=executor, say=said.append)
    except FlowError as error:
        message = str(error)
    assert "task bad failed: exit code 1; also failed: unknown; not run: after" in message, message
    states = {line.split(",")[0].split(" (")[0] for line in said}
    assert {"bad: failed", "after: blocked", "unknown: failed"} <= states
    notes = (folder / "notes").read_text().split()
    assert (notes[0], sorted(notes)) == ("word", ["bad", "read", "word"])
    logs = folder / ".fastload-flow" / "g"
    assert (logs / "read.log").read_text() == "one\nyes\n"
    (folder / "right").touch()
    only = ["word", "read", "bad", "after"]
    outcome = run(graph, executor=executor, resume=True, only=only, say=said.append)
    assert list(outcome.states.values()) == ["fresh", "fresh", "done", "done"]
    assert outcome.reasons["bad"] == "its last run failed"


def test_threads(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(2) as executor:
        shows_order_failures_and_resume(executor, tmp_path)
    assert "one\nyes\n" in capfd.readouterr().out


def test_processes(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, get_context("spawn")) as executor:
        shows_order_failures_and_resume(executor, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dask", "mpich"])
def test_executors_of_other_machines(kind: str, tmp_path: Path) -> None:
    if kind == "dask":
        pytest.importorskip("distributed")
        ended = run_python(PROGRAM, kind, tmp_path)
        assert ended.returncode == 0, ended.stderr
    else:
        line = command(kind, 2, "-m", "mpi4py.futures", PROGRAM, kind, str(tmp_path))
        job = run_ranks(line, tmp_path)
        assert job.code == 0, job.text
    assert (tmp_path / "right").exists()


def test_a_worker_that_dies_fails_its_task(tmp_path: Path) -> None:
    graph = PipelineGraph("g", folder=tmp_path)
    graph.add_task(shell("a", "kill -9 $(cut -d' ' -f4 /proc/$PPID/stat); sleep 1000"))
    graph.add_task(Task("b", command="true"))
    with (
        ProcessPoolExecutor(1, get_context("spawn")) as executor,
        pytest.raises(FlowError, match="task a failed: A process in .*not run: b"),
    ):
        run(graph, executor=executor)


def test_an_interrupted_run_drops_what_has_not_begun_and_waits_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = PipelineGraph("g", folder=tmp_path)
    os.mkfifo(tmp_path / "fifo")
    for name in "ab":
        graph.add_task(shell(name, f"read word < fifo; echo {name} >> notes"), [])
    wait, begun = runner.wait, list[IO[str]]()

    def interrupted(*arguments: Any) -> Any:
        if not begun:
            begun.append(
                (tmp_path / "fifo").open("w")
            )  # a has begun, and goes on when this is closed
            raise KeyboardInterrupt
        begun[0].close()
        return wait(*arguments)

    monkeypatch.setattr(runner, "wait", interrupted)
    monkeypatch.setattr(runner, "GRACE_S", 0.0)
    with ThreadPoolExecutor(1) as executor, pytest.raises(KeyboardInterrupt):
        run(graph, executor=executor)
    assert (tmp_path / "notes").read_text() == "a\n"
    assert [read(folder_of(graph), name).state for name in "ab"] == ["stopped", "stopped"]
