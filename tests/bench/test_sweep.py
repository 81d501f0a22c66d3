"""Promises:
- Ranks of a sweep load their own parts from a common start. The rate is over the time from the first rank to the
  last.
- A rank of a sweep that fails is named, and ends the others.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("PIL")
pytest.importorskip("torchvision")


from fastload.bench import report
from fastload.bench.figures import Part
from fastload.bench.plan import Plan, Run, Workload, plan_runs, rank_order, sample_order
from fastload.bench.run import all_ranks, execute, files_of
from fastload.measure.figures import Figures
from fastload.measure.fresh import _let_start
from fastload.measure.processes import descendants
from tests.bench.documents import outcome
from tests.children import warm_runs
from tests.image_files import listed_images


@pytest.fixture(scope="module")
def file_list(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty JPEGs and the list of them."""
    return listed_images(tmp_path_factory.mktemp("images"), 60)


@pytest.fixture
def _warm_ranks() -> Iterator[None]:
    with warm_runs("fastload.bench.loop"):
        yield


def run_over(file_list: Path | str, **options: Any) -> Run:
    work = {"batch_size": 2, "steps": 7, "status_print_interval": 1}
    run: dict[str, Any] = {"loader": "thread", "workers": 1, **options}
    return Run(workload=Workload(file_list=str(file_list), **work), **run)


# ---- the plan ----


def test_every_configuration_runs_in_every_number_of_ranks_and_is_named_by_it() -> None:
    runs = plan_runs(
        Workload(file_list="list"),
        Plan(loaders=("serial", "thread"), workers=(2,), repeats=1, ranks=(1, 4)),
    )
    names = ["serial", "2 threads", "4 ranks x serial", "4 ranks x 2 threads"]
    assert [run.name for run in runs] == names


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_of_all_ranks_is_a_piece_of_one_order(ranks: int) -> None:
    run = run_over("list", ranks=ranks, workers=2)
    parts = [rank_order(run, 50, rank) for rank in range(ranks)]
    assert {len(part) for part in parts} == {run.ordered_samples}
    order = sample_order(50, run.ordered_samples * ranks, seed=0)
    size = run.workload.batch_size
    for step in range(run.ordered_samples // size):
        batches = [part[step * size : (step + 1) * size] for part in parts]
        piece = order[step * size * ranks : (step + 1) * size * ranks]
        assert sorted(index for batch in batches for index in batch) == sorted(piece)


# ---- ranks as processes ----


@pytest.mark.usefixtures("_warm_ranks")
def test_ranks_load_their_parts_and_only_the_first_one_s_lines_are_passed_on(
    file_list: Path,
) -> None:
    run = run_over(file_list, ranks=2)
    lines: list[str] = []
    _, files = files_of([run])
    before = set(descendants(os.getpid()))
    outcome = execute(run, files=files, say=lines.append)
    assert outcome.error is None
    figures = outcome.figures
    assert figures is not None
    assert figures.samples == 2 * 7 * 2
    assert figures.unique_samples == len(set(sample_order(60, 28, seed=0))) == 28
    assert len(figures.rank_rates) == 2
    assert 0 < (figures.rate or 0) <= sum(rate or 0 for rate in figures.rank_rates) * 1.000001
    assert lines.count("Starting data loader") == 1
    assert "ranks: 2 on this node; the rates below are those of rank 0" in lines
    assert sum(line.startswith("step_img_rate") for line in lines) == 7
    assert set(descendants(os.getpid())) <= before


@pytest.mark.usefixtures("_warm_ranks")
def test_a_rank_that_fails_is_named_and_ends_the_others(file_list: Path, tmp_path: Path) -> None:
    """The file that is broken is in rank 1's part; rank 0 would go on for minutes."""
    run = run_over(file_list, ranks=2)
    run = replace(run, workload=replace(run.workload, steps=100, step_ms=1000))
    names = file_list.read_text().split()
    broken = rank_order(run, 60, 1)[0]
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "broken.jpg").write_bytes(b"this is no image")
    paths = [str(file_list.parent / name) for name in names]
    paths[broken] = str(tmp_path / "class" / "broken.jpg")
    listing = tmp_path / "list.txt"
    listing.write_text("\n".join(paths))
    run = replace(run, workload=replace(run.workload, file_list=str(listing)))
    _, files = files_of([run])
    outcome = execute(run, files=files, say=lambda line: None)
    assert outcome.figures is None
    assert outcome.error is not None
    assert outcome.error.startswith("rank 1 of 2: DecodeError")
    assert "broken.jpg" in outcome.error


