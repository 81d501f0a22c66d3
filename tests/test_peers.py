"""Promise: Each contender of `peers` that is installed delivers the same work, and one that cheats has no figure.

The loaders of other projects run in processes of their own, as they do when they are measured, with
few images; one that is not installed is skipped here, and is a row that says so there.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from benchmarks import peers
from benchmarks._judge import Pass, check, run_pass
from benchmarks._measure import open_readers
from benchmarks._report import Figures
from benchmarks._run import Case, execute
from benchmarks.peers import CONTENDERS, FFCV, FUSED, JPEG, Contender
from benchmarks.recipes import files, tree
from fastload.bench.figures import BenchError

# torchvision 0.29 says with each image that TorchCodec will take the place of its decoder.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

COUNT, BATCH = 64, 4
TORCH_BY_WORKERS = {it.title for it in peers.TORCH if it.workers != 2}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tree of images, in a temporary folder that the processes of the cases use too."""
    folder = str(tmp_path_factory.mktemp("peers"))
    kept_environment, kept_folder = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    yield tree(COUNT)
    tempfile.tempdir = kept_folder
    if kept_environment is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = kept_environment


def smoke_case(it: Contender, condition: str = "") -> Case:
    (case,) = (c for c in peers.cases(smoke=True) if c.name == it.title + condition)
    return case


def measured(it: Contender, condition: str = "") -> Figures:
    """The figures of a contender; skips the test where its loader is not installed."""
    case = smoke_case(it, condition)
    if it.recipe != "ffcv":
        return peers.measure(**case.options)
    outcome = execute("peers", case)
    if outcome.figures is None and not outcome.failed:
        pytest.skip(outcome.error or "")
    assert outcome.figures is not None, outcome.error
    return outcome.figures


@pytest.mark.parametrize(
    "it",
    [it for it in CONTENDERS if it.recipe != "ffcv" and it.title not in TORCH_BY_WORKERS],
    ids=lambda it: it.title,
)
@pytest.mark.usefixtures(
    "forks"
)  # torch's processes of a fork server leave the memory of a batch open
def test_ours_and_torchs_do_the_work(it: Contender, images: Path) -> None:
    figures = measured(it)
    assert figures.keys() == {"first_batch_s", "cached", "rate", "cpu_ms", "peak_mib"}
    assert all(math.isfinite(value) and value > 0 for value in figures.values())


@pytest.mark.parametrize(
    ("it", "condition"),
    [(it, "") for it in FFCV.values()] + [(FUSED, peers.COLD)],
    ids=lambda it: it if isinstance(it, str) else it.title,
)
def test_a_peer_does_the_work(it: Contender, condition: str, images: Path) -> None:
    figures = measured(it, condition)
    assert figures["rate"] > 0
    if condition:
        assert figures.keys() == {"first_batch_s", "cached", "rate"}
        assert 0 <= figures["cached"] <= 1


def passes_of(root: Path, transform: Any) -> list[Pass]:
    """Three shuffled passes over the images."""
    torch.manual_seed(0)
    decode: Any = partial(decode_image, mode=ImageReadMode.RGB)
    dataset = ImageFolder(str(root), transform, loader=decode)
    with open_readers("thread", dataset, 1, batch_size=BATCH, shuffle=True) as loader:
        return [run_pass(loader) for _ in range(3)]


@pytest.fixture(scope="module")
def honest(images: Path) -> list[Pass]:
    crop = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    return passes_of(images, v2.Compose(crop))


def judge(passes: list[Pass], root: Path) -> None:
    check(passes, files(root), shape=[BATCH, 3, 224, 224])


def in_order(one: Pass, numbers: torch.Tensor) -> Pass:
    """The same crops, in the order of these numbers."""
    return replace(one, numbers=numbers, points=one.points[one.numbers.sort()[1][numbers]])


def one_replaced(
    number: int, **fields: Callable[[Pass], Any]
) -> Callable[[list[Pass]], list[Pass]]:
    """Change one pass in these fields."""

    def cheat(passes: list[Pass]) -> list[Pass]:
        one = passes[number]
        changed = replace(one, **{name: change(one) for name, change in fields.items()})
        return [*passes[:number], changed, *passes[number + 1 :]]

    return cheat


