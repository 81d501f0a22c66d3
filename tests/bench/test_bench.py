"""Promises:
- `fastload bench` takes exactly N steps, prints the tutorial's lines and gives all loaders the same unique samples.
- Figures of `fastload bench` come with the state of the page cache, proportional memory (PSS) and CPU seconds.
  Simulated steps are labelled. See also `tests/test_cli.py`.
- A run that fails says why in one line, and only that run ends.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("PIL")
pytest.importorskip("torchvision")


from fastload.bench import loop, report
from fastload.bench.figures import BenchError
from fastload.bench.plan import (
    LoaderKind,
    Sweep,
    SweepRun,
    TransformName,
    Workload,
    plan_runs,
    sample_order,
)
from fastload.bench.run import clocks, execute, files_of, others_share
from fastload.cli import main
from fastload.measure import fresh
from fastload.measure.fresh import ending
from fastload.measure.processes import descendants
from fastload.measure.provenance import provenance
from tests.bench.documents import failure, outcome
from tests.children import Python, warm_runs
from tests.distributed.launching import is_over
from tests.image_files import listed_images

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def file_list(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten small JPEGs of two classes, and the list of them."""
    return listed_images(tmp_path_factory.mktemp("images"), 10)


def run_over(
    file_list: Path, loader: LoaderKind = "serial", workers: int = 0, **options: Any
) -> SweepRun:
    options = {"batch_size": 4, "steps": 7, "status_print_interval": 1, **options}
    return SweepRun(
        workload=Workload(file_list=str(file_list), **options), loader=loader, workers=workers
    )


# ---- the plan ----


def test_every_configuration_runs_once_a_repeat_the_serial_one_too_and_every_other_repeat_backwards() -> (
    None
):
    runs = plan_runs(
        Workload(file_list="list"), Sweep(loaders=("serial", "thread", "torch"), workers=(1, 4))
    )
    once = [("serial", 0), ("thread", 1), ("thread", 4), ("torch", 1), ("torch", 4)]
    planned = [[(r.loader, r.workers) for r in runs if r.repeat == repeat] for repeat in range(3)]
    assert planned == [once, once[::-1], once]
    assert [r.repeat for r in runs] == sorted(r.repeat for r in runs)
    assert len({r.name for r in runs}) == 5


@given(
    length=st.integers(1, 50),
    count=st.integers(1, 200),
    more=st.integers(0, 60),
    seed=st.integers(0, 9),
)
def test_the_order_goes_through_the_list_again_and_again_and_a_longer_one_only_goes_on(
    length: int, count: int, more: int, seed: int
) -> None:
    order = sample_order(length, count, seed=seed)
    assert len(order) == count
    for start in range(0, count, length):
        epoch = order[start : start + length]
        assert set(epoch) <= set(range(length))
        assert len(set(epoch)) == len(epoch)
    assert sample_order(length, count + more, seed=seed)[:count] == order
    assert sample_order(50, 50, seed=seed) != sample_order(50, 50, seed=seed + 1)


@pytest.mark.parametrize(("loader", "workers"), [("thread", 3), ("torch", 3), ("serial", 0)])
def test_the_loader_has_more_to_read_than_it_can_read_ahead_when_the_last_step_ends(
    loader: LoaderKind, workers: int, file_list: Path
) -> None:
    run = run_over(file_list, loader, workers)
    ahead = run.ordered_samples - run.workload.samples
    assert ahead % run.workload.batch_size == 0
    assert (
        ahead // run.workload.batch_size >= 2 * workers
    )  # torch's prefetch_factor is 2 by default
    if loader == "thread":
        loader_of_run = loop.open_loader(run, list(range(10)), [0] * run.ordered_samples)  # type: ignore[arg-type]
        next(iter(loader_of_run))
        assert ahead // run.workload.batch_size >= loader_of_run.stats().depth  # type: ignore[attr-defined]
        loader_of_run.close()  # type: ignore[attr-defined]


# ---- one run ----

WORKERS: list[tuple[LoaderKind, int]] = [("serial", 0), ("thread", 2), ("auto", 2)]


