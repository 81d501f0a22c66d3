"""Promises:
- A usage error is one line with exit code 2 in every command.
- Arguments of every command are checked: nan, inf, seeds, devices, models and durations.
- A file list is looked for in the current folder, then in `--base-dir`. If it is missing, both are named.
- `fastload` runs the main job end to end.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import fastload
from fastload.bench.figures import Outcome
from fastload.bench.plan import SweepRun
from fastload.cli import main
from fastload.errors import FastloadError, UsageError
from tests.children import run_python

ROOT = Path(__file__).parents[1]


def call(*arguments: str | Path) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="session")
def file_list(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve JPEGs, made by the command itself."""
    pytest.importorskip("PIL")
    folder = tmp_path_factory.mktemp("sample")
    result = call("images", folder, "--count", "12", "--workers", "2")
    assert result.exit_code == 0, result.output
    listing = folder / "filelist.txt"
    names = listing.read_text().split()
    assert len(names) == 12
    assert all((folder / name).stat().st_size > 10_000 for name in names)
    assert f"fastload bench --file-list-path {listing}" in result.output
    return listing


# ---- what it teaches ----


def test_module_and_command_are_the_same_and_load_no_torch() -> None:
    """`python -m fastload` is run by the code that `-m` runs, after a look at what the command imported."""
    code = (
        "import runpy, sys, fastload.cli; "
        "print([name for name in sys.modules if name.startswith(('fastload.', 'torch', 'PIL'))]); "
        "sys.argv[1:] = ['--version']; "
        "runpy.run_module('fastload', run_name='__main__', alter_sys=True)"
    )
    loaded, version = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "fastload.cli" in loaded
    assert not re.search(r"'torch|PIL|fastload\.(datasets|image|train\.loop)", loaded)
    assert version == f"fastload, version {fastload.__version__}"


# ---- the main job ----


