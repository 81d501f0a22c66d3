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
from itertools import accumulate, islice
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, Dataset, Sampler

from fastload import DataLoader
from fastload.memory.batch import Batch
from fastload.order.batches import SampledOrder
from tests.contracts.workers import plain
from tests.fakes import Numbers, hasty


@pytest.fixture(autouse=True)
def _threads_switch_often() -> Iterator[None]:
    """Let threads interleave about every bytecode, so that a lost or doubled sample shows."""
    with hasty():
        yield


class Rows(Dataset[Any]):
    """100 samples of an index and a row; a list of indices (`batch_size=None`) gives a stack."""

    table = torch.arange(300.0).reshape(100, 3)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int | list[int]) -> Any:
        return index, self.table[index]


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


# seed=s: a pure function of (s, epoch).


# The place of a batch: all that a sample may depend on besides its index.

UNEVEN = [[5, 6, 7, 8, 9], [0], [], [3, 4], list(range(60, 97)), [99]]

PLACED: dict[str, tuple[dict[str, Any], list[int]]] = {  # arguments, and the size of each batch
    "last batch shorter": ({"batch_size": 7, "shuffle": True}, [7] * 14 + [2]),
    "drop_last": ({"batch_size": 7, "shuffle": True, "drop_last": True}, [7] * 14),
    "uneven": ({"batch_sampler": UNEVEN, "collate_fn": list}, [5, 1, 0, 2, 37, 1]),
    "no batches": ({"batch_size": None}, [1] * 100),
    "batches out of a sampler": (
        {"batch_size": None, "sampler": BatchSampler(range(100), 7, drop_last=False)},
        [7] * 14 + [2],
    ),
    "seed": ({"batch_size": 7, "shuffle": True, "seed": 5}, [7] * 14 + [2]),
}


@pytest.fixture
def issued(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Every batch, as the order gives it to the loader."""
    batches: list[Batch] = []
    following = SampledOrder.__next__

    def watched(order: SampledOrder) -> Batch:
        batches.append(following(order))
        return batches[-1]

    monkeypatch.setattr(SampledOrder, "__next__", watched)
    return batches


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("name", PLACED)
def test_every_batch_knows_its_place(
    name: str, workers: int, persistent: bool, issued: list[Batch]
) -> None:
    options, sizes = PLACED[name]
    before = list(accumulate(sizes, initial=0))
    with DataLoader(
        Rows(), **options, num_workers=workers, persistent_workers=persistent
    ) as loader:
        for begun, epoch in enumerate([0, 1, 2, 8, 9]):
            if epoch == 8:
                loader.set_epoch(8)
            if begun == 1:  # left in the middle
                for _ in islice(loader, 3):
                    pass
                loader.set_epoch(1)
            assert len(list(loader)) == len(sizes)
            # With persistent workers some of the next epoch's are issued by now, and some of its own before.
            mine = [batch for batch in issued if batch.epoch == epoch][-len(sizes) :]
            assert [batch.epoch for batch in mine] == [epoch] * len(sizes)
            assert [batch.ordinal for batch in mine] == list(range(len(sizes)))
            assert [batch.position for batch in mine] == before[:-1]
            assert [batch.size for batch in mine] == sizes


def test_a_failure_of_the_sampler_takes_a_place_and_no_position(issued: list[Batch]) -> None:
    class Gap(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            return map(self.batch, range(4))

        def batch(self, n: int) -> list[int]:
            if n == 1:
                raise OSError("out of the sampler")
            return [n] * (n + 1)

    loader = DataLoader(Rows(), batch_sampler=Gap(), num_workers=2, seed=1)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(OSError, match="out of the sampler"):
        next(iterator)
    state = loader.state_dict()
    rest = plain(list(iterator))
    assert len(rest) == 2
    assert [(batch.ordinal, batch.position) for batch in issued] == [(0, 0), (1, 1), (2, 1), (3, 4)]
    loader.load_state_dict(state)
    assert plain(list(loader)) == rest, "it counts as handed out"


class ByKey(Dataset[int]):
    """Reads whatever a batch sampler gives, in one call."""

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, key: Any) -> list[int]:
        return list(range(*key.indices(12))) if isinstance(key, slice) else list(key)


def keys() -> list[Any]:
    return [slice(0, 4), (k for k in (5, 4, 7)), slice(7, 12, 2), [1, 2], (3,), range(2)]


class Keys:
    def __iter__(self) -> Iterator[Any]:
        return iter(keys())


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_of_slices_and_generators_resumes(workers: int) -> None:
    """As in torch, `__getitems__` gets each as it is, and a generator is read once."""
    expected = [
        batch.tolist() for batch in torch.utils.data.DataLoader(ByKey(), batch_sampler=Keys())
    ]
    loader: Any = DataLoader(
        ByKey(),
        batch_sampler=Keys(),  # type: ignore[arg-type]
        num_workers=workers,
        seed=1,
    )
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(2)] == expected[:2]
    state = loader.state_dict()
    loader.close()
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == expected[2:]
    loader.close()


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


class Indices(list[int]):
    """A list of the sampler's own."""


@pytest.mark.parametrize("dataset", [Numbers(24), Together(24)], ids=["single", "together"])
@pytest.mark.parametrize(
    "container", [[0] * 4, Indices([0] * 4), np.zeros(4, int), torch.zeros(4, dtype=torch.int64)]
)
def test_a_sampler_may_use_its_batch_again(dataset: Numbers, container: Any) -> None:
    loader = DataLoader(dataset, batch_sampler=Reusing(container), num_workers=2)
    assert torch.cat(list(loader)).tolist() == list(range(24))
