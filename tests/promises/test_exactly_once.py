"""Promises:
- Every index is delivered exactly once, in the sampler's order, for any number of workers, any batch size, with and
  without `drop_last`, over several epochs.
- With `seed=None`, and samples that draw no random numbers, the batches are those of torch's DataLoader under the same
  `torch.manual_seed`. This holds for all of torch's samplers, `batch_sampler`, `batch_size=None` and persistent workers.
- With `seed=s` the order is a pure function of `(s, epoch)`.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate, chain, count, islice
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import fastload
from fastload.batch import Batch
from fastload.order import SampledOrder
from tests.fakes import Numbers

WORKERS = [0, 1, 4, 32]


@pytest.fixture(autouse=True)
def _threads_switch_often() -> Iterator[None]:
    """Let threads interleave about every bytecode, so that a lost or doubled sample shows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class Counted(Dataset[int]):
    """`length` samples, each its own index; `reads` holds the indices in the order of reading."""

    fastload_per_worker = ()  # one for all workers, to be looked at

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads: list[int] = []  # list.append is atomic

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.reads.append(index)
        return index


class Shuffled(Sampler[int]):
    """A new order each epoch; `epochs` holds those it gave."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epochs: list[list[int]] = []
        self.threads: set[int] = set()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(len(self.epochs))
        order = torch.randperm(self.length, generator=generator).tolist()
        self.epochs.append(order)
        for index in order:
            self.threads.add(threading.get_ident())
            yield index


def batches_of(order: list[int], batch_size: int, drop_last: bool) -> list[list[int]]:
    cut = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    return [batch for batch in cut if len(batch) == batch_size or not drop_last]


def plain(batch: Any) -> Any:
    """Return a batch as Python lists, which compare by value."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [plain(part) for part in batch] if isinstance(batch, list | tuple) else batch


@pytest.mark.parametrize(("batch_size", "drop_last"), [(7, False), (64, True)])
@pytest.mark.parametrize(
    ("workers", "persistent"),
    [(workers, False) for workers in WORKERS] + [(workers, True) for workers in WORKERS[1:]],
)
def test_a_thousand_samples_in_the_samplers_order(
    workers: int, batch_size: int, drop_last: bool, persistent: bool
) -> None:
    dataset, sampler = Counted(1000), Shuffled(1000)
    loader = fastload.DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        num_workers=workers,
        drop_last=drop_last,
        persistent_workers=persistent,
    )
    with loader:
        for epoch in range(3):
            dataset.reads.clear()
            got = [batch.tolist() for batch in loader]
            expected = batches_of(sampler.epochs[epoch], batch_size, drop_last)
            assert got == expected
            assert len(got) == len(loader)
            delivered = Counter(index for batch in expected for index in batch)
            assert Counter(dataset.reads) == delivered, "read is what is delivered, once each"
            stats = loader.stats()
            assert (stats.batches, stats.samples) == (len(got), delivered.total())
            assert (stats.errors, stats.workers) == (0, workers)
    assert len(sampler.epochs) == 3
    assert sampler.threads == {threading.get_ident()}, "the sampler runs on the loop's thread only"


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_any_order_of_arrival_loses_and_doubles_nothing(workers: int) -> None:
    loader = fastload.DataLoader(Counted(1000), 7, num_workers=workers, in_order=False)
    for _ in range(3):
        got = [batch.tolist() for batch in loader]
        assert sorted(got) == batches_of(list(range(1000)), 7, drop_last=False)


