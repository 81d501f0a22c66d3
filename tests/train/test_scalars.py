"""Promises:
- Without a run directory nothing is written or imported.
- The loader's figures are those of the time between two snapshots.
"""

from __future__ import annotations

from fastload import Stats
from fastload.telemetry import Stage
from fastload.train.tensorboard import loader_scalars
from tests.children import run_python


def test_into_nothing_nothing_is_written_and_tensorboard_not_needed() -> None:
    code = """
import sys
from pathlib import Path
import torch
from fastload.distributed import Control, detect_rank
from fastload.train.recipe import Recipe
from fastload.train.tensorboard import Recording
recipe = Recipe(packed=Path("set"))
recording = Recording(recipe, Control(detect_rank().rank), first=0, steps=1, stats=None, say=print)
with recording:
    recording.step()
    recording.window(1, rate=1.0, loss=torch.ones(()))
print("tensorboard" in sys.modules)
"""
    run = run_python("-c", code, check=True)
    assert run.stdout == "False\n"
    assert run.stderr == ""


def stats(epoch: int, elapsed_s: float, samples: int, wait_s: float, decode_s: float) -> Stats:
    return Stats(
        epoch=epoch, workers=2, depth=4, samples=samples, batches=1, errors=0, elapsed_s=elapsed_s,
        consumer_wait_s=wait_s, worker_wait_s=0.0, occupancy=0.75,
        stages={"decode": Stage("decode", decode_s, 1, 0.0, 0.0, 0.0)},
    )  # fmt: skip


def test_the_figures_are_of_the_time_between_two_snapshots() -> None:
    before, now = stats(3, 10.0, 1000, 2.0, 4.0), stats(3, 14.0, 1800, 3.0, 7.5)
    assert loader_scalars(now, before) == {
        "loader/samples_per_s": 200.0,
        "loader/wait_share": 0.25,
        "loader/queue_occupancy": 0.75,
        "stage_s/decode": 3.5,
    }
    whole = loader_scalars(now)
    assert whole["loader/samples_per_s"] == 1800 / 14.0
    assert loader_scalars(now, stats(2, 10.0, 1000, 2.0, 4.0)) == whole, "of another epoch"
    assert loader_scalars(now, now) == {}
    assert loader_scalars(Stats(-1, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)) == {}
