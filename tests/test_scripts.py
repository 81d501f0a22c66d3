"""Promise: `scripts/test` and `scripts/demo` install and run on a fresh machine, in CI too (`.ci/run`), and reuse
what is installed. An installed torch is never replaced.

The scripts run for real, in a copy of the checkout, against an environment whose `python` writes
down what it is asked to do instead of installing or running it.
"""

from __future__ import annotations

import hashlib
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

from scripts import _suite

ROOT = Path(__file__).parent.parent
SCRIPTS = [
    ROOT / "scripts" / name
    for name in (
        "test",
        "demo",
        "docs",
        "bench",
        "build-check",
        "release",
        "sanitize",
        "device-check",
    )
]

FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
-c*version_info*) exit 0 ;;
-c*base_prefix*) exit "${{LENDS_TORCH:-1}}" ;;
-c* | -) exec {python} "$@" ;;
"-m pip --version") exit 0 ;;
esac
said=""
for name in FASTLOAD_TEST_COPY_DATASET FASTLOAD_KERNELS; do
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


WAYS = ("FASTLOAD_TEST_COPY_DATASET", "FASTLOAD_KERNELS")


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

    def build_kernels(self) -> None:
        """Leave what setup.py does: a library that says which sources it is of."""
        folder = self.root / "fastload" / "image" / "kernels"
        content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.[ch]")))
        built = f"{hashlib.sha256(content).hexdigest()} with a shared libjpeg-turbo"
        (folder / "_kernels.so").write_text(built)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "a checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copytree(ROOT / ".ci", root / ".ci")
    (root / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "imports.py", root / "tests")
    shutil.copy(ROOT / "pyproject.toml", root)
    shutil.copy(ROOT / "setup.py", root)
    kernels = root / "fastload" / "image" / "kernels"
    kernels.mkdir(parents=True)
    for name in ("a.c", "b.c", "a.h"):
        (kernels / name).write_text(f"/* {name} */")
    python = root / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    quoted = {"log": root / "log", "constraints": root / "constraints", "python": sys.executable}
    python.write_text(FAKE_PYTHON.format(**{k: f"'{v}'" for k, v in quoted.items()}))
    python.chmod(0o755)
    made = Checkout(root)
    made.build_kernels()
    return made


def installations(asked: list[str]) -> list[str]:
    """Return what pip was asked to install."""
    return [line.partition("--editable ")[2] for line in asked if line.startswith("-m pip install")]


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda p: p.name)
def test_a_script_can_be_started(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True, timeout=10)


@pytest.mark.parametrize("mode", ["", "--fast", "--changed", "--ci", "--all"])
def test_test_installs_and_hands_over_to_the_suite(checkout: Checkout, mode: str) -> None:
    status, output, asked = checkout.run("scripts/test", *mode.split())
    assert (status, asked[-1]) == (0, f"scripts/_suite.py {mode}".strip())
    versions = f"Python {platform.python_version()} with torch {version('torch')}"
    assert f"Testing on {versions} in " in output
    installed = any("albumentations" in line for line in asked)
    assert installed == (mode == "--all"), "libraries of compat are for their tests only"


def test_test_runs_what_pytest_s_arguments_name_and_nothing_else(checkout: Checkout) -> None:
    status, _, asked = checkout.run("scripts/test", "tests/promises", "-x")
    assert (status, asked[-1]) == (0, "-m pytest tests/promises -x")
    assert not [line for line in asked if "pre_commit" in line or "_suite" in line]


def test_the_files_that_the_suite_names_are_there() -> None:
    steps = [step for mode in ("--fast", "--all") for step in _suite.plan(mode)[0]]
    words = [word for step in steps for word in (*step.arguments, *step.command)]
    named = [word for word in words if word.startswith(("tests/", "scripts/"))]
    assert len(named) > 10
    assert all((ROOT / name).exists() for name in named)