@pytest.mark.usefixtures("_warm_ranks")
def test_what_interrupts_a_run_of_ranks_ends_all_of_them(file_list: Path) -> None:
    run = run_over(file_list, ranks=2, loader="serial", workers=0)
    run = replace(run, workload=replace(run.workload, steps=100, step_ms=1000))
    _, files = files_of([run])
    before = set(descendants(os.getpid()))

    def interrupt(line: str) -> None:
        if line.startswith("Starting"):
            assert len(set(descendants(os.getpid())) - before) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(run, files=files, say=interrupt)
    assert set(descendants(os.getpid())) <= before


def test_no_rank_starts_before_all_are_ready(tmp_path: Path) -> None:
    pipes = [os.pipe() for _ in range(2)]
    children: Any = [SimpleNamespace(stdin=os.fdopen(end, "wb")) for _, end in pipes]
    waiting = [end for end, _ in pipes]
    (tmp_path / "ready-1").touch()
    _let_start(children, tmp_path)
    assert select.select(waiting, [], [], 0)[0] == [], "a rank that reads here waits"
    (tmp_path / "ready-0").touch()
    _let_start(children, tmp_path)
    assert [os.read(end, 1) for end in waiting] == [b"", b""], "and returns when all have come"
    for end in waiting:
        os.close(end)


# ---- what is made of the parts ----


BASE = outcome("thread", 1, 100.0).figures
assert BASE is not None


def figures_of(**given: Any) -> Figures:
    return replace(BASE, **{"steady_s": 1.0, "samples": 150, **given})  # type: ignore[type-var]


def test_the_rate_of_all_ranks_is_over_the_time_from_the_first_to_the_last() -> None:
    early = Part(figures=figures_of(), steady_from_s=10.0, steady_to_s=11.0, delivered=[0, 1, 2])
    late = Part(
        figures=figures_of(
            rate=50.0, steady_s=2.0, first_batch_s=0.3, wait_shares=[0.7], cpu_s_per_1000=4.0
        ),
        steady_from_s=10.5,
        steady_to_s=12.5,
        delivered=[2, 3],
    )
    figures = all_ranks([early, late])
    assert figures.rate == pytest.approx(200 / 2.5), "100 samples each, from 10.0 s to 12.5 s"
    assert figures.rank_rates == [100.0, 50.0]
    assert figures.first_batch_s == 0.3
    assert figures.values()["wait_share_max"] == 0.7
    assert figures.cpu_s_per_1000 == pytest.approx(3.5)
    assert figures.samples == 300
    assert figures.unique_samples == 4
    assert all_ranks([early]) == replace(early.figures, unique_samples=3)


def test_serial_is_compared_within_its_number_of_ranks_and_the_best_named_for_each() -> None:
    outcomes = [
        outcome("serial", 0, 100.0),
        outcome("thread", 2, 150.0),
        outcome("torch", 2, 100.0),
        outcome("serial", 0, 180.0, ranks=2),
        outcome("thread", 2, 360.0, ranks=2),
    ]
    rows = report.summarise(outcomes)
    ratios = {row.name: row.figures["ratio"] for row in rows}
    assert ratios["2 threads"] == report.Spread(1.5, 1.5, 1.5)
    assert ratios["2 ranks x 2 threads"] == report.Spread(2.0, 2.0, 2.0)
    verdict = report.verdict(rows)
    assert verdict is not None
    assert verdict.splitlines() == [verdict], "with two ranks, torch's loader was not measured"
    table = report.table(rows, outcomes[0].run.workload)
    assert "per rank" in table.splitlines()[0]
    assert "processes on this node" in table
    assert "per rank" not in report.table(rows[:3], outcomes[0].run.workload).splitlines()[0]
