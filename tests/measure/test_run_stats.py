"""Promise: The verdict and the figures of a run cover all epochs, without the warm-up. See also
`tests/train/test_train.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastload.telemetry import Stage, Stats
from fastload.telemetry.sums import less, plus

EPOCH = Stats(
    epoch=0,
    workers=2,
    depth=4,
    samples=40,
    batches=10,
    errors=1,
    elapsed_s=4.0,
    consumer_wait_s=3.0,
    worker_wait_s=0.5,
    occupancy=0.2,
    bytes=400,
    busy_s=6.0,
    sample_cpu_s=2.0,
    stages={"sample": Stage("sample", 6.0, 40, 0.1, 0.2, 0.3, 2.0)},
    gil_pressure=0.1,
    gil_probes=10,
    slowest_s=2.0,
    slowest="index 7",
    process_cpu_s=3.0,
    ended=True,
)
WARM = replace(
    EPOCH,
    samples=8,
    batches=2,
    errors=0,
    elapsed_s=3.0,
    consumer_wait_s=2.9,
    occupancy=0.0,
    stages={"sample": Stage("sample", 4.0, 8, 0.1, 0.2, 0.3, 1.0)},
    gil_pressure=0.5,
    gil_probes=2,
    ended=False,
)


def test_the_warm_up_is_taken_off_its_epoch() -> None:
    steady = less(EPOCH, WARM)
    assert (steady.samples, steady.batches, steady.errors) == (32, 8, 1)
    assert (steady.elapsed_s, steady.consumer_wait_s) == pytest.approx((1.0, 0.1))
    assert steady.occupancy == pytest.approx(0.25)
    assert (steady.gil_pressure, steady.gil_probes) == (0.0, 8)
    assert steady.stages["sample"] == Stage("sample", 2.0, 32, 0.1, 0.2, 0.3, 1.0)
    assert (steady.slowest_s, steady.slowest) == (0.0, ""), "it was in the warm-up"


def test_epochs_are_added_up() -> None:
    second = replace(EPOCH, epoch=1, slowest_s=3.0, slowest="index 8", occupancy=0.4)
    both = plus(second, EPOCH)
    assert (both.epoch, both.samples, both.elapsed_s) == (1, 80, 8.0)
    assert both.occupancy == pytest.approx(0.3)
    assert both.stages["sample"].count == 80
    assert both.stages["sample"].p50_s == pytest.approx(0.1)
    assert (both.slowest_s, both.slowest) == (3.0, "index 8")
    assert plus(EPOCH, Stats()) == plus(Stats(), EPOCH) == EPOCH


def test_a_warm_up_longer_than_an_epoch_leaves_that_epoch_out() -> None:
    second = replace(EPOCH, epoch=1)
    assert less(plus(second, EPOCH), plus(replace(WARM, epoch=1), EPOCH)).batches == 8
