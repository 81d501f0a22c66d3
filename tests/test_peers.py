"""Promise: Each contender of `peers` that is installed delivers all images once in each epoch, in batches of one shape.

The loaders of other projects run in processes of their own, as they do when they are measured, with
few images; one that is not installed is skipped here, and is a row that says so there.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import peers
from benchmarks._report import Figures
from benchmarks._run import Case, execute
from benchmarks.peers import CONTENDERS, FFCV, FUSED, JPEG, Contender
from benchmarks.recipes import tree
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
    [(it, "") for it in FFCV.values()] + [(JPEG, peers.COLD)],
    ids=lambda it: it if isinstance(it, str) else it.title,
)
def test_a_peer_does_the_work(it: Contender, condition: str, images: Path) -> None:
    figures = measured(it, condition)
    assert figures["rate"] > 0
    if condition:
        assert figures.keys() == {"first_batch_s", "cached", "rate"}
        assert 0 <= figures["cached"] <= 1


def test_batches_of_another_shape_are_no_figure() -> None:
    batch = torch.zeros(BATCH, 3, 8, 8, dtype=torch.uint8), torch.arange(BATCH)
    with pytest.raises(BenchError, match=r"expected a batch of uint8\[4, 3, 224, 224\], got"):
        list(peers.Numbers([batch], BATCH))


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


def test_our_rates_are_held_against_the_best_peer() -> None:
    decoder = peers.TORCH[0].title
    assert "torchvision decoder" in decoder
    rates = {decoder: 1100.0, JPEG.title: 4500.0, FFCV["jpeg"].title: 4000.0}
    rows = peers.rows(results(rates))
    (ours,) = (row for row in rows if row.name == JPEG.title and row.unit == "img/s")
    assert ours.ratio is not None
    assert (ours.reference, ours.met) == ("FFCV", False)
    assert ours.ratio.median == 4500 / 4000
    rates = {FUSED.title: 1500.0, decoder: 1300.0}
    fused = [r for r in peers.rows(results(rates)) if r.name == FUSED.title and r.aim is not None]
    found = [(r.reference, r.ratio.median, r.met) for r in fused if r.ratio is not None]
    assert found == [("torch's best", 1500 / 1300, False)]
