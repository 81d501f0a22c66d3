"""Promise: A `FunctionTask` calls functions, methods and partials of modules and scripts, with arguments of any size,
in a process of its own.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from pprint import pprint

import numpy as np
import pytest

from fastload import flow
from fastload.flow import FunctionTask, Outcome, PipelineGraph
from fastload.flow.pipefile import read_pipeline
from tests.children import run_python
from tests.distributed.launching import ROOT


def show(*values: object) -> None:
    print(*values)


class Model:
    """An object with a method."""

    def __init__(self, weight: int) -> None:
        self.weight = weight

    def fit(self, data: str) -> None:
        """Say what there is."""
        print(self.weight, data)


def run(folder: Path, task: FunctionTask, *, resume: bool = False) -> tuple[Outcome, str]:
    graph = PipelineGraph("g", folder=folder)
    graph.add_task(task)
    outcome = flow.run(graph, resume=resume)
    return outcome, (folder / ".fastload-flow" / "g" / f"{task.name}.log").read_text()


def test_a_method_is_called_on_its_object_and_a_partial_with_its_large_arguments(
    tmp_path: Path,
) -> None:
    assert run(tmp_path, FunctionTask("a", Model(5).fit, args=["data"]))[1] == "5 data\n"
    text = run(tmp_path, FunctionTask("a", functools.partial(show, 1), args=[np.zeros(100_000)]))[1]
    assert text == "1 [0. 0. 0. ... 0. 0. 0.]\n"


def test_what_another_process_cannot_call() -> None:
    def inner() -> None:
        """Be within another function."""

    for function in (inner, lambda: None):
        with pytest.raises(ValueError, match="task a: .* cannot be called in another process"):
            FunctionTask("a", function)
    with pytest.raises(ValueError, match="cannot be called in another process"):
        FunctionTask("a", show, args=[sys.stdout])
    with pytest.raises(TypeError, match="task a: args must be a list"):
        FunctionTask("a", show, args="text")


def test_the_order_of_a_set_changes_nothing(tmp_path: Path) -> None:
    one, other = (FunctionTask("a", pprint, args=[set(words)]) for words in ("abcdef", "fedcba"))
    run(tmp_path, one)
    again = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    code = (
        "from fastload.flow import *\nfrom pprint import pprint\ngraph = PipelineGraph('g')\n"
        "graph.add_task(FunctionTask('a', pprint, args=[set('abcdef')]))\n"
        "print(run(graph, resume=True).states)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, **again},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "{'a': 'fresh'}\n"
    assert run(tmp_path, other, resume=True)[0].states == {"a": "fresh"}
    assert run(tmp_path, FunctionTask("a", pprint, args=["abc"]), resume=True)[0].reasons


PROGRAM = """
from dataclasses import dataclass
from multiprocessing import Pool
import pickle, sys
from fastload.flow import FunctionTask, PipelineGraph, run
from steps import prepare

@dataclass
class Config:
    n: int = 3

def square(x):
    return x * x

def train(config):
    with Pool(1) as pool:
        print("trained with", config, type(pickle.loads(pickle.dumps(config))) is Config, pool.map(square, [2]))

if __name__ == "__main__":
    graph = PipelineGraph("g")
    graph.add_task(FunctionTask("prepare", prepare, args=[3], exec_path="work"))
    graph.add_task(FunctionTask("train", train, args=[Config()]))
    run(graph)
"""


@pytest.mark.parametrize(
    "program",
    [["../scripts/pipe.py"], pytest.param(["-m", "scripts.pipe"], marks=pytest.mark.slow)],
)
def test_a_script_with_a_module_beside_it_from_another_folder(
    program: list[str], tmp_path: Path
) -> None:
    for folder in ("scripts", "here", "here/work"):
        (tmp_path / folder).mkdir()
    (tmp_path / "scripts" / "pipe.py").write_text(PROGRAM)
    (tmp_path / "scripts" / "steps.py").write_text("def prepare(n): print('prepared', n)")
    paths = (tmp_path, tmp_path / "scripts", ROOT) if program[0] == "-m" else (ROOT,)
    ended = subprocess.run(
        [sys.executable, *program],
        cwd=tmp_path / "here",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "prepared 3\ntrained with Config(n=3) True [4]\n"


def test_a_function_of_no_file_is_refused() -> None:
    code = "from fastload.flow import FunctionTask\ndef f(): pass\nFunctionTask('a', f)"
    ended = run_python("-c", code)
    assert "ValueError: task a: f or an argument is defined in no file" in ended.stderr


def test_a_function_in_a_file_of_tasks(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "steps_of_toml.py").write_text("def prepare(n, to): print('prepared', n, to)")
    (tmp_path / "pipe.toml").write_text("""
[[task]]
name = "a"
kind = "function"
function = "steps_of_toml:prepare"
args = [3]
kwargs = {to = "here"}
exec_path = "work"
""")
    before = list(sys.path)
    outcome = flow.run(read_pipeline(tmp_path / "pipe.toml"))
    assert Path(outcome.logs["a"]).read_text() == "prepared 3 here\n"
    assert sys.path == before
