"""Promises:
- With `seed=s` the order is a pure function of `(s, epoch)`: an evenly drawn permutation, the same on every machine
  and in all later versions.
- An epoch begins, and any slice of its order is computed, without storing the order.
- A shuffle window of any size shuffles. One that is larger than the dataset shuffles all of it.
- A `RankSampler` without ranks warns if the environment names several ranks.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain, islice, product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler

import fastload
from fastload._kit.hashing import mix64
from fastload.order import state
from fastload.order.sampler import RankSampler, permuted, permuted_by_window, random_batches


@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_every_key_gives_a_permutation(n: int, key: int) -> None:
    assert sorted(permuted(np.arange(n), n, key).tolist()) == list(range(n))


@pytest.mark.slow
@pytest.mark.parametrize("windows", [False, True])
@given(n=st.integers(1, 10**12), key=st.integers(0, 2**64 - 1), data=st.data())
def test_any_slice_of_a_huge_order_is_had_alone(
    windows: bool, n: int, key: int, data: st.DataObject
) -> None:
    order: Callable[..., Any] = permuted
    if windows:
        run = data.draw(st.integers(1, 10**4))
        window = run + data.draw(st.integers(0, 10**5))
        order = partial(permuted_by_window, window=window, run=run)
    start = data.draw(st.integers(0, n - 1))
    positions = np.arange(start, min(start + 50, n))
    images = order(positions, n, key).tolist()
    assert len(set(images)) == len(positions)
    assert 0 <= min(images) <= max(images) < n
    assert [order(p[None], n, key).item() for p in positions] == images


@pytest.mark.parametrize(
    ("n", "orders"), [(3, 6), (4, 24), pytest.param(5, 120, marks=pytest.mark.slow)]
)
def test_all_orders_of_few_samples_are_about_equally_likely(n: int, orders: int) -> None:
    draws = 50 * orders
    counts = Counter(tuple(permuted(np.arange(n), n, mix64(s)).tolist()) for s in range(draws))
    expected = draws / orders
    chi_square = sum((counts[order] - expected) ** 2 / expected for order in counts)
    chi_square += (orders - len(counts)) * expected
    freedom = orders - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5  # 5 standard deviations of the statistic


def test_a_sample_is_anywhere_equally_likely_in_a_large_order() -> None:
    n, keys, bins = 5000, 4000, 20
    where = np.array([int(permuted(np.array([17]), n, mix64(s))[0]) for s in range(keys)])
    counts = np.bincount(where * bins // n, minlength=bins)
    chi_square = float((((counts - keys / bins) ** 2) / (keys / bins)).sum())
    assert chi_square < (bins - 1) + 5 * (2 * (bins - 1)) ** 0.5


def test_orders_of_neighbours_epochs_and_seeds_are_unrelated() -> None:
    order = permuted(np.arange(100_000), 100_000, mix64(1)).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.016  # 5 / sqrt(n)
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.016
    orders = set()
    for seed, epoch in product(range(5), range(5)):
        sampler = RankSampler(100, rank=0, world_size=1, seed=seed)
        sampler.set_epoch(epoch)
        orders.add(tuple(sampler))
    assert len(orders) == 25


def test_the_order_of_a_seed_is_the_same_for_ever() -> None:
    # A change of these numbers changes every run that was started with a seed, and needs a new major version.
    sampler = RankSampler(10, rank=0, world_size=1, seed=42)
    assert list(sampler) == [3, 5, 2, 4, 1, 9, 6, 0, 7, 8]
    sampler = RankSampler(10**9, rank=3, world_size=8, seed=7)
    sampler.set_epoch(2)
    pinned = [402442566, 581668979, 452120317, 853518477]
    assert sampler.indices(1000, 1004).tolist() == pinned
    assert sampler.indices(9, 9).tolist() == []
    # 8 TB if it were stored.
    assert 0 <= next(iter(RankSampler(10**12, rank=0, world_size=1))) < 10**12


# An iterator stays in the epoch in which it began, also where that is longer than the 8,192 positions that are computed
# at a time.

LONG = 20_000

DISTURBANCES: dict[str, Callable[[RankSampler], object]] = {
    "set_epoch": lambda sampler: sampler.set_epoch(5),
    "another iter()": iter,
    "another iterator, read": lambda sampler: list(islice(sampler, 10_000)),
    "set_epoch and another iterator": lambda sampler: (sampler.set_epoch(5), list(sampler)),
    "a loader's next epoch": lambda sampler: (sampler.begin_epoch(), sampler.begin_epoch()),
}


def long_orders(epochs: int) -> list[list[int]]:
    """Return the order of each epoch, each from a sampler that nobody disturbs."""
    orders = []
    for epoch in range(epochs):
        sampler = RankSampler(LONG, rank=0, world_size=1, seed=3)
        sampler.set_epoch(epoch)
        orders.append(sampler.indices(0, LONG).tolist())
    return orders


@pytest.mark.parametrize("after", [0, 8193])
@pytest.mark.parametrize("name", DISTURBANCES)
def test_an_iterator_stays_in_its_epoch(name: str, after: int) -> None:
    sampler = RankSampler(LONG, rank=0, world_size=1, seed=3)
    running = iter(sampler)
    got = list(islice(running, after))
    DISTURBANCES[name](sampler)
    got += running
    assert got == long_orders(1)[0]


def long_loader(workers: int, persistent: bool) -> fastload.DataLoader[int]:
    return fastload.DataLoader(
        range(LONG),  # type: ignore[arg-type]
        500,
        shuffle=True,
        seed=3,
        num_workers=workers,
        collate_fn=list,
        persistent_workers=persistent,
    )


@pytest.mark.parametrize(
    ("workers", "persistent", "taken"), [(0, False, 17), (2, False, 0), (2, True, 0), (2, True, 17)]
)
def test_an_epoch_of_a_loader_stays_the_one_it_began_as(
    workers: int, persistent: bool, taken: int
) -> None:
    orders = long_orders(8)
    with long_loader(workers, persistent) as loader:
        for began_as, then in [(0, 7), (7, 2), (2, 3)]:
            running = iter(loader)
            got = list(islice(running, taken))
            loader.set_epoch(then)
            assert list(islice(iter(loader.sampler), 10_000)) == orders[then][:10_000]
            got += running
            assert list(chain.from_iterable(got)) == orders[began_as]


def test_a_world_that_only_the_environment_knows_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match="WORLD_SIZE is 4 .* every rank all samples"):
        assert len(list(RankSampler(8))) == 8
    with pytest.warns(UserWarning, match="WORLD_SIZE is 4 .* every rank all samples"):
        assert len(list(fastload.DataLoader(range(8), sampler=RankSampler(8)))) == 8  # type: ignore[arg-type]
    assert len(list(RankSampler(8, rank=1, world_size=4))) == 2  # warnings are errors here


def test_ranks_that_meet_after_the_sampler_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning and Accelerate initialise torch.distributed after most programs have made their loaders."""
    sampler = RankSampler(8, shuffle=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    assert list(fastload.DataLoader(range(8), sampler=sampler)) == [1, 5]  # type: ignore[arg-type]
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert (sampler.rank, sampler.world_size) == (1, 4), (
        "they stay, also after the end of the group"
    )
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert list(sampler) == [0, 2, 4, 6], "an elastic job has met again, with fewer ranks"


def test_a_window_beyond_every_length_is_the_whole_order() -> None:
    order = list(RankSampler(100, seed=1, window=10**30, run=1))
    assert order == list(RankSampler(100, seed=1, window=1 << 62, run=1))
    assert sorted(order) == list(range(100))
    assert list(RankSampler(100, seed=1, window=10**30, run=10**30)) != list(range(100))


@pytest.mark.parametrize("length", [1, 12])
@pytest.mark.parametrize("count", [None, 4, 12, 29])
def test_random_batches_are_torch_s_from_the_same_draws(length: int, count: int | None) -> None:
    for size, drop_last, own in product((1, 3, 4, 40), (False, True), (False, True)):

        def sampler(own: bool = own, size: int = size, drop_last: bool = drop_last) -> BatchSampler:
            torch.manual_seed(1)
            generator = torch.Generator().manual_seed(3) if own else None
            samples = RandomSampler(range(length), num_samples=count, generator=generator)
            return BatchSampler(samples, size, drop_last)

        def drawn(batches: BatchSampler) -> list[float]:
            """What the generators give next."""
            given: torch.Generator | None = batches.sampler.generator  # type: ignore[attr-defined]
            return [torch.rand(1).item(), torch.rand(1, generator=given).item()]

        theirs = sampler()
        expected = [list(theirs), drawn(theirs)]
        ours = sampler()
        assert [list(random_batches(ours)), drawn(ours)] == expected


def test_every_field_of_a_state_is_compared_or_says_how_far_the_epoch_is() -> None:
    how_far = {
        "epoch",
        "sampler_epoch",
        "ended",
        "stream_seed",
        "batches",
        "position",
        "ahead",
        "ahead_on_rank",
    }
    how_far |= {"draws", "sampler_state", "checksum", "checksum_on_rank", "turn", "lanes"}
    for kind in (state.SampledState, state.IterableState):
        fields = {field.name for field in dataclasses.fields(kind)}
        assert fields - how_far <= state._REMEDIES.keys()