@pytest.mark.slow
def test_a_race_of_all_loaders_prints_lines_and_a_table_and_writes_json_page_and_plot(
    file_list: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("matplotlib")
    done = run_python(
        *("-m", "fastload", "bench", "--file-list", file_list),
        *("--workers", "2", "-b", "4", "-s", "8", "--status-print-interval", "2"),
        *("--repeats", "1", "--step-ms", "5", "--json", tmp_path / "race.json"),
        *("--html", tmp_path / "race.html", "--plot", tmp_path / "race.png"),
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    output = done.stdout
    assert output.count("Batch size: 4\n") == 3
    assert re.findall(r"^num workers: (\d+)$", output, re.MULTILINE) == ["0", "2", "2"]
    for line, count in {
        r"step_img_rate: \d+\.\d\d$": 3 * 4,
        r"Average image rate: mean: \d+\.\d\d, stddev: \d+\.\d\d$": 3,
        r"All Done: \d+\.\d\d$": 3,
        r"(serial|2 workers|2 torch processes) +\d+\.\d ": 3,
    }.items():
        assert len(re.findall(f"^{line}", output, re.MULTILINE)) == count, line
    assert "simulated: waits 5 ms" in output
    assert "Best of each: 2 workers" in output

    document = json.loads((tmp_path / "race.json").read_text())
    origin = document["provenance"]
    assert origin["command"][:2] == ["fastload", "bench"]
    assert origin["versions"]["fastload"] == fastload.__version__
    ran = [(run["loader"], run["workers"]) for run in document["runs"]]
    assert ran == [("serial", 0), ("auto", 2), ("torch", 2)]
    for run in document["runs"]:
        figures = run["figures"]
        assert figures["samples"] == 32
        assert figures["unique_samples"] == 12
        assert figures["rate"] > 0
        assert 0 < figures["first_batch_s"] < figures["total_s"]
        assert 0 <= figures["wait_shares"][0] <= 1
        assert len(figures["window_rates"]) == 2, "of the windows ending at 2, 4, 6 and 8"
        assert figures["cpu_s_per_1000"] > 0
        assert run["peak_bytes"] > 50 * 2**20, "torch alone is more"
        assert run["cached_share"] == 1.0
        assert 0 <= run["others_share"] <= 1
    assert document["runs"][1]["figures"]["loader_stats"]["workers"] == 2

    page = (tmp_path / "race.html").read_text()
    for row in document["rows"]:
        rate = f"{row['rate_global']['median']:.1f}"
        assert rate in output
        assert f"<td>{rate}</td>" in page
    assert f"Page: {tmp_path / 'race.html'}\n" in output
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_run_that_fails_is_said_the_others_go_on_and_the_command_fails(
    file_list: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchvision")
    from fastload.bench import loop

    def in_this_process(
        run: SweepRun, *, files: Sequence[str], say: Callable[[str], None]
    ) -> Outcome:
        """Stand in for a process of its own; the run of torch's loader breaks."""
        broken = run.loader == "torch"
        return Outcome(
            run=run,
            figures=None if broken else loop.measure(run, say),
            error="OSError: the disk is gone" if broken else None,
            peak_bytes=None,
            cached_share=None,
            others_share=None,
            messages="some warning",
        )

    monkeypatch.setattr("fastload.bench.run.execute", in_this_process)
    options = ("--workers", "1", "-b", "2", "-s", "6", "--repeats", "2")
    result = call("bench", "--file-list", file_list, *options, "--json", tmp_path / "race.json")
    assert result.exit_code == 1
    assert result.output.count("1 torch process: OSError: the disk is gone") == 2
    assert result.output.count("some warning") == 1, "what every run says is said once"
    assert "Error: 2 of 6 runs failed" in result.output
    assert re.search(r"^serial +\d", result.output, re.MULTILINE)
    assert re.search(r"^1 worker +\d", result.output, re.MULTILINE)
    runs = json.loads((tmp_path / "race.json").read_text())["runs"]
    once = [("serial", True), ("auto", True), ("torch", False)]
    assert [(run["loader"], run["error"] is None) for run in runs] == [*once, *once[::-1]]


# ---- errors in one line ----


def refuse(result: Any, *expected: str) -> None:
    """The command failed with a sentence that has all of `expected`, and with no traceback."""
    assert result.exit_code != 0
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    for text in expected:
        assert text in result.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workers=two"], ["--workers", "'two' is not a valid integer"]),
        (["--workers=1,,2"], ["--workers", "'' is not a valid integer"]),
        (["--workers", "0"], ["--workers", "0 is not in the range x>=1"]),
        (["--loaders", "serial,dali"], ["--loaders", "'dali'", "'serial', 'auto', 'thread'"]),
        (["-s", "5"], ["--nsteps", "6"]),
    ],
)
def test_a_race_that_cannot_be_is_refused_before_anything_runs(
    options: list[str], said: list[str], file_list: Path
) -> None:
    refuse(call("bench", "--file-list", file_list, *options), *said)


def test_an_empty_file_list_and_a_missing_image_are_named(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    listing = tmp_path / "list.txt"
    listing.touch()
    refuse(call("bench", "--file-list", listing), "Error: ", "list.txt")
    listing.write_text("class/gone.jpg\n")
    said = ["gone.jpg is listed in", f"Relative paths in the list start from {tmp_path}"]
    refuse(call("bench", "--file-list", listing), *said)


@pytest.mark.parametrize(("name", "where"), [("--file-list", "here"), ("--file-list-path", "base")])
@pytest.mark.parametrize("command", ["bench", "train"])
def test_a_file_list_is_relative_to_here_or_else_to_the_base_dir(
    command: str,
    where: str,
    name: str,
    file_list: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list of an image that is not there, so that the command ends with its name."""
    pytest.importorskip("torchvision")
    for folder in ("here", "base"):
        (tmp_path / folder).mkdir()
    (tmp_path / where / "list.txt").write_text(f"class/of_{where}.jpg\n")
    if where == "here":
        (tmp_path / "base" / "list.txt").write_text("class/of_base.jpg\n")
    monkeypatch.chdir(tmp_path / "here")
    extra = ["--logdir", tmp_path / "log", "--device", "cpu"] if command == "train" else []
    result = call(command, name, "list.txt", "--base-dir", "../base", *extra)
    assert result.exit_code == 1
    refuse(
        result,
        f"of_{where}.jpg: No such file" if command == "train" else f"of_{where}.jpg is listed in",
    )


@pytest.mark.parametrize("command", ["bench", "train"])
def test_a_file_list_that_is_not_there_names_the_folders_that_were_looked_in(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchvision")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    result = call(command, "--file-list-path", "none.txt", "--base-dir", "base")
    assert result.exit_code == 2
    refuse(result, "'none.txt'", str(tmp_path), str(tmp_path / "base"), "--file-list-path")


@pytest.mark.parametrize(
    ("missing", "extra"), [("PIL", "images"), ("torchvision", "images"), ("matplotlib", "bench")]
)
def test_a_missing_package_names_the_extra(
    missing: str, extra: str, file_list: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == missing else find(name, *rest),
    )
    refuse(
        call("bench", "--file-list", file_list, "--plot", "out.png"),
        f"pip install 'torch-fastload[{extra}]'",
    )


class Stopping(click.Command):
    """A command that raises."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("stopping")
        self.error = error

    def invoke(self, ctx: click.Context) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
        (FastloadError("what is wrong"), 1, "Error: what is wrong\n"),
        (UsageError("what was asked for"), 2, "Error: what was asked for\n"),
        (click.UsageError("what was asked for"), 2, "Error: what was asked for\n"),
        (FileNotFoundError(2, "No such file", "here.jpg"), 1, "Error: here.jpg: No such file\n"),
        (FileExistsError("other images are there"), 1, "Error: other images are there\n"),
    ],
)
def test_how_a_command_ends(
    error: BaseException, code: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(main.commands, "stopping", Stopping(error))
    result = call("stopping")
    assert (result.exit_code, result.output) == (code, sentence)
    monkeypatch.setitem(main.commands, "stopping", Stopping(ZeroDivisionError("ours")))
    assert isinstance(call("stopping").exception, ZeroDivisionError), "with its traceback"


@pytest.mark.parametrize(
    ("command", "options", "quoted"),
    [
        ("train", [], "--file-list-path"),
        ("train", ["--lr", "nan"], "nan"),
        ("train", ["--lr", "inf"], "inf"),
        ("train", ["--seed", str(2**64)], str(2**64)),
        ("train", ["--nsteps", "0"], "0"),
        ("train", ["--device", "cpu:7"], "cpu:7"),
        ("train", ["--model", "resnet5"], "'resnet5'"),
        ("train", ["--profile", "-s", "12"], "--nsteps 16"),
        ("train", ["--every", "5"], "--every needs a folder for the checkpoint"),
        ("train", ["--resume"], "--resume needs a folder for the checkpoint"),
        ("train", ["--checkpoint", "x", "--loader", "torch"], "cannot resume within an epoch"),
        ("bench", [], "--file-list-path"),
        ("env", ["--timeout", "nan"], "nan"),
        ("submit", ["--walltime", "1:99:00"], "'1:99:00'"),
    ],
)
def test_what_cannot_be_asked_for_is_told_in_one_line_with_exit_code_2(
    command: str, options: list[str], quoted: str, file_list: Path, tmp_path: Path
) -> None:
    if options and command in ("train", "bench"):
        options = ["--file-list-path", str(file_list), *options]
    if command == "train":
        options = [*options, "--logdir", str(tmp_path)]
    result = call(command, *options)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert quoted in line
