"""Promise: The summary of a run names the rank that waited most, and adds up the rates of all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastload.distributed import Rank
from fastload.measure.figures import Figures
from fastload.measure.loop_timer import Measured
from fastload.train.learner import Learner
from fastload.train.recipe import Recipe
from fastload.train.summary import Trained, lines_of, row_of, together


def said_of(rates: list[float | None], waits: list[float | None]) -> tuple[dict[str, Any], str]:
    """Return the row and the lines of a run, by the figures of its ranks."""
    measured, rank = Measured(), Rank(0, len(rates), 0, 1, "openmpi")
    one = Figures.of(measured, unique_samples=0)
    figures = together(
        [replace(one, rate=r, wait_shares=[w]) for r, w in zip(rates, waits, strict=True)],
        unique_samples=0,
    )
    model = torch.nn.Linear(1, 1)
    recipe = Recipe(packed=Path("set"))
    trained = Trained(
        measured=measured, seen=torch.zeros(1), loss=None,
        first_step=0, last_step=9, total_steps=9, stopped_by=0,
    )  # fmt: skip
    learner = Learner(
        model=model, optimizer=torch.optim.SGD(model.parameters()), forward=model,
        loss=model, prepare=model, device=torch.device("cpu"), about={"model": "tiny"},
    )  # fmt: skip
    row = row_of(recipe, trained, figures, learner, rank, None)
    return row, "\n".join(lines_of(row, recipe, trained, figures, learner))


def test_the_rank_that_waited_most_is_named() -> None:
    row, said = said_of([1.0] * 3, [0.1, 0.4, 0.2])
    assert row["wait_share_max"] == 0.4
    assert "40 % of the time waiting for the loader, on rank 1" in said
    assert said_of([1.0, None], [None, 0.2])[0]["wait_share_max"] == 0.2
    row, said = said_of([None], [None])
    assert row["wait_share_max"] is None
    assert "loop waited  n/a" in said


def test_the_rate_of_all_ranks_is_known_if_that_of_each_is() -> None:
    row, said = said_of([10.0, 30.0], [None, None])
    assert (row["rate_global"], row["rate_rank_mean"]) == (40.0, 20.0)
    assert "40.00 images/s, all ranks together; a rank 10.00 to 30.00" in said
    row, said = said_of([10.0, None], [None, None])
    assert (row["rate_global"], row["rate_rank_mean"]) == (None, 10.0)
    assert "image rate   n/a" in said
