"""Promises:
- A graph says which task runs before which: a task follows the one before it, or those that `after` names.
- A cycle is listed. An unknown name, a value of a wrong type and a wrong file are errors of one line.
- `fastload flow show` lists the tasks in order, with what each waits for, and its last run.
- A task that is given twice is an error. Graphs share nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fastload.cli import main
from fastload.errors import FlowError
from fastload.flow import (
    MPITask,
    PipelineGraph,
    PythonTask,
    PytorchTask,
    Resources,
    Task,
)
from fastload.flow.pipefile import read_pipeline


def graph_of(**after: list[str] | None) -> PipelineGraph:
    graph = PipelineGraph("g")
    for name, before in after.items():
        graph.add_task(Task(name, command="true"), before)
    return graph


def flow(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["flow", *map(str, arguments)])


def test_a_task_follows_the_one_that_was_added_before_it() -> None:
    graph = graph_of(a=None, b=None, c=None)
    assert graph.order() == ["a", "b", "c"]
    assert [graph.after(name) for name in "abc"] == [(), ("a",), ("b",)]


def test_edges_and_independent_tasks() -> None:
    graph = graph_of(d=["b", "c"], a=[], b=["a"], c=["a"], e=[])
    order = graph.order()
    assert sorted(order) == list("abcde")
    assert order.index("a") < min(order.index("b"), order.index("c"))
    assert order.index("d") > max(order.index("b"), order.index("c"))
    assert graph.after("e") == ()


def test_a_cycle_is_listed() -> None:
    with pytest.raises(FlowError, match=r"wait for one another.*: (a -> b|b -> a)"):
        graph_of(a=["b"], b=["a"]).order()
    with pytest.raises(FlowError, match="'a' waits for 'z', which is not a task. The tasks are a"):
        graph_of(a=["z"]).order()


def test_graphs_share_nothing() -> None:
    first, second = PipelineGraph("first"), PipelineGraph("second")
    first.add_task(PythonTask("a", script="a.py"))
    assert (len(first), len(second)) == (1, 0)


def test_what_cannot_be_added() -> None:
    graph = graph_of(a=None)
    with pytest.raises(FlowError, match="two tasks have the name 'a'"):
        graph.add_task(Task("a", command="true"))
    not_a_task: Any = "a.py"
    with pytest.raises(TypeError, match=r"expected a task, got str: 'a.py'"):
        graph.add_task(not_a_task)
    with pytest.raises(ValueError, match="a task's name"):
        Task("../a", command="true")
    with pytest.raises(ValueError, match="a graph's name"):
        PipelineGraph("../a")
    with pytest.raises(ValueError, match="parallelism must be 1 or more"):
        MPITask("a", script="a.py", parallelism=0)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"args": "--epochs 3"}, r"""task a: args must be a list, such as .*, got '--epochs 3'"""),
        ({"inputs": [3]}, "task a: inputs must be a path, got 3"),
        ({"env": ["A"]}, "task a: env must be a table"),
        ({"script": 3}, "task a: script must be a path, got 3"),
    ],
)
def test_values_that_are_none_are_named(given: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        Task("a", command="true", **given)


def test_one_path_stands_for_a_list_and_numbers_for_texts() -> None:
    task = Task("a", command="true", inputs="raw", outputs=Path("model.pt"), env={"N": 4})
    assert (task.inputs, task.outputs, task.env) == (["raw"], ["model.pt"], {"N": "4"})


def test_text_of_tasks() -> None:
    graph = PipelineGraph("g")
    graph.add_task(PythonTask("get", script="get it.py", args=["--out", "a b"]))
    graph.add_task(PytorchTask("train", command="mpirun -n 4 python3", script="train.py"))
    assert str(graph) == (
        "Task Id 0,\n  Name: get, Command: python 'get it.py' --out 'a b', Execution Path: .\n"
        "Task Id 1,\n  Name: train, Command: mpirun -n 4 python3 train.py, Execution Path: ."
    )


def test_show_lists_the_tasks_in_order_with_what_each_waits_for_and_its_last_run(
    tmp_path: Path,
) -> None:
    after = {"d": ["b", "c"], "a": [], "b": ["a"], "c": ["a"]}
    tables = [
        f"[[task]]\nname = '{name}'\ncommand = 'true'\nafter = {before}\n"
        for name, before in after.items()
    ]
    (tmp_path / "g.toml").write_text("".join(tables))
    assert flow("show", tmp_path / "g.toml").output.splitlines()[1::2] == [
        "  a  [never ran]  after -",
        "  b  [never ran]  after a",
        "  c  [never ran]  after a",
        "  d  [never ran]  after b, c",
    ]
    assert flow("run", tmp_path / "g.toml", "--task", "a").exit_code == 0
    ran = flow("show", tmp_path / "g.toml").output.splitlines()[1]
    assert re.fullmatch(r"  a  \[done, \d+\.\d s\]  after -", ran)


# ---- files ----


def test_a_file_describes_a_graph(tmp_path: Path) -> None:
    (tmp_path / "pipe.toml").write_text("""
