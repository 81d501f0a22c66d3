"""Promises:
- In threads, what draws from `torch.random.thread_safe_generator()` draws the sample's numbers, the same for any number
  and kind of workers.
- As soon as torch's DataLoader has thread workers, the same programs run through both loaders, and give the same.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

import fastload
from tests.contracts.workers import TORCH_ARGUMENTS, Rows, epochs_and_draws

ITS_OWN = "worker_method" in inspect.signature(TorchLoader).parameters

generator = getattr(torch.random, "thread_safe_generator", None)
needs_generator = pytest.mark.skipif(generator is None, reason="this torch has no such function")


class Draws(Dataset[Any]):
    """An index, and two numbers drawn as torchvision is going to draw them."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        assert generator is not None
        first = torch.rand(2, generator=generator())
        return index, first, torch.rand(2, generator=generator())


def batches(dataset: Any, workers: int, **options: Any) -> list[Any]:
    loader = fastload.DataLoader(dataset, batch_size=4, num_workers=workers, seed=3, **options)
    with loader:
        return [[torch.as_tensor(part).tolist() for part in batch] for batch in loader]


@needs_generator
def test_the_generator_of_a_thread_worker_is_the_sample_s() -> None:
    expected = batches(Draws(), 0)
    numbers = [number for batch in expected for pair in batch[1:] for row in pair for number in row]
    assert len(set(numbers)) == len(numbers) == 80
    for workers in (1, 3):
        assert batches(Draws(), workers, worker_method="thread") == expected
    assert batches(Draws(), 2, worker_method="process") == expected


@needs_generator
def test_outside_of_a_worker_there_is_none() -> None:
    assert generator is not None
    assert generator() is None


# ---- torch's own thread workers ----


@pytest.mark.skipif(not ITS_OWN, reason="this torch has no thread workers (pytorch#161044)")
@pytest.mark.parametrize("persistent", [False, True])
def test_torch_s_threads_and_ours_give_the_same(
    persistent: bool, subtests: pytest.Subtests
) -> None:
    options = {"num_workers": 2, "persistent_workers": persistent, "worker_method": "thread"}

    def seen(kind: Any, arguments: dict[str, Any]) -> list[Any]:
        torch.manual_seed(11)
        return epochs_and_draws(kind(Rows(), **arguments, **options))

    for name, arguments in TORCH_ARGUMENTS.items():
        with subtests.test(name):
            assert seen(fastload.DataLoader, arguments()) == seen(TorchLoader, arguments())