def test_everything_has_the_slow_tests_and_each_variant() -> None:
    steps, left_out = _suite.plan("--all")
    assert left_out == []
    full = "--hypothesis-profile=full"
    assert steps[1] == _suite.Step("tests", ("-n", "auto", "-m", "not slow", full))
    assert "slow" in steps[2].arguments
    assert steps[3:] == [_suite.COVERAGE] + [
        step for variant in _suite.VARIANTS for step in variant
    ]
    settings = {name for step in steps for name in step.environment}
    assert settings == {"FASTLOAD_TEST_COPY_DATASET", "FASTLOAD_KERNELS"}


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


def test_what_is_installed_is_reused_until_the_project_changes(checkout: Checkout) -> None:
    status, output, asked = checkout.run("scripts/demo", FAIL_ON="pip install")
    assert status == 1
    assert [line.split()[2] for line in asked] == ["uninstall", "install"], "of the old name first"
    assert f"torch=={version('torch')}" in output
    assert "Run the same command again" in output
    kept = (checkout.root / "constraints").read_text().split()
    assert kept == [f"torch=={version('torch')}", f"torchvision=={version('torchvision')}"]
    everything = "ROOT[images,arrow,bench,stream,tensorboard,prometheus,servers,docs,dev]"
    assert installations(checkout.run("scripts/test", "-x")[2]) == [everything]
    assert installations(checkout.run("scripts/test", "-x")[2]) == []
    assert installations(checkout.run("scripts/demo")[2]) == []
    with (checkout.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert installations(checkout.run("scripts/demo")[2]) == ["ROOT[images,bench]"]
    rest = "ROOT[arrow,stream,tensorboard,prometheus,servers,docs,dev]"
    assert installations(checkout.run("scripts/test", "-x")[2]) == [rest]


BUILD = "setup.py --quiet build_ext --inplace"


@pytest.mark.parametrize("changed", ["b.c", "a.h", "../../../setup.py", "_kernels.so"])
def test_kernels_are_built_again_if_their_sources_change(checkout: Checkout, changed: str) -> None:
    assert BUILD not in checkout.run("scripts/demo")[2]
    with (checkout.root / "fastload" / "image" / "kernels" / changed).open("a") as file:
        file.write("/* changed */")
    if changed == "_kernels.so":
        Path(file.name).unlink()
    status, _, asked = checkout.run("scripts/demo")
    assert (status, asked[0], installations(asked)) == (0, BUILD, [])
    checkout.build_kernels()
    assert BUILD not in checkout.run("scripts/demo")[2]


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
    assert installations(asked) == ["ROOT[images,bench]"]


def test_the_demo_generates_images_unless_a_file_list_is_given(checkout: Checkout) -> None:
    asked = checkout.run("scripts/demo", "-s", "5")[2]
    assert asked[-2].startswith("-m fastload images ROOT/samples")
    assert asked[-1].startswith("-m fastload bench --file-list ROOT/samples/filelist.txt ")
    assert asked[-1].endswith(" -s 5")
    for given in (["--file-list", "mine.txt"], ["--file-list=mine.txt"]):
        asked = checkout.run("scripts/demo", *given, "--base-dir", "/somewhere")[2]
        assert [line for line in asked if " images " in line] == []
        assert asked[-1].startswith(
            "-m fastload bench --workers 2 --nsteps 12 --loaders serial,auto,plan,torch"
        )
        assert asked[-1].endswith(" ".join([*given, "--base-dir /somewhere"]))
    asked = checkout.run("scripts/demo", "--full", "-s", "9")[2]
    assert asked[-2].endswith(" --count 2048")
    assert " --workers 1,2,4 --nsteps 20 " in asked[-1]
    assert asked[-1].endswith(" -s 9")


@pytest.mark.parametrize(
    ("script", "holds"),
    [
        ("echo '2 passed, 1 skipped in 0.10s'", True),
        ("echo '=== 1 failed, 2 passed in 0.10s ==='; exit 1", False),
        ("exit 5", False),
    ],
)
def test_ci_ends_as_the_tests_do(checkout: Checkout, script: str, holds: bool) -> None:
    (checkout.root / "scripts" / "test").write_text(f"#!/usr/bin/env bash\n{script}\n")
    assert (checkout.run(".ci/run")[0] == 0) == holds