name = "digits"
[[task]]
name = "get"
script = "get.py"
args = ["--count", 3]
[[task]]
name = "count"
kind = "command"
command = ["wc", "-l", "a file"]
after = []
[[task]]
name = "train"
kind = "pytorch"
script = "train.py"
parallelism = 2
after = ["get", "count"]
walltime = "0:20:00"
directives = ["-A PROJECT"]
""")
    graph = read_pipeline(tmp_path / "pipe.toml")
    assert (graph.name, graph.folder) == ("digits", str(tmp_path))
    assert graph.order() == ["get", "count", "train"]
    assert graph.after("count") == ()
    train = graph.tasks["train"]
    assert isinstance(train, PytorchTask)
    assert train.parallelism == 2
    assert (train.resources.walltime, train.resources.directives) == ("0:20:00", ["-A PROJECT"])
    assert graph.tasks["get"].argv(tmp_path)[1:] == ["get.py", "--count", "3"]
    assert graph.tasks["count"].argv(tmp_path) == ["wc", "-l", "a file"]


def test_a_graph_has_the_name_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "my pipe.toml").write_text("[[task]]\nname = 'a'\ncommand = 'true'")
    assert read_pipeline(tmp_path / "my pipe.toml").name == "my_pipe"


def test_options_of_the_launcher(tmp_path: Path) -> None:
    task = MPITask("a", script="a.py", launcher="openmpi", launcher_options=["--oversubscribe"])
    argv = task.argv(tmp_path)
    assert argv[argv.index("a.py") - 2] == "--oversubscribe"
    wide = Resources(cores=4)
    ranks = MPITask("a", script="a.py", launcher="srun", resources=wide)
    assert "--cpus-per-task 4" in " ".join(ranks.argv(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 3 4", "not a TOML file"),
        ("", "has no tasks"),
        ("tasks = 1\n[[task]]\nname = 'a'", "unknown key 'tasks'"),
        ("[[task]]\nscript = 'a.py'", "task 1: a task's name must have"),
        ("[[task]]\nname = 'a'\nkind = 'spark'", "task a: kind must be one of python, mpi"),
        (
            "[[task]]\nname = 'a'\nscript = 'a.py'\nretries = 3",
            "task a: unknown key 'retries'. The keys are after, args, command, cores, directives, env,",
        ),
        ("[[task]]\nname = 'a'\nscript = 'a.py'\nafter = ['b']", "waits for 'b'"),
        ("[[task]]\nname = 'a b'\nscript = 'a.py'", "a task's name must have"),
        ("name = 3\n[[task]]\nname = 'a'\nscript = 'a.py'", "a graph's name must have"),
        ("task = ['a']", "a task must be a table. Begin each task with [[task]]"),
        ("[[task]]\nname = 'a'\nscript = 'a.py'\nargs = '-n 3'", "task a: args must be a list"),
        ("[[task]]\nname = 'a'\nscript = 'a.py'\ndirectives = '-A P'", "task a: directives must"),
        ("[[task]]\nname = 'a'\nscript = 'a.py'\ncores = 0", "task a: cores must be 1 or more"),
        (
            "[[task]]\nname = 'a'\nkind = 'mpi'\nscript = 'a.py'\nlauncher = 'pbs'",
            "launcher must be",
        ),
    ],
)
def test_a_file_that_is_wrong_is_told_of_in_a_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "pipe.toml").write_text(text)
    for command in ("run", "show"):
        result = flow(command, tmp_path / "pipe.toml")
        assert result.exit_code == 1
        assert message in result.output
        assert len(result.output.splitlines()) == 1