def cropped_once(passes: list[Pass]) -> list[Pass]:
    return [in_order(passes[0], one.numbers) for one in passes]


def flipped_alone(passes: list[Pass]) -> list[Pass]:
    return one_replaced(1, points=lambda one: one.points.flip(-1))(cropped_once(passes))


@pytest.mark.parametrize(
    ("cheat", "message"),
    [
        (
            one_replaced(0, numbers=lambda one: torch.where(one.numbers == 3, 4, one.numbers)),
            "pass 0 delivered 64 images, 63 of them different",
        ),
        (
            one_replaced(
                2, numbers=lambda one: one.numbers[:-4], points=lambda one: one.points[:-4]
            ),
            "pass 2 delivered 60 images, 60 of them different",
        ),
        (
            lambda passes: [passes[0], in_order(passes[1], torch.arange(COUNT)), passes[2]],
            "pass 1 was not shuffled",
        ),
        (
            lambda passes: [in_order(one, passes[0].numbers) for one in passes],
            "pass 1 had the same order as the pass before",
        ),
        (cropped_once, "pass 1: 100% of the crops are the same as in the pass before"),
        (flipped_alone, "pass 1: 100% of the crops are the same as in the pass before"),
        (
            lambda passes: [replace(one, numbers=one.numbers.flip(0)) for one in passes],
            "colours are not those of their images",
        ),
        (
            one_replaced(0, shapes=lambda one: {(torch.float32, BATCH, 3, 224, 224)}),
            r"expected batches of uint8\[4, 3, 224, 224\]",
        ),
    ],
)
def test_less_than_the_work_is_no_figure(
    cheat: Callable[[list[Pass]], list[Pass]], message: str, honest: list[Pass], images: Path
) -> None:
    judge(honest, images)
    with pytest.raises(BenchError, match=message):
        judge(cheat(honest), images)


def test_crops_that_are_never_flipped_and_a_pass_without_batches_are_no_figure(
    images: Path,
) -> None:
    upright = passes_of(images, v2.RandomResizedCrop(224, antialias=True))
    with pytest.raises(BenchError, match="of the crops lie as those of another pass"):
        judge(upright, images)
    with pytest.raises(BenchError, match="a pass delivered no batch"):
        run_pass([])


def results(rates: dict[str, float]) -> dict[str, list[Figures | None]]:
    """Equal figures for all cases, but for the rates given."""
    return {
        case.name: [
            {
                "rate": rates.get(case.name, 1000.0),
                "first_batch_s": 0.1,
                "cpu_ms": 2.0,
                "peak_mib": 400.0,
                "cached": 0.0,
            }
        ]
        for case in peers.cases(smoke=True)
    }


@pytest.mark.parametrize("installed", [True, False], ids=["FFCV", "no FFCV"])
def test_our_rates_are_held_against_the_best_peer_that_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ffcv_is_there", lambda: installed)
    decoder = peers.TORCH[1].title
    assert "torchvision decoder" in decoder
    rates = {decoder: 1100.0, JPEG.title: 4500.0, FFCV["jpeg"].title: 4000.0}
    rows = peers.rows(results(rates))
    (ours,) = (row for row in rows if row.name == JPEG.title and row.unit == "img/s")
    assert ours.ratio is not None
    if installed:
        assert (ours.reference, ours.met) == ("FFCV", False)
        assert ours.ratio.median == 4500 / 4000
    else:
        assert ours.reference == "torch, torchvision decoder, on the files"
        assert ours.ratio.median == 4500 / 1100
        assert any(row.name == f"{FFCV['jpeg'].title} (ffcv is not installed)" for row in rows)
    rates = {FUSED.title: 1500.0, decoder: 1300.0}
    fused = [r for r in peers.rows(results(rates)) if r.name == FUSED.title and r.aim is not None]
    found = [(r.reference, r.ratio.median, r.met) for r in fused if r.ratio is not None]
    assert found == [("torch's best", 1500 / 1300, False)]
