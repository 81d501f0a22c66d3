"""Promises:
- Every index is delivered exactly once, in the sampler's order, for any number of workers, any batch size, with and
  without `drop_last`, over several epochs. See also `tests/contracts/workers.py`.
- With `seed=None`, and samples that draw no random numbers, the batches are those of torch's DataLoader under the same
  `torch.manual_seed`. This holds for all of torch's samplers, `batch_sampler`, `batch_size=None`, `generator` and
  persistent workers. See also `tests/contracts/workers.py`.
- With `seed=s` the order is a pure function of `(s, epoch)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import Sampler

from fastload import DataLoader, random_stream
from tests.contracts.workers import plain
from tests.fakes import Draws, Numbers, hasty


@pytest.fixture(autouse=True)
def _threads_switch_often() -> Iterator[None]:
    """Let threads interleave about every bytecode, so that a lost or doubled sample shows."""
    with hasty():
        yield


@hypothesis.given(
    length=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    workers=st.integers(0, 6),
    prefetch=st.one_of(st.none(), st.integers(1, 4)),
    seed=st.integers(0, 2**31),
)
def test_any_arguments_give_torchs_batches(
    length: int,
    batch_size: int,
    drop_last: bool,
    shuffle: bool,
    workers: int,
    prefetch: int | None,
    seed: int,
) -> None:
    def two_epochs(kind: type[Any], **options: Any) -> list[Any]:
        torch.manual_seed(seed)
        loader = kind(Numbers(length), batch_size, shuffle, drop_last=drop_last, **options)
        return [plain(list(loader)), plain(list(loader)), len(loader)]

    expected = two_epochs(torch.utils.data.DataLoader)
    got = two_epochs(DataLoader, num_workers=workers, prefetch_batches=prefetch)
    assert got == expected


def test_a_failure_of_the_sampler_takes_a_place_and_no_position() -> None:
    """So all later samples draw as if it had not been."""

    class Gap(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            return map(self.batch, range(4))

        def batch(self, n: int) -> list[int]:
            if n == 1:
                raise OSError("out of the sampler")
            return [n] * (n + 1)

    loader = DataLoader(Draws(4), batch_sampler=Gap(), num_workers=2, seed=1)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(OSError, match="out of the sampler"):
        next(iterator)
    state = loader.state_dict()
    rest = plain(list(iterator))
    drawn = [pair for indices, numbers in rest for pair in zip(indices, numbers, strict=True)]
    assert [index for index, _ in drawn] == [2] * 3 + [3] * 4
    for position, (index, number) in enumerate(drawn, 1):
        with random_stream(seed=1, epoch=0, position=position, index=index):
            assert number == torch.rand(()).item()
    loader.load_state_dict(state)
    assert plain(list(loader)) == rest, "it counts as handed out"


class Together(Numbers):
    """Reads a batch in one call."""

    def __getitems__(self, indices: Any) -> list[int]:
        return [int(index) for index in indices]


class Reusing(torch.utils.data.Sampler[Any]):
    """A batch sampler that gives the same container again, with other indices in it."""

    def __init__(self, container: Any) -> None:
        self.container = container

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, 24, 4):
            for k in range(4):
                self.container[k] = first + k
            yield self.container


@pytest.mark.parametrize("dataset", [Numbers(24), Together(24)], ids=["single", "together"])
@pytest.mark.parametrize(
    "container", [[0] * 4, np.zeros(4, int), torch.zeros(4, dtype=torch.int64)]
)
def test_a_sampler_may_use_its_batch_again(dataset: Numbers, container: Any) -> None:
    loader = DataLoader(dataset, batch_sampler=Reusing(container), num_workers=2)
    assert torch.cat(list(loader)).tolist() == list(range(24))
