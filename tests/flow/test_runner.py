"""Promises:
- Exit codes count: a task that waits for a failed task does not run, and other branches continue. The log and its end
  are named.
- Declared outputs are checked, and commands are argument lists without a shell.
- `--resume` runs the tasks that failed or never ended, and those with a changed script, arguments, inputs or outputs.
- `--resume` also runs what follows such a task, even if that ran in a run that was cut short. Other tasks are not
  run.
- SIGINT, SIGTERM, a full disk and even SIGKILL of the runner leave no process of any task. A signal that comes twice
  leaves tasks the time to end by themselves.
- The output of a task is printed whole, byte for byte, once the task has ended.
- The record of a task is that of the process that holds its lock.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fastload._kit.guard import Request, start_guarded
from fastload.cli import main
from fastload.errors import FlowError
from fastload.flow import MPITask, PipelineGraph, PythonTask, Task, run, runner
from fastload.flow.pipefile import read_pipeline
from fastload.flow.record import Record, folder_of, read, state_of, write
from fastload.flow.show import as_text
from tests.children import Python, run_python
from tests.distributed.launching import ROOT, is_over

WAIT_S = 30.0


def notes(folder: Path) -> list[str]:
    path = folder / "notes"
    return path.read_text().split() if path.exists() else []


def shell(name: str, text: str, **options: object) -> Task:
    return Task(name, command=["sh", "-c", text], **options)  # type: ignore[arg-type]


def graph_in(folder: Path, *tasks: Task, after: list[str] | None = None) -> PipelineGraph:
    graph = PipelineGraph("g", folder=folder)
    for task in tasks:
        graph.add_task(task, after)
    return graph


# ---- order, exit codes, logs ----


def test_tasks_run_in_order_and_their_output_is_in_their_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = graph_in(
        tmp_path,
        shell("a", "echo a >> notes; echo out; echo err >&2"),
        shell("b", "echo b >> notes"),
    )
    outcome = run(graph)
    assert notes(tmp_path) == ["a", "b"]
    assert outcome.states == {"a": "done", "b": "done"}
    assert Path(outcome.logs["a"]) == tmp_path / ".fastload-flow" / "g" / "a.log"
    assert Path(outcome.logs["a"]).read_text() == "out\nerr\n"
    shown = capsys.readouterr()
    assert shown.out == "out\nerr\n"
    assert [line.split(",")[0] for line in shown.err.splitlines()] == [
        "a: running (0 of 2)",
        "a: done",
        "b: running (1 of 2)",
        "b: done",
    ]


def test_after_a_failure_nothing_that_waits_runs_and_other_branches_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = PipelineGraph("g", folder=tmp_path)
    graph.add_task(shell("get", "echo no such host; exit 3"), [])
    graph.add_task(shell("prepare", "echo prepare >> notes"), ["get"])
    graph.add_task(shell("train", "echo train >> notes"), ["prepare"])
    graph.add_task(shell("other", "echo other >> notes"), [])
    graph.add_task(shell("last", "echo last >> notes"), ["other"])
    with pytest.raises(FlowError) as caught:
        run(graph)
    assert notes(tmp_path) == ["other", "last"]
    log = tmp_path / ".fastload-flow" / "g" / "get.log"
    reason = "task get failed: exit code 3; not run: prepare, train"
    assert str(caught.value) == f"graph g: {reason}. Its log: {log}"
    assert capsys.readouterr().out == "no such host\n"


def test_independent_tasks_run_at_once_up_to_a_bound(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    meet = [shell("a", "echo hello > fifo"), shell("b", "cat fifo")]
    outcome = run(graph_in(tmp_path, *meet, after=[]))  # alone, each would wait for ever
    assert Path(outcome.logs["b"]).read_text() == "hello\n"
    one_by_one = [shell(name, "echo x >> n; test $(wc -l < n) = 1; rm n") for name in "abc"]
    run(graph_in(tmp_path, *one_by_one, after=[]), max_parallel=1)


def test_a_folder_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FlowError, match="the folder .*typo does not exist"):
        run(graph_in(tmp_path / "typo", shell("a", "true")))
    assert not (tmp_path / "typo").exists()


def test_no_shell_and_paths_with_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "a folder; touch oh"
    folder.mkdir()
    (folder / "a script.py").write_text("import sys, os; print(sys.argv[1:], os.getcwd())")
    task = PythonTask("a", script="a script.py", args=["$HOME", "a  b", "; touch no"])
    outcome = run(graph_in(folder, task))
    assert Path(outcome.logs["a"]).read_text() == f"['$HOME', 'a  b', '; touch no'] {folder}\n"
    assert not list(tmp_path.rglob("no"))


def test_an_execution_path_and_variables(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.py").write_text("import os; print(os.getcwd(), os.environ['WORD'])")
    task = PythonTask("a", script="a.py", exec_path="inner", env={"WORD": "yes"})
    outcome = run(graph_in(tmp_path, task))
    assert Path(outcome.logs["a"]).read_text() == f"{tmp_path / 'inner'} yes\n"


def test_a_task_that_does_not_make_its_output_has_failed(tmp_path: Path) -> None:
    with pytest.raises(FlowError, match="exit code 0, but its output out is not there"):
        run(graph_in(tmp_path, shell("a", "true", outputs=["out"])))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (PythonTask("a"), "it has no script"),
        (Task("a"), "it has no command"),
        (PythonTask("a", script="misspelt.py"), "exit code 2"),
        (MPITask("a", script="b.py", hostfile="nowhere"), "No such file or directory"),
        (Task("a", command="no-such-program x"), "cannot run no-such-program"),
        (Task("a", command="./no-such-program"), "cannot run ./no-such-program"),
        (Task("a", command="true", exec_path="nowhere"), "nowhere"),
        (shell("a", "kill -9 $$"), "signal SIGKILL ended it"),
    ],
)
def test_what_cannot_run_has_failed(task: Task, message: str, tmp_path: Path) -> None:
    with pytest.raises(FlowError, match=f"graph g: task a failed.*{message}.*not run: b"):
        run(graph_in(tmp_path, task, shell("b", "true")))


# ---- what is fresh ----


def test_a_resumed_run_leaves_out_what_still_holds(tmp_path: Path) -> None:
    for name in ("prepare", "train"):
        (tmp_path / f"{name}.py").write_text(
            f"open('notes', 'a').write('{name}\\n'); open('{name}.out', 'w').write('{name}')"
        )
    (tmp_path / "raw").write_text("1")

    def graph(*args: object) -> PipelineGraph:
        prepare = PythonTask(
            "prepare", script="prepare.py", inputs=["raw"], outputs=["prepare.out"]
        )
        train = PythonTask(
            "train", script="train.py", args=args, inputs=["prepare.out"], outputs=["train.out"]
        )
        return graph_in(tmp_path, prepare, train)

    def ran(which: PipelineGraph, **options: object) -> tuple[list[str], dict[str, str]]:
        (tmp_path / "notes").unlink(missing_ok=True)
        outcome = run(which, resume=True, **options)
        return notes(tmp_path), outcome.reasons

    assert ran(graph()) == (
        ["prepare", "train"],
        dict.fromkeys(("prepare", "train"), "it never ran") | {"train": "prepare ran"},
    )
    assert ran(graph()) == ([], {})
    assert ran(graph("--lr", 2)) == (["train"], {"train": "its arguments changed"})
    (tmp_path / "train.out").unlink()
    assert ran(graph("--lr", 2)) == (["train"], {"train": "train.out is not there"})
    script = tmp_path / "prepare.py"
    script.write_text(script.read_text() + "\n")
    assert ran(graph("--lr", 2), dry_run=True) == (
        [],
        {"prepare": "prepare.py changed", "train": "prepare would run"},
    )
    assert ran(graph("--lr", 2)) == (
        ["prepare", "train"],
        {"prepare": "prepare.py changed", "train": "prepare ran"},
    )
    (tmp_path / "raw").write_text("12")
    assert ran(graph("--lr", 2))[1]["prepare"] == "raw changed"
    (tmp_path / "train.out").write_text("by hand")
    assert ran(graph("--lr", 2)) == (["train"], {"train": "train.out changed"})
    os.utime(script)  # the same content
    assert ran(graph("--lr", 2)) == ([], {})
    assert len(run(graph("--lr", 2)).seconds) == 2, "without resume all run"


def test_after_a_failure_a_resumed_run_begins_with_what_failed(tmp_path: Path) -> None:
    graph = graph_in(
        tmp_path, shell("a", "echo a >> notes"), shell("b", "echo b >> notes; test -e right")
    )
    with pytest.raises(FlowError):
        run(graph)
    (tmp_path / "right").touch()
    assert run(graph, resume=True).reasons == {"b": "its last run failed"}
    assert notes(tmp_path) == ["a", "b", "b"]


def test_a_task_is_stale_if_one_before_it_ran_in_a_run_that_was_cut_short(tmp_path: Path) -> None:
    first, second = shell("a", "echo a >> notes"), shell("b", "echo b >> notes")
    graph = graph_in(tmp_path, first, second)
    run(graph)
    run(graph, only=["a"])  # as a run that is killed before it comes to b
    assert run(graph, resume=True).reasons == {"b": "a ran since"}
    assert run(graph, resume=True).states == {"a": "fresh", "b": "fresh"}
    assert notes(tmp_path) == ["a", "b", "a", "b"]


def test_a_folder_with_links_to_itself_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x").write_text("1")
    for number in range(40):  # entered, they are 40 ** 40 paths
        (tmp_path / "in" / f"link{number}").symlink_to(".")
    graph = graph_in(tmp_path, shell("a", "true", inputs="in"))
    run(graph)
    assert run(graph, resume=True).states == {"a": "fresh"}
    (tmp_path / "in" / "x").write_text("12")
    assert run(graph, resume=True).reasons == {"a": "in changed"}


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    long = "x" * 300
    graph = graph_in(tmp_path, shell("a", "echo a >> notes", inputs=[long]))
    run(graph)
    assert run(graph, resume=True).reasons == {"a": f"{long} cannot be read"}
    with pytest.raises(FlowError, match="exit code 0, but its output x* cannot be read"):
        run(graph_in(tmp_path, shell("a", "true", outputs=[long])))


def test_only_some_tasks(tmp_path: Path) -> None:
    graph = graph_in(tmp_path, *(shell(name, f"echo {name} >> notes") for name in "abc"))
    assert run(graph, only=["b"]).states == {"b": "done"}
    assert notes(tmp_path) == ["b"]
    said = list[str]()
    run(graph, only=["a", "c"], say=said.append)
    states = [line.partition(",")[0].partition(" (")[0] for line in said]
    assert states == ["a: running", "a: done", "c: running", "c: done"], "c waits for b, b for a"
    with pytest.raises(FlowError, match="no task 'z'. The tasks are a, b, c"):
        run(graph, only=["z"])


# ---- ends ----

FILE = """
[[task]]
name = "quick"
command = ["sh", "-c", "echo quick >> notes"]
[[task]]
name = "long"
command = ["sh", "-c", "setsid sleep 1000 & echo $! $$ > fifo; sleep 1000"]
"""


def begun(folder: Path, *options: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start `fastload flow run`; return it once the long task runs, and the pids of that."""
    (folder / "pipe.toml").write_text(FILE)
    os.mkfifo(folder / "fifo")
    process = Python(
        ["-m", "fastload", "flow", "run", folder / "pipe.toml", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = [int(word) for word in (folder / "fifo").read_text().split()]
    return process, pids


def all_over(pids: list[int]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not all(map(is_over, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return all(map(is_over, pids))


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_a_signal_leaves_no_process_and_a_resumed_run_goes_on(
    number: int, status: int, tmp_path: Path
) -> None:
    process, pids = begun(tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == status
    assert "Traceback" not in errors
    assert all_over(pids)
    (tmp_path / "fifo").unlink()
    (tmp_path / "fifo").touch()
    (tmp_path / "pipe.toml").write_text(FILE.replace("sleep 1000", "true"))
    program = ("-m", "fastload", "flow", "run", tmp_path / "pipe.toml", "--resume")
    again = run_python(*program, check=True)
    assert "quick: fresh" in again.stderr
    assert "long: running, as its last run did not end" in again.stderr
    assert notes(tmp_path) == ["quick"]


def test_a_signal_that_comes_twice_lets_a_task_end_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task signals the runner, and again once it is asked to end. It ends after the second signal was handled."""
    os.mkfifo(tmp_path / "go")
    signals_runner = f"kill -TERM {os.getpid()}"
    trap = f"trap '{signals_runner}; read word < go; echo saved >> notes; exit 0' TERM"
    script = f"{trap}; {signals_runner}; while :; do sleep 1; done"
    (tmp_path / "pipe.toml").write_text(
        f'[[task]]\nname = "a"\ncommand = {json.dumps(["sh", "-c", script])}\n'
    )
    takes, taken = Request.takes, []

    def noted(request: Request, number: int) -> bool:
        taken.append(takes(request, number))
        if len(taken) == 2:
            (tmp_path / "go").write_text("on\n")
        return taken[-1]

    monkeypatch.setattr(Request, "takes", noted)
    result = CliRunner().invoke(main, ["flow", "run", str(tmp_path / "pipe.toml")])
    assert result.exit_code == 143, result.output
    assert taken == [True, False]
    assert notes(tmp_path) == ["saved"]


def test_a_task_that_is_run_by_another_process_is_not_run_twice(tmp_path: Path) -> None:
    process, _ = begun(tmp_path)
    second = run_python("-m", "fastload", "flow", "run", tmp_path / "pipe.toml", "--task", "long")
    assert second.returncode == 1
    assert "task long failed: another process runs it" in second.stderr
    assert "done" not in second.stderr
    record = json.loads((tmp_path / ".fastload-flow" / "pipe" / "long.json").read_text())
    assert record["state"] == "running", "it is the record of the process that runs it"
    assert "long  [running, began" in as_text(read_pipeline(tmp_path / "pipe.toml"))
    process.kill()
    process.communicate(timeout=WAIT_S)
    assert "long  [interrupted, began" in as_text(read_pipeline(tmp_path / "pipe.toml"))


def test_the_record_is_written_before_the_lock_is_free(tmp_path: Path) -> None:
    graph = graph_in(tmp_path, shell("a", "echo x > out", outputs=["out"]))
    folder, seen = folder_of(graph), list[tuple[str, str]]()

    def write_then_look(where: Path, name: str, record: Record) -> None:
        write(where, name, record)
        seen.append((record.state, state_of(where, name, Record(state="running"))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "write", write_then_look)
        run(graph)
    assert seen == [("running", "running"), ("done", "running")], "the lock was held"
    assert state_of(folder, "a", Record(state="running")) == "interrupted"


STUBBORN = "trap '' TERM; echo $$ > {}; while :; do sleep 1; done"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left", "a.json")])
def test_whatever_ends_the_run_its_processes_end(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "GRACE_S", 0.1)
    for name in "ab":
        os.mkfifo(tmp_path / name)
    wait, pids = runner.wait, list[int]()

    def fails(*arguments: Any) -> Any:
        if pids:
            return wait(*arguments)
        pids.extend(int((tmp_path / name).read_text()) for name in "ab")
        raise error

    monkeypatch.setattr(runner, "wait", fails)
    graph = graph_in(tmp_path, *(shell(name, STUBBORN.format(name)) for name in "ab"), after=[])
    with pytest.raises(type(error)):
        run(graph)
    assert all(map(is_over, pids))
    why = (
        "it was interrupted"
        if isinstance(error, KeyboardInterrupt)
        else "the runner failed: .*a.json"
    )
    for name in "ab":
        record = read(folder_of(graph), name)
        assert record.state == "stopped"
        assert re.match(why, record.reason)


def test_ctrl_c_while_a_task_is_started_ends_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def interrupted(*args: Any, **options: Any) -> Any:
        started.append(start_guarded(*args, **options))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(runner, "start_guarded", interrupted)
    graph = graph_in(tmp_path, shell("a", "sleep 60"))
    with pytest.raises(KeyboardInterrupt):
        run(graph)
    assert started[0].returncode is not None
    assert read(folder_of(graph), "a").state == "stopped"


def test_the_outputs_of_tasks_are_printed_one_after_another(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "go")
    os.mkfifo(tmp_path / "back")
    first = shell("a", "echo a begins; echo > go; read x < back; echo a ends")
    second = shell("b", "read x < go; echo b begins; echo > back; echo b ends")
    run(graph_in(tmp_path, first, second, after=[]))
    lines = capfd.readouterr().out.splitlines()
    assert sorted((lines[:2], lines[2:])) == [["a begins", "a ends"], ["b begins", "b ends"]]


def test_output_is_printed_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "pipe.toml").write_text(r"""
[[task]]
name = "a"
command = ["printf", 'caf\303\251 \377']
""")
    ended = subprocess.run(
        [sys.executable, "-m", "fastload", "flow", "run", tmp_path / "pipe.toml"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert ended.stdout == b"caf\303\251 \377"


def test_a_reader_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "pipe.toml").write_text(
        '[[task]]\nname = "a"\ncommand = "cat fifo"\n'
        '[[task]]\nname = "b"\ncommand = "sleep 1000"\nafter = []\n'
    )
    os.mkfifo(tmp_path / "fifo")
    with Python(
        ["-u", "-m", "fastload", "flow", "run", tmp_path / "pipe.toml"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        (tmp_path / "fifo").write_text("one\n")
        assert process.stderr is not None
        errors = process.stderr.read()
        assert process.wait(WAIT_S) == 1
    assert "b: stopped, the runner failed: [Errno 32] Broken pipe" in errors
    assert "Traceback" not in errors


def test_without_an_mpiexec_an_mpi_task_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("mpiexec") is None
    (tmp_path / "a.py").touch()
    with pytest.raises(FlowError, match="task a failed: mpiexec, which starts"):
        run(graph_in(tmp_path, MPITask("a", script="a.py")))
