"""Promise: Every benchmark runs, checks what it measures, and judges by medians of ratios within a repeat.

The configurations run here in their smoke sizes, in this process; one benchmark runs through the
command as well, in processes of its own.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path

import click.testing
import pytest
import torch

from benchmarks import _data
from benchmarks.__main__ import ASKED_FOR, NAMES, main
from benchmarks._measure import run_epochs
from benchmarks._report import Aim, best, row, table
from benchmarks._run import Case, load
from benchmarks.remote_recipes import FILES
from fastload.bench.figures import BenchError
from tests.children import run_python, warm_runs
from tests.remote.servers import program

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _handler_kept() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(autouse=True)
def _warm_cases() -> Iterator[None]:
    with warm_runs():
        yield


@pytest.mark.usefixtures("forkserver")  # of `thread_cost`
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_measures_each_case_and_has_a_row_for_each_aim(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_data.tempfile, "gettempdir", lambda: str(tmp_path))
    benchmark = load(name)
    cases = benchmark.cases(smoke=True)
    as_in_its_process = {case.name: json.loads(json.dumps(case.options)) for case in cases}
    assert len(as_in_its_process) == len(cases), "two cases of one name"
    results = {name: [benchmark.measure(**each)] for name, each in as_in_its_process.items()}
    full = {case.name: case.options for case in benchmark.cases(smoke=False)}
    assert all(case.options.keys() == full[case.name].keys() for case in cases)
    for figures in results.values():
        assert figures[0]
        assert all(math.isfinite(value) for value in figures[0].values())

    rows = benchmark.rows(results)
    for found in rows:
        assert found.figure is not None
        assert (found.met is None) == (found.aim is None)
        assert found.reference is None or found.ratio is not None
    assert benchmark.TITLE.startswith(f"{name}: ")
    assert benchmark.TITLE in table({benchmark.TITLE: rows}, judged=False)


@pytest.mark.parametrize("name", [*NAMES, *ASKED_FOR])
def test_rows_do_without_the_figures_of_cases_that_failed(name: str) -> None:
    benchmark = load(name)
    rows = benchmark.rows({case.name: [None] for case in benchmark.cases(smoke=True)})
    assert rows
    assert all(found.figure is found.ratio is found.met is None for found in rows)


def test_the_command_prints_a_table_and_writes_figures_with_their_provenance(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out" / "bench.json"
    done = run_python("-m", "benchmarks", "collate", "--smoke", "--json", out, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (ours,) = (line for line in lines if line.startswith("  threads, 4"))
    assert "samples/s" in ours
    assert "workers / (read + collate)" in ours
    assert ">= 0.9 x" in ours
    assert "not judged" in ours
    assert any(line.startswith("  torch's processes, 4") for line in lines)
    assert any("smoke run" in line for line in lines)

    document = json.loads(out.read_text())
    assert document["smoke"] is True
    assert {"machine", "versions", "command", "date"} <= document["provenance"].keys()
    assert document["provenance"]["command"][1:4] == ["collate", "--smoke", "--json"]
    collate = document["benchmarks"]["collate"]
    assert [run["options"]["kind"] for run in collate["runs"]] == ["thread", "torch"]
    assert all(run["figures"]["rate"] > 0 and not run["failed"] for run in collate["runs"])
    ideal = "workers / (read + collate)"
    ratios = [run["figures"]["rate"] / run["figures"][ideal] for run in collate["runs"]]
    assert [row["ratio"]["median"] for row in collate["rows"]] == ratios


def test_the_device_check_runs_on_the_cpu_and_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every case in its own process, the two ranks too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out = tmp_path / "device.json"
    done = click.testing.CliRunner().invoke(main, ["device", "--smoke", "--json", str(out)])
    assert done.exit_code == 0, done.stderr
    document = json.loads(out.read_text())
    found = document["benchmarks"]["device"]
    has_gpu = torch.cuda.is_available()
    assert (found["versions"]["device"] == "CPU, not a device") == (not has_gpu)
    assert {"steps", "values", "overlap", "forks", "ranks"} == {
        run["options"]["what"] for run in found["runs"]
    }
    assert all(row["figure"]["median"] > 0 for row in found["rows"])
    cases = load("device").cases(smoke=False)
    assert sum(case.limit_s or math.inf for case in cases) < 600


def test_objects_of_a_store_are_read_once_each_beside_other_loaders(tmp_path: Path) -> None:
    """Through the command, which ends the server with itself."""
    program("weed")
    pytest.importorskip("obstore")
    out = tmp_path / "remote.json"
    done = run_python("-m", "benchmarks", "remote", "--smoke", "--json", out, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    runs = {run["case"]: run for run in json.loads(out.read_text())["benchmarks"]["remote"]["runs"]}
    for name in FILES:
        if name.startswith("fastload"):
            figures = runs[f"{name}, 20 ms"]["figures"]
            assert figures["requests"] == figures["bytes"] == 1.0, name
            assert figures["first_s"] >= 0.02
    assert runs["fastload, tar shards, 20 ms"]["figures"]["rate"] > 0
    assert "after the first batch" in done.stdout


def test_a_case_that_breaks_is_shown_and_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    small = load("small")
    good, *_ = small.cases(smoke=True)
    broken = Case("broken", good.options | {"kind": "torch", "workers": -1})
    monkeypatch.setattr(small, "cases", lambda *, smoke: [good, broken])
    monkeypatch.setattr(small, "rows", lambda results: [row(results, "broken", "rate", unit="")])
    result = click.testing.CliRunner().invoke(main, ["small", "--smoke"])
    assert result.exit_code == 1
    assert "small: broken: ended with 1" in result.stderr
    assert "ValueError: num_workers option should be non-negative" in result.stderr
    assert "1 runs failed" in result.stderr


@pytest.mark.parametrize(
    ("delivered", "counts"),
    [
        ([[0, 1], [2, 2]], "4 samples, 3 of them different"),
        ([[0, 1], [2]], "3 samples, 3 of them different"),
        ([[0, 1], [2, 4]], "4 samples, 4 of them different"),
        ([], "0 samples, 0 of them different"),
    ],
)
def test_wrong_samples_are_no_figure(delivered: list[list[int]], counts: str) -> None:
    with pytest.raises(BenchError, match=f"pass 0 delivered {counts}"):
        run_epochs([torch.tensor(batch) for batch in delivered], count=1, indices=range(4))


def test_a_ratio_is_of_one_repeat_and_its_median_is_judged() -> None:
    results = {
        "ours": [{"rate": 90.0}, {"rate": 240.0}, None, {"rate": 100.0}],
        "theirs": [{"rate": 100.0}, {"rate": 200.0}, {"rate": 100.0}, None],
    }
    found = row(results, "ours", "rate", unit="/s", against=("theirs", "rate"), aim=Aim(">=", 1.05))
    assert found.figure is not None
    assert (found.figure.median, found.figure.low, found.figure.high) == (100, 90, 240)
    assert found.ratio is not None
    assert (found.ratio.low, found.ratio.high) == (0.9, 1.2)
    assert found.ratio.median == pytest.approx(1.05)
    assert found.reference == "theirs"
    assert found.met is True
    assert "NOT MET" not in table({"t": [found]}, judged=True)
    torchs = {
        "steady": [{"rate": 10.0}, {"rate": 11.0}, {"rate": 10.0}],
        "lucky": [{"rate": 9.0}, {"rate": 99.0}, {"rate": 8.0}],
        "broken": [None, None, None],
    }
    assert best(torchs, torchs, "rate") == "steady", "one setting for all repeats"


@pytest.mark.parametrize(
    ("aim", "met"),
    [
        (Aim("<=", 10, of="figure"), True),
        (Aim("<=", 9.9, of="figure"), False),
        (Aim(">=", 10.1, of="figure"), False),
        (Aim(">=", 2), True),
        (Aim("<=", 1), False),
    ],
)
def test_an_aim_is_for_the_figure_or_for_the_ratio(aim: Aim, met: bool) -> None:
    results = {"case": [{"cost": 10.0, "ideal": 5.0}]}
    found = row(results, "case", "cost", unit="us", against=("case", "ideal"), aim=aim)
    assert found.met is met
    assert ("NOT MET" in table({"t": [found]}, judged=True)) is not met