@pytest.mark.parametrize(("loader", "workers"), WORKERS)
def test_a_run_takes_n_steps_and_prints_the_lines_of_the_seed(
    loader: LoaderKind, workers: int, file_list: Path
) -> None:
    lines: list[str] = []
    figures = loop.measure(
        run_over(file_list, loader, workers, status_print_interval=3), lines.append
    )
    rate = r"\d+\.\d\d"
    expected = [
        "Batch size: 4",
        f"num workers: {workers}",
        "Starting data loader",
        f"step_img_rate: {rate}",
        f"step_img_rate: {rate}",
        f"Average image rate: mean: {rate}, stddev: 0.00",  # one window, of steps 4 to 6, is past the warm-up
        "Stopping data loader",
        f"All Done: {rate}",
    ]
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line
    assert figures.samples == 7 * 4
    assert figures.unique_samples == 10, "the list of ten is begun again"
    assert len(figures.window_rates) == 1
    assert figures.rate == pytest.approx(2 * 4 / figures.steady_s)


def test_all_loaders_see_the_same_samples(file_list: Path) -> None:
    seen = []
    for loader, workers in WORKERS:
        opened, _ = loop.open_run(run_over(file_list, loader, workers))
        batches = islice(opened, 7)
        seen.append([(y.tolist(), x.sum(dim=(1, 2, 3)).tolist()) for x, y, _ in batches])
    assert len(seen[0]) == 7
    assert all(one == seen[0] for one in seen)


@pytest.mark.parametrize("transform", ["resize", "rrc"])
def test_a_plan_makes_the_images_of_torchvision_s_transform(
    file_list: Path, transform: TransformName
) -> None:
    def first(loader: LoaderKind) -> torch.Tensor:
        torch.manual_seed(7)
        opened, _ = loop.open_run(run_over(file_list, loader, 2, transform=transform))
        images: torch.Tensor = next(iter(opened))[0]
        return images

    with_plan, without = first("plan"), first("thread")
    assert (with_plan.shape, with_plan.dtype) == (without.shape, torch.float32)
    assert (with_plan - without).abs().mean() < 1 / 255 / 0.225, "docs/images.md: 0.5 of 255"


def test_a_loader_that_delivers_other_samples_fails_the_run(
    file_list: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = loop.open_loader
    monkeypatch.setattr(
        loop, "open_loader", lambda run, dataset, order: honest(run, dataset, order[::-1])
    )
    with pytest.raises(BenchError, match="delivered wrong samples or a wrong order"):
        loop.measure(run_over(file_list), lambda line: None)


def test_a_simulated_step_is_time_that_the_loop_does_not_wait_for_the_loader(
    file_list: Path,
) -> None:
    figures = loop.measure(run_over(file_list, "thread", 2, step_ms=30), lambda line: None)
    assert figures.steady_s >= 2 * 0.030
    assert (figures.wait_shares[0] or 0.0) <= 1 - 2 * 0.030 / figures.steady_s + 1e-9


def test_what_others_take_of_the_machine_is_measured_and_what_our_children_take_is_not_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy_s = iter([100.0, 103.0])
    monkeypatch.setattr("fastload.bench.run.cores_busy_s", lambda: next(busy_s))
    monkeypatch.setattr("fastload.bench.run.usable_cores", lambda: 1000)
    before = clocks()
    began = time.perf_counter()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], stdout=subprocess.DEVNULL, check=True)
    least_s = time.perf_counter() - began
    share = others_share(before)
    assert share is not None
    assert 0 < share <= (3.0 - 0.28) / (least_s * 1000)


# ---- runs as processes ----


@pytest.fixture
def _warm_runs() -> Iterator[None]:
    with warm_runs("fastload.bench.loop"):
        yield


@pytest.mark.usefixtures("_warm_runs")
def test_a_run_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "broken.jpg").write_bytes(b"this is no image")
    listing = tmp_path / "list.txt"
    listing.write_text("class/broken.jpg\n")
    run = run_over(listing, "thread", 1)
    listed, files = files_of([run])
    outcome = execute(run, files=files, say=lambda line: None)
    assert listed == 1
    assert outcome.figures is None
    assert outcome.error is not None
    assert "DecodeError" in outcome.error
    assert "broken.jpg" in outcome.error
    assert "\n" not in outcome.error
    assert outcome.messages == "", "an error about a file needs no traceback"
    assert "SIGKILL" in ending(128 + signal.SIGKILL)
    assert "memory" in ending(128 + signal.SIGKILL)
    assert "memory" not in ending(128 + signal.SIGTERM)
    assert "exit code 3" in ending(3)