class Pairs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """S2's samples, one at a time: x = 1..10 beside y = 10..1."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(index + 1.0), torch.tensor(10.0 - index)


@pytest.mark.parametrize("workers", [0, 2, 4])
@pytest.mark.parametrize(("batch_size", "sizes"), [(5, [5, 5]), (7, [7, 3])])
@pytest.mark.parametrize("kind", ["tensors", "samples"])
def test_the_users_example_keeps_pairs_together(
    kind: str, batch_size: int, sizes: list[int], workers: int
) -> None:
    tensors = TensorDataset(torch.linspace(1, 10, 10), torch.linspace(10, 1, 10))
    dataset: Dataset[Any] = tensors if kind == "tensors" else Pairs()
    loader = fastload.DataLoader(
        dataset=dataset, batch_size=batch_size, shuffle=True, num_workers=workers
    )
    orders = []
    for _ in range(3):
        steps = list(loader)
        assert [type(step) for step in steps] == [list, list]
        assert [(len(x), len(y)) for x, y in steps] == [(size, size) for size in sizes]
        assert all((x + y == 11).all() for x, y in steps)
        seen = torch.cat([x for x, _ in steps]).tolist()
        assert sorted(seen) == list(range(1, 11))
        orders.append(seen)
    assert orders[0] != orders[1], "a new order every epoch"


Arguments = Callable[[], dict[str, Any]]

TORCH_ARGUMENTS: dict[str, Arguments] = {
    "as it comes": lambda: {"batch_size": 7},
    "one by one": lambda: {},
    "shuffle": lambda: {"batch_size": 7, "shuffle": True},
    "shuffle, drop_last": lambda: {"batch_size": 7, "shuffle": True, "drop_last": True},
    "all dropped": lambda: {"batch_size": 500, "drop_last": True},
    "generator": lambda: {
        "batch_size": 7,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(3),
    },
    "generator, sampler of its own": lambda: {
        "batch_size": 7,
        "sampler": RandomSampler(range(100), generator=torch.Generator().manual_seed(4)),
        "generator": torch.Generator().manual_seed(3),
    },
    "with replacement": lambda: {
        "batch_size": 7,
        "sampler": RandomSampler(range(100), replacement=True, num_samples=250),
    },
    "weighted": lambda: {
        "batch_size": 7,
        "sampler": WeightedRandomSampler([1.0 + i % 5 for i in range(100)], 80),
    },
    "subset": lambda: {"batch_size": 7, "sampler": SubsetRandomSampler(range(20, 90))},
    "sampler that is a list": lambda: {"batch_size": 7, "sampler": [5, 5, 3, 99, 0, 1, 2, 3, 4]},
    "distributed": lambda: {
        "batch_size": 7,
        "sampler": DistributedSampler(range(100), num_replicas=3, rank=1, seed=5),
    },
    "batch sampler": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(100)), 9, drop_last=True)
    },
    "batches of any size": lambda: {
        "batch_sampler": [[3], [1, 4, 1, 5, 9, 2, 6], [5, 3], list(range(50)), [8, 9, 7], [9, 3]]
    },
    "no batches": lambda: {"batch_size": None},
    "no batches, sampler of lists": lambda: {
        "batch_size": None,
        "sampler": BatchSampler(SequentialSampler(range(100)), 6, drop_last=False),
    },
}


class Rows(Dataset[Any]):
    """100 samples of an index and a row; a list of indices (`batch_size=None`) gives a stack."""

    table = torch.arange(300.0).reshape(100, 3)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int | list[int]) -> Any:
        return index, self.table[index]


def three_epochs(loader: torch.utils.data.DataLoader[Any]) -> list[Any]:
    """Return each epoch's batches, its length, and where it leaves the global generator."""
    epochs: list[Any] = []
    for epoch in range(3):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        epochs.append([plain(batch) for batch in loader])
        epochs.append(len(loader))
        epochs.append(torch.random.get_rng_state().tolist())
    return epochs


@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str
)
@pytest.mark.parametrize("name", TORCH_ARGUMENTS)
def test_the_batches_and_the_draws_are_torchs_own(name: str, workers: dict[str, Any]) -> None:
    make = TORCH_ARGUMENTS[name]
    torch.manual_seed(11)
    expected = three_epochs(torch.utils.data.DataLoader(Rows(), **make(), **workers))
    torch.manual_seed(11)
    loader = fastload.DataLoader(Rows(), **make(), **workers)
    with loader:
        got = three_epochs(loader)
    assert got[0] == expected[0], "the first epoch"
    assert got == expected


