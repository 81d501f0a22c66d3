"""Promise: Without workers, the loader calls no Python function for each small sample, and few for each batch."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import fastload
from fastload.sequences import Mixture

N, MOST = 6400, 145
"""Calls for a batch of any size: a few more than the 118 to 137 of today. They were 193 to 537 with a call or more for
each sample."""

SAMPLES: dict[str, Callable[[int], Any]] = {
    "numbers": lambda k: (float(k), k),
    "arrays": lambda k: {"x": np.full(4, k, np.float32), "y": k},
    "tensors": lambda k: torch.tensor([k]),
}


def calls_of_a_batch(loader: Any) -> int:
    """Return the number of Python functions that the loop's thread calls in one `next()`."""
    batches, found, before = iter(loader), [], sys.getprofile()
    for _ in range(20):
        next(batches)
    gc.disable()  # a collection calls what others have registered
    try:
        for _ in range(5):
            calls: list[str] = []
            sys.setprofile(lambda frame, event, _, into=calls: into.append(event))  # type: ignore[misc]
            next(batches)
            sys.setprofile(before)
            found.append(calls.count("call"))
    finally:
        sys.setprofile(before)
        gc.enable()
    return min(found)


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_batch_calls_as_many_functions_whatever_its_size(kind: str) -> None:
    samples: Any = [SAMPLES[kind](k) for k in range(N)]
    few, many = (
        calls_of_a_batch(fastload.DataLoader(samples, size, shuffle=True)) for size in (32, 128)
    )
    assert few == many <= MOST


def test_a_mixture_calls_one_function_for_each_index_and_few_for_each_batch() -> None:
    sources = {name: TensorDataset(torch.arange(n)) for name, n in (("a", 3000), ("b", 5000))}
    mixture = Mixture(sources, weights={"a": 0.3, "b": 0.7})
    loader = fastload.DataLoader(mixture.dataset, 32, sampler=mixture, seed=0)
    assert calls_of_a_batch(loader) <= MOST + 32
