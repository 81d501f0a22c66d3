"""Promises:
- `import fastload` loads no plug-in and changes nothing in the process. torch and numpy are loaded when a name needs
  them, and nothing beside them.
- `fastload flow`, `set ls`, `set gc`, `set inspect` and `env` load no torch.
- If the module of another project is in our place, or its files lie in our folder, a sentence says so.
- `fastload.__version__` is the version of the installed package, which pyproject.toml and CITATION.cff have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch

import fastload
from tests import rooms

ROOT = Path(__file__).parent.parent

CHILD = """
import json, random, sys, threading
import numpy, torch, torch.utils.data

def state():
    return [
        repr(random.getstate()), repr(numpy.random.get_state()), torch.get_rng_state().tolist(),
        torch.get_num_threads(), torch.cuda.is_initialized(), threading.active_count(),
        sys.getswitchinterval(), torch.is_grad_enabled(),
    ]

def loaded():
    return sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names))

state_before, before = state(), loaded()
import fastload
fastload.DataLoader
after, unchanged = loaded(), state() == state_before
import fastload.cli
with_cli = [name for name in sys.modules if name.startswith("fastload.")]
print(json.dumps({"before": before, "after": after, "unchanged": unchanged,
                  "cli": loaded(), "fastload": with_cli}))
"""


def test_nothing_beside_torch_and_numpy_is_loaded_and_nothing_changes() -> None:
    """The command line, too, loads of the plug-ins no more than dataclasses before it knows the command."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    child = json.loads(run.stdout)
    assert set(child["after"]) - set(child["before"]) == {"fastload"}
    optional = {"PIL", "click", "dask", "matplotlib", "mpi4py", "pyarrow"}
    assert not (optional | {"tensorboard", "torchvision"}) & set(child["after"])
    assert child["unchanged"], "threads, seeds and modes"
    assert "fastload.memory.prefetch" not in child["fastload"], "for loops that use it"
    folders = {path.parent.name for path in (ROOT / "fastload").glob("*/*.py")}
    folders &= rooms.PLUG_INS.keys()
    assert folders
    of_options = {"bench", "measure", "train"}
    assert {name.split(".")[1] for name in child["fastload"]} & folders == of_options
    assert not {"fastload.bench.run", "fastload.train.loop"} & set(child["fastload"])
    assert not {"PIL", "matplotlib", "pyarrow", "torchvision"} & set(child["cli"])


WITHOUT_TORCH = """
import sys
import fastload.cli
import fastload.flow.pipefile, fastload.flow.show, fastload.flow.submit
from fastload.flow import PipelineGraph, PythonTask, run
graph = PipelineGraph(folder=sys.argv[1])
graph.add_task(PythonTask("a", script="a.py"))
run(graph, say=str)
assert run(graph, resume=True, say=str).states == {"a": "fresh"}
import fastload
assert fastload.__version__
print("torch" in sys.modules)
# Lightning loads this plug-in for every trainer where fastload is installed.
import fastload.integrations.lightning
print("fastload.loader" in sys.modules)
from fastload import distributed
assert set(fastload.__all__) <= set(dir(fastload))
for module in (fastload, distributed):
    try:
        module.nothing
    except AttributeError as error:
        print(error)
from fastload import telemetry
assert fastload.stage is telemetry.stage
print(fastload.DataLoader.__module__, distributed.init.__module__, "torch" in sys.modules)
"""


def test_flow_begins_without_torch_which_comes_with_the_first_name_that_needs_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.py").touch()
    command = [sys.executable, "-c", WITHOUT_TORCH, tmp_path]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout.splitlines() == [
        "False",
        "False",
        "module 'fastload' has no attribute 'nothing'",
        "module 'fastload.distributed' has no attribute 'nothing'",
        "fastload.loader fastload.distributed.group True",
    ], run.stderr


COMMAND = """
import sys
from fastload.cli import main
main(sys.argv[1:], standalone_mode=False)
assert not {"torch", "pandas", "torchvision"} & sys.modules.keys(), [*sys.modules]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a set of columns, a packed set and a graph."""
    pytest.importorskip("pyarrow")
    from fastload import store
    from fastload.datasets import PackedWriter

    path = tmp_path_factory.mktemp("listed")
    half = torch.ones(4, 2, dtype=torch.bfloat16)
    store.put({"x": half, "flag": torch.ones(4) > 0, "name": list("abcd")}, path / "columns")
    with PackedWriter(path / "packed", mode="encoded") as writer:
        writer.add(b"bytes", label=3, source="a.bin")
    (path / "a.py").touch()
    (path / "pipe.toml").write_text('[[task]]\nname = "a"\nscript = "a.py"\n')
    return path


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("set ls --root .", "x bfloat16[2], flag bool, name string"),
        ("set inspect columns --root .", "column x: bfloat16[2]"),
        ("set gc --root .", "0 B freed"),
        ("set inspect columns", "column name: string"),
        ("set inspect packed", "column payload: large_binary"),
        ("flow show pipe.toml", "never ran"),
        ("env", "cores for this rank: "),
    ],
)
def test_a_command_that_only_lists_loads_no_torch(command: str, printed: str, folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", COMMAND, *command.split()],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert printed in run.stdout


def test_every_public_name_is_there_and_the_package_is_typed() -> None:
    assert all(hasattr(fastload, name) for name in fastload.__all__)
    assert {"DataLoader", "RankSampler", "SKIP", "Stats", "errors"} <= set(fastload.__all__)
    assert (ROOT / "fastload" / "py.typed").is_file()


def test_the_version_is_that_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert fastload.__version__ == metadata.version("torch-fastload") == stated
    assert f"\nversion: {stated}\n" in (ROOT / "CITATION.cff").read_text()
    monkeypatch.setattr(metadata, "distributions", lambda name: iter(()))
    assert fastload.__version__ == "0+unknown", "only the source is on the path"


IMPORTS = """
import importlib
for module in ("fastload.cli", "fastload.loader", "fastload.integrations.lightning"):
    try:
        importlib.import_module(module)
    except ImportError as error:
        print(error)
"""


def test_another_module_in_our_place_is_named(tmp_path: Path) -> None:
    """As after `pip install fastload`, which replaces files of torch-fastload."""
    (tmp_path / "fastload").mkdir()
    for path in (ROOT / "fastload").iterdir():
        (tmp_path / "fastload" / path.name).symlink_to(path)
    (tmp_path / "fastload" / "__init__.py").unlink()
    (tmp_path / "fastload" / "__init__.py").write_text("def download(): ...\n")
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    errors = ended.stdout.splitlines()
    assert len(errors) == 3, ended.stderr
    for error in errors:
        assert error.startswith("the package `fastload` in"), error
        assert str(tmp_path) in error
        assert "pip uninstall fastload torch-fastload" in error