@hypothesis.given(
    length=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    workers=st.integers(0, 6),
    prefetch=st.one_of(st.none(), st.integers(1, 4)),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(max_examples=60)
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
        loader = kind(Counted(length), batch_size, shuffle, drop_last=drop_last, **options)
        return [plain(list(loader)), plain(list(loader)), len(loader)]

    expected = two_epochs(torch.utils.data.DataLoader)
    got = two_epochs(fastload.DataLoader, num_workers=workers, prefetch_batches=prefetch)
    assert got == expected


@pytest.mark.parametrize("workers", [0, 3])
def test_the_end_stays_the_end(workers: int) -> None:
    empty = fastload.DataLoader(Counted(0), 4, num_workers=workers)
    assert len(empty) == 0
    assert [list(empty), list(empty)] == [[], []]
    iterator = iter(fastload.DataLoader(Counted(10), 4, num_workers=workers))
    assert len(list(iterator)) == 3
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_an_epoch_left_in_the_middle_takes_nothing_from_the_next(
    workers: int, persistent: bool
) -> None:
    loader = fastload.DataLoader(
        Counted(100), 7, num_workers=workers, persistent_workers=persistent
    )
    with loader:
        for taken in (0, 1, 5, 14):
            iterator = iter(loader)
            got = [next(iterator).tolist() for _ in range(taken)]
            assert got == batches_of(list(range(100)), 7, drop_last=False)[:taken]
        assert [b.tolist() for b in loader] == batches_of(list(range(100)), 7, drop_last=False)


@pytest.mark.parametrize("workers", [0, 4])
def test_an_endless_sampler_is_never_drained(workers: int) -> None:
    drawn = []

    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            for number in count():
                drawn.append(number)
                yield number % 10

    loader = fastload.DataLoader(Counted(10), 5, sampler=Endless(), num_workers=workers)
    iterator = iter(loader)
    for number, batch in enumerate(islice(iterator, 50)):
        assert batch.tolist() == [(number * 5 + i) % 10 for i in range(5)]
        assert len(drawn) <= (number + 1 + loader.stats().depth) * 5
    loader.close()


# seed=s: a pure function of (s, epoch).


def seeded(seed: int, **options: Any) -> fastload.DataLoader[Any]:
    return fastload.DataLoader(Counted(100), 7, shuffle=True, seed=seed, **options)


def test_a_seed_makes_the_order_a_function_of_seed_and_epoch() -> None:
    torch.manual_seed(1)
    epochs = [plain(list(loader)) for loader in [seeded(5)] * 3]
    assert all(sorted(chain.from_iterable(epoch)) == list(range(100)) for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) == 3, "each epoch has an order of its own"
    torch.manual_seed(2)
    for workers in (0, 1, 4):
        loader = seeded(5, num_workers=workers)
        assert [plain(list(loader)) for _ in range(3)] == epochs, "on nothing but (seed, epoch)"
    assert plain(list(seeded(6))) != epochs[0]


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_set_epoch_fixes_the_next_epoch(workers: int, persistent: bool) -> None:
    reference = seeded(5)
    epochs = [plain(list(reference)) for _ in range(5)]
    with seeded(5, num_workers=workers, persistent_workers=persistent) as loader:
        numbers = []
        for epoch in (3, 0, 4, 2):
            loader.set_epoch(epoch)
            assert plain(list(loader)) == epochs[epoch]
            numbers.append(loader.stats().epoch)
        assert plain(list(loader)) == epochs[3], "after epoch 2 comes epoch 3"
        assert [*numbers, loader.stats().epoch] == [3, 0, 4, 2, 3]


def test_an_epoch_left_in_the_middle_counts_as_an_epoch() -> None:
    reference = seeded(5)
    epochs = [plain(list(reference)) for _ in range(3)]
    loader = seeded(5, num_workers=2)
    assert plain(list(islice(loader, 3))) == epochs[0][:3]
    assert plain(list(islice(loader, 1))) == epochs[1][:1]
    assert plain(list(loader)) == epochs[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_seed_draws_nothing_from_the_global_generator(workers: int) -> None:
    state = torch.random.get_rng_state()
    assert len(list(seeded(5, num_workers=workers))) == 15
    assert torch.equal(torch.random.get_rng_state(), state)


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
    with fastload.DataLoader(
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

    iterator = iter(fastload.DataLoader(Rows(), batch_sampler=Gap(), num_workers=2))
    next(iterator)
    with pytest.raises(OSError, match="out of the sampler"):
        next(iterator)
    assert len(list(iterator)) == 2
    assert [(batch.ordinal, batch.position) for batch in issued] == [(0, 0), (1, 1), (2, 1), (3, 4)]


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
def test_a_batch_sampler_may_give_what_is_no_list(workers: int) -> None:
    """As in torch, `__getitems__` gets it as it is: a slice, a generator."""
    expected = [
        batch.tolist() for batch in torch.utils.data.DataLoader(ByKey(), batch_sampler=Keys())
    ]
    loader: Any = fastload.DataLoader(
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


@pytest.mark.parametrize("key", [slice(0, 2), (k for k in (0, 1))], ids=["slice", "generator"])
def test_an_error_for_what_is_no_list_stays_that_error(key: Any) -> None:
    class Broken(ByKey):
        def __getitems__(self, key: Any) -> list[int]:
            list(key) if not isinstance(key, slice) else None
            raise OSError(errno.EIO, "simulated")

    loader: Any = fastload.DataLoader(
        Broken(), batch_sampler=[key], num_workers=1, on_error="skip", retries=1, seed=1
    )
    with loader, pytest.raises(OSError, match="simulated"):
        next(iter(loader))


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
    loader = fastload.DataLoader(dataset, batch_sampler=Reusing(container), num_workers=2)
    assert torch.cat(list(loader)).tolist() == list(range(24))
