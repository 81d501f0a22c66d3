"""Promise: State that a sample stores in the dataset, a transform or a `collate_fn` is never seen by another worker.
This includes draws, indices, buffers, closures and partials.

Two workers read a sample each, in a forced order: the first stores its value, the second stores its value, the first
reads, the second reads. Workers that share the state give the first sample the second's value. Where else state may be
held is in tests/safety/test_random_graphs.py.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

import fastload
from tests.fakes import Sequencer


class InTurn(Sequencer):
    """Lets sample 0 store first, sample 1 store second, sample 0 read third and sample 1 read last.

    It works across copies, because all of them share it.
    """

    fastload_per_worker = ()

    def storing(self, index: int) -> AbstractContextManager[None]:
        return self(index)

    def reading(self, index: int) -> AbstractContextManager[None]:
        return self(2 + index)

    def __deepcopy__(self, memo: object) -> InTurn:
        return self  # `copy.deepcopy` refuses locks


class TwoSamples(Dataset[Any]):
    """The samples 0 and 1, each read by a worker of its own."""

    def __init__(self) -> None:
        self.in_turn = InTurn()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return index


def as_it_is(sample: Any) -> Any:
    return sample


def assert_samples(dataset: Any, wanted: list[Any], **options: Any) -> None:
    """Read the two samples in two workers: they are those that are wanted, and nothing is warned of."""
    arguments = {"batch_size": None, "collate_fn": as_it_is, "num_workers": 2, **options}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with fastload.DataLoader(dataset, **arguments) as loader:
            got = list(loader)
    assert (got, [str(warning.message) for warning in said]) == (wanted, [])


# ---- a buffer ----


class Collating:
    """Collects a batch in a buffer of its own."""

    def __init__(self) -> None:
        self.in_turn, self.buffer = InTurn(), np.zeros(1, int)

    def __call__(self, samples: list[int]) -> list[int]:
        (index,) = samples
        with self.in_turn.storing(index):
            self.buffer[0] = 100 + index
        with self.in_turn.reading(index):
            return self.buffer.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("held", ["attribute", "closure", "partial"])
def test_a_buffer_of_collate_fn(held: str) -> None:
    collate = Collating()
    collate_fn = {
        "attribute": collate,
        "closure": lambda samples: collate(samples),
        "partial": functools.partial(Collating.__call__, collate),
    }[held]
    assert_samples(TwoSamples(), [[100], [101]], batch_size=1, collate_fn=collate_fn)
