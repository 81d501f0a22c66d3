"""Promise: CI runs the tests that a change needs: the core's, those that it changed, and those of every part that
changed or that imports one that did. Everything runs once in five changes.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from scripts import _choose, _suite

ROOT = Path(__file__).parents[1]


def chosen(*changed: str) -> set[str]:
    return set(_choose.choose(changed).files)


def test_a_part_brings_its_own_tests_those_of_the_pages_and_the_core_s() -> None:
    core = {"tests/test_window.py", "tests/promises/test_resume.py", "tests/test_layering.py"}
    pages = {test for test in _choose.test_files() if test.startswith("tests/docs/")}
    for part in sorted(_choose.sources().keys() - {"core"}):
        files = chosen(f"fastload/{part}/anything.py")
        own = {test for test in _choose.test_files() if test.startswith(f"tests/{part}/")}
        assert own or part in {"check", "cli", "compat", "integrations"}
        assert files >= own | core | pages, part
        beside = f"tests/test_{part}.py"
        assert beside in files or not (ROOT / beside).exists()


def test_a_part_brings_the_tests_of_those_that_import_it_and_no_others() -> None:
    files = chosen("fastload/distributed/average.py")
    assert "tests/store/test_predictions_on_ranks.py" in files, "store imports distributed"
    assert "tests/distributed/test_average.py" in files
    assert "tests/bench/test_bench.py" not in files
    assert "tests/image/test_plans.py" not in files
    files = chosen("fastload/flow/runner.py")
    assert {"tests/flow/test_runner.py", "tests/test_cli.py"} <= files
    assert not {test for test in files if test.startswith(("tests/store/", "tests/image/"))}


@pytest.mark.parametrize(
    "path",
    [
        "fastload/engine/window.py",
        "fastload/safety/copies.py",
        "fastload/gone/anything.py",
        "pyproject.toml",
        "tests/conftest.py",
        "tests/data/packed/v1/raw/index.json",
        "tests/submit/stand_ins/qsub",
        "tests/store/gone.py",
        ".ci/run",
        "new",
    ],
)
def test_the_core_and_what_no_rule_knows_bring_all(path: str) -> None:
    choice = _choose.choose([path])
    assert (choice.files, choice.left_out) == (_choose.test_files(), [])
    assert path in choice.why


def test_the_name_of_the_change_before_brings_nothing() -> None:
    """Each change has another one, and would bring all."""
    assert chosen(".ci/base") == chosen()


def test_an_unknown_base_brings_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert _choose.choose(None).files == _choose.test_files()
    base = tmp_path / "base"
    monkeypatch.setattr(_choose, "BASE", base)
    assert _choose.base_commit() is None
    base.write_text("0123456789012345678901234567890123456789\n")
    assert _choose.base_commit() is None


def test_a_test_brings_itself_and_a_helper_those_that_import_it() -> None:
    core = chosen()
    assert chosen("tests/flow/test_graph.py") - core == {"tests/flow/test_graph.py"}
    running = chosen("tests/parameters/running.py") - core
    assert "tests/parameters/test_restarts.py" in running
    assert not {test for test in running if not test.startswith("tests/parameters/")}
    started = chosen("tests/distributed/programs/restarted.py")
    assert "tests/elastic/test_torchrun.py" in started, "it names the program, and imports nothing"


def test_pages_and_examples_bring_the_tests_that_read_them() -> None:
    assert "tests/docs/test_page_examples.py" in chosen("README.md")
    assert "tests/docs/test_page_examples.py" in chosen("docs/flow.md")
    assert "tests/flow/test_digits_example.py" in chosen("examples/digits.toml")
    assert "tests/test_examples.py" in chosen("docs/examples.md")
    of_benchmarks = {"tests/test_benchmarks.py", "tests/docs/test_command_lines.py"}
    assert of_benchmarks <= chosen("benchmarks/__main__.py")


def test_any_test_brings_that_of_the_promises() -> None:
    assert "tests/test_promises.py" in chosen("tests/flow/test_graph.py")


def test_every_slow_file_has_one_turn_and_every_variant() -> None:
    turns = [_choose.fifth(turn) for turn in range(_choose.TURNS)]
    assert sorted(itertools.chain(*turns)) == _choose.slow_files()
    assert all(turns)
    assert len(_suite.VARIANTS) == _choose.TURNS
    said = [int(turn.split()[0]) for turn in _choose.last_turns()]
    assert said[0] == _choose.changes() % _choose.TURNS + 1
    assert len(said) == len({*said}) or _choose.changes() < _choose.TURNS
    by_contract = {"tests/browser/test_site.py", "tests/elastic/test_stores.py"}
    own = {test for test in _choose.test_files() if "mark.slow" in (ROOT / test).read_text()}
    assert by_contract | own <= set(_choose.slow_files())


FLAKY_TEST = """
import os, pathlib, pytest
@pytest.mark.parametrize("case", ["a b"])
def test_fails_beside_others(case):
    path = pathlib.Path(os.environ["MARK"])
    first = not path.exists()
    path.touch()
    assert not first
def test_holds(): ...
"""


def suite_over(
    source: str, folder: Path, monkeypatch: pytest.MonkeyPatch, flaky: str = ""
) -> _suite.Suite:
    """Run a step of pytest over one file of tests, without this repository's settings."""
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "flaky.txt").write_text(f"# a list\n{flaky}")
    monkeypatch.setattr(_suite, "ROOT", folder)
    monkeypatch.setattr(_suite, "FLAKY", folder / "flaky.txt")
    suite = _suite.Suite()
    suite.run(_suite.Step("a step", ("-q", "test_it.py"), {"MARK": str(folder / "mark")}))
    return suite


@pytest.mark.parametrize("listed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_that_fails_beside_others_only_is_named_and_fails_ci_once_it_is_listed(
    listed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "test_it.py::test_fails_beside_others[a b]"
    suite = suite_over(
        FLAKY_TEST, tmp_path, monkeypatch, f"{name} 2026-11-26 a race\n" if listed else ""
    )
    capsys.readouterr()
    assert suite.report(0.0, []) == int(listed)
    said = capsys.readouterr().out.splitlines()
    assert any(name in line for line in said[-20:])


def test_a_red_run_names_its_tests_in_the_last_twenty_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = "\n".join(f"def test_{n}(): assert {n} % 2" for n in range(40))
    suite = suite_over(tests, tmp_path, monkeypatch)
    capsys.readouterr()
    assert suite.report(0.0, ["much"]) == 1
    last = capsys.readouterr().out.splitlines()[-20:]
    assert "FAILED: 20" in last
    assert "test_it.py::test_0" in last
    assert "... and 5 more, above" in last


@pytest.mark.parametrize(
    ("source", "said"),
    [("", "no test passed"), ("import os; os.kill(os.getpid(), 9)", "pytest ended with -9")],
)
def test_a_run_without_a_test_and_one_that_is_killed_are_no_success(
    source: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert suite_over(source, tmp_path, monkeypatch).report(0.0, []) == 1
    assert said in capsys.readouterr().out


def test_a_command_that_prints_nothing_passes() -> None:
    suite = _suite.Suite()
    suite.run(_suite.Step("a command", (), command=["true"]))
    assert suite.failed == []
    assert suite.lines == ["     0 s  a command: "]
