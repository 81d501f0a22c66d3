"""What the tests of this folder share: a library or a skip, and pairs read by eight workers and compared.

A pair is a sample of two parts that must belong together: an image and its label after the same crop,
or what was read and what should have been. Each library stays as it is: nothing in it is slowed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastload import DataLoader
from fastload.errors import DatasetCopyError

WORKERS = 8
PAIRS = 2_048


def library(name: str) -> ModuleType:
    """Import `name` or skip the test file; warnings at its import are the library's own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: ModuleType = pytest.importorskip(name)
        return module


class Pairs(Dataset[Any]):
    """`PAIRS` samples of a subclass that defines `__getitem__`."""

    def __len__(self) -> int:
        return PAIRS


def batches(dataset: Any, **options: Any) -> Iterator[Any]:
    """Yield the batches of one epoch, loaded by eight workers."""
    with DataLoader(dataset, **{"batch_size": 32, "num_workers": WORKERS, **options}) as loader:
        yield from loader


def wrong_pairs(dataset: Any, **options: Any) -> int:
    """Load one epoch and return how many pairs differ between their two parts."""
    seen = wrong = 0
    for first, second in batches(dataset, **options):
        seen += len(first)
        wrong += count_different(first, second)
    assert seen == PAIRS
    return wrong


def count_different(first: Any, second: Any) -> int:
    """Return how many rows of two batches differ. Rows are strings, or arrays compared by value."""
    if not isinstance(first, torch.Tensor):
        return sum(a != b for a, b in zip(first, second, strict=True))
    assert first.shape == second.shape
    return int((first != second).reshape(len(first), -1).any(dim=1).sum())


def sample_image(index: int, *shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return an array in which each element says its own place and the sample's index."""
    size = int(np.prod(shape))
    return (np.arange(size, dtype=np.float32) + index * size % 65_536).reshape(shape)


def filled(value: Any) -> torch.Tensor:
    """Return 64 numbers that all say `value`, or the numbers that bytes or a range hold."""
    if isinstance(value, int):
        return torch.full((64,), value, dtype=torch.int64)
    if isinstance(value, range):
        return torch.tensor(value).repeat_interleave(64)
    return torch.frombuffer(bytearray(value), dtype=torch.int64)


@contextlib.contextmanager
def refused(place: str) -> Iterator[None]:
    """Expect that `iter()` refuses what is open at `place`, and says what to do."""
    with pytest.raises(DatasetCopyError, match=place) as caught:
        yield
    assert "__getitem__" in str(caught.value)
    assert "None" in str(caught.value)


class Holder:
    """A transform that holds something under a name."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)