def wait_for_the_end_of(pids: list[int], *, limit_s: float) -> list[int]:
    """Those of the processes that still run after `limit_s`: polled, as processes of others cannot be waited for."""
    deadline = time.monotonic() + limit_s
    while (alive := [p for p in pids if not is_over(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_a_bench_that_is_killed_takes_its_run_and_the_run_s_workers_along(file_list: Path) -> None:
    options = f"--loaders torch --workers 2 -b 2 -s 1000 --step-ms 300 --file-list {file_list}"
    with Python(["-m", "fastload", "bench", *options.split()], stdout=PIPE, text=True) as racer:
        assert racer.stdout is not None
        next(line for line in racer.stdout if line.startswith("step_img_rate"))
        # Not the tracker of resources that multiprocessing may start.
        measured = next(p for p in descendants(racer.pid) if b"bench.loop" in command_of(p))
        processes = [measured, *descendants(measured)]
        assert len(processes) >= 3, "the run and its two workers"
        racer.kill()
        assert wait_for_the_end_of(processes, limit_s=30) == []


@pytest.mark.usefixtures("_warm_runs")
@pytest.mark.parametrize(
    ("sent", "code", "said"),
    [(signal.SIGINT, 130, "Interrupted."), (signal.SIGTERM, 143, "Terminated.")],
)
def test_a_bench_that_is_stopped_reports_what_was_completed(
    sent: signal.Signals,
    code: int,
    said: str,
    file_list: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signal comes within the second run."""
    scratch, written = tmp_path / "scratch", tmp_path / "race.json"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    watch, started = fresh._watch, []

    def signalled(run: fresh.Child, say: Callable[[str], None], *given: Any) -> None:
        started.append(run.pid)

        def heard(line: str) -> None:
            say(line)
            if len(started) == 2 and line.startswith("step_img_rate"):
                signal.raise_signal(sent)

        watch(run, heard, *given)

    monkeypatch.setattr(fresh, "_watch", signalled)
    options = f"--loaders serial,thread --workers 1 -b 2 -s 6 --repeats 50 -q --json {written}"
    options += " --status-print-interval 1"
    result = CliRunner().invoke(main, ["bench", *options.split(), "--file-list", str(file_list)])
    assert result.exit_code == code, result.output
    assert result.stderr.splitlines()[-1] == said
    for said in (
        r"\[1/100\] serial.*: .*img/s, about \d+ (s|min) left",
        r"Partial: stopped after 1 of 100 runs\.",
        r"serial +\d+\.\d .*",
    ):
        assert re.search(f"^{said}$", result.stdout, re.MULTILINE), result.stdout
    document = json.loads(written.read_text())
    assert (document["partial"], document["planned_runs"]) == (True, 100)
    assert len(document["runs"]) == 1
    assert wait_for_the_end_of(started, limit_s=5) == []
    assert list(scratch.iterdir()) == []


# ---- the report ----


def test_rows_are_medians_with_their_range_and_ratios_are_within_a_repeat() -> None:
    rates: dict[LoaderKind, list[float]] = {
        "serial": [100.0, 200.0, 400.0],
        "thread": [300.0, 400.0, 400.0],
    }
    outcomes = [
        outcome(kind, 2 * (kind == "thread"), rate, repeat=i)
        for kind, of_kind in rates.items()
        for i, rate in enumerate(of_kind)
    ]
    serial, thread = report.summarise(outcomes)
    assert serial.rate == report.Spread(200.0, 100.0, 400.0)
    assert thread.rate == report.Spread(400.0, 300.0, 400.0)
    assert thread.figures["ratio"] == report.Spread(2.0, 1.0, 3.0)
    assert serial.figures["ratio"] == report.Spread(1.0, 1.0, 1.0)
    rows = report.summarise([failure("serial", 0), outcome("thread", 2, 100.0)])
    assert [(row.name, row.figures["ratio"], row.runs) for row in rows] == [("2 threads", None, 1)]


def test_the_table_has_a_line_for_each_row_with_all_of_its_figures() -> None:
    unknown = outcome("thread", 2, 310.0)
    assert unknown.figures is not None
    unknown = replace(
        unknown,
        figures=replace(unknown.figures, cpu_s_per_1000=None),
        peak_bytes=None,
        cached_share=None,
        others_share=None,
    )
    outcomes = [outcome("serial", 0, 100.0), outcome("thread", 1, 310.0), unknown]
    table = report.table(report.summarise(outcomes), outcomes[0].run.workload)
    header, _, *lines = (" ".join(line.split()) for line in table.splitlines()[:5])
    shared = "0.250 3.00 300 50% 100% 140/150"
    assert lines == [
        f"serial 100.0 100.0-100.0 1.00 n/a {shared}",
        f"1 thread 310.0 310.0-310.0 3.10 n/a {shared}",
        "2 threads 310.0 310.0-310.0 3.10 n/a 0.250 n/a n/a 50% n/a 140/150",
    ]
    for column in (
        "img/s",
        "x serial",
        "x torch",
        "1st batch s",
        "CPU",
        "MiB",
        "waited",
        "unique",
        "cached",
    ):
        assert column in header
    one_thread = "one thread, that of the loop"
    busy = "other processes used up to 30% of the cores"
    assert one_thread in table
    assert busy not in table
    noisy = [outcome("thread", 2, 100.0), replace(outcomes[1], others_share=0.3)]
    table = report.table(report.summarise(noisy), noisy[0].run.workload)
    assert one_thread not in table, "of the serial loader alone"
    assert busy in table
    simulated = outcome("thread", 2, 150.0, step_ms=12.5)
    table = report.table(report.summarise([simulated]), simulated.run.workload)
    assert "simulated: waits 12.5 ms, without an accelerator" in table


def test_what_bounds_each_loader_is_a_line_for_each_that_measures_itself() -> None:
    outcomes = [outcome("thread", 2, 1.0), outcome("torch", 2, 1.0), failure("serial", 0)]
    bounds = "The moon bounds 2 threads <at night> & by day."
    assert report.findings(outcomes) == f"2 threads: {bounds}"


def test_the_verdict_names_the_best_of_each_whichever_is_faster() -> None:
    outcomes = [
        outcome("thread", 2, 300.0),
        outcome("thread", 4, 250.0),
        outcome("torch", 1, 100.0),
        outcome("torch", 4, 400.0),
    ]
    verdict = report.verdict(report.summarise(outcomes))
    assert verdict is not None
    assert "2 threads 300.0 img/s; 4 torch processes 400.0 img/s." in verdict
    assert "threads 0.75 x" in verdict
    assert report.verdict(report.summarise(outcomes[:2])) is None
    verdict = report.verdict(report.summarise([*outcomes, outcome("plan", 2, 500.0)]))
    assert verdict is not None
    assert "2 workers, plan 500.0 img/s" in verdict
    assert verdict.endswith(": 2 workers, plan 1.25 x, 2 threads 0.75 x.")


def test_a_list_shorter_than_a_run_and_a_busy_machine_are_said_beforehand() -> None:
    origin = provenance(["fastload", "bench"])
    for load, listed, doubtful in ((3.5, 100, True), (0.1, 5000, False)):
        origin["machine"].update(cores_usable=4, load_average_1min=load)
        lines = report.preamble(Workload(file_list="list"), origin, runs=1, listed=listed)
        for said in ("shorter than a run", "busy in the last minute (load 3.50 on 4 cores)"):
            assert (said in "\n".join(lines)) == doubtful


def test_the_document_has_every_run_the_failed_ones_too(tmp_path: Path) -> None:
    outcomes = [outcome("serial", 0, 100.0), failure("torch", 2)]
    path = tmp_path / "new" / "folder" / "out.json"
    rows = report.summarise(outcomes)
    report.write_json(path, report.document(outcomes, rows, {"date": "today"}, planned=2))
    document = json.loads(path.read_text())
    assert [run["error"] for run in document["runs"]] == [None, "no luck"]
    assert document["runs"][0]["figures"]["rate"] == 100.0
    assert document["runs"][1]["figures"] is None
    assert [row["name"] for row in document["rows"]] == ["serial"]
    assert document["workload"]["steps"] == 15
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"
