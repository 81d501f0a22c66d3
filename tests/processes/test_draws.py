"""Promises:
- In a worker process, a generator at the top of a module draws its own numbers for each sample, for any number of
  processes. Global random states of the loop's process stay as they are.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import fastload
from fastload.random.global_draws import global_states
from tests.fakes import Numbers

RNG = np.random.default_rng(1)
GENERATOR = torch.Generator().manual_seed(3)


class DrawsAtTheTop(Numbers):
    def __getitem__(self, index: int) -> Any:
        return RNG.random(), torch.rand(1, generator=GENERATOR).item()


class DrawsGlobally(Numbers):
    def __getitem__(self, index: int) -> Any:
        return random.random(), np.random.random(), torch.rand(1).item()


def read(dataset: Any, **options: Any) -> list[list[float]]:
    with fastload.DataLoader(dataset, 4, seed=5, worker_method="process", **options) as loader:
        return [[part.tolist() for part in batch] for batch in loader]


@pytest.mark.parametrize("kind", [DrawsAtTheTop, DrawsGlobally])
def test_draws_do_not_depend_on_the_number_of_processes_and_leave_the_loops_states(
    kind: type[Numbers],
) -> None:
    before = global_states(), RNG.bit_generator.state, GENERATOR.get_state().tolist()
    one = read(kind(12), num_workers=1)
    assert read(kind(12), num_workers=2) == one
    drawn = [draw for batch in one for part in batch for draw in part]
    assert len({*drawn}) == len(drawn)
    assert (global_states(), RNG.bit_generator.state, GENERATOR.get_state().tolist()) == before


def test_draws_from_global_functions_are_those_of_threads() -> None:
    with fastload.DataLoader(DrawsGlobally(12), 4, seed=5, num_workers=2) as loader:
        threads = [[part.tolist() for part in batch] for batch in loader]
    assert read(DrawsGlobally(12), num_workers=2) == threads
