"""Promises:
- Mixtures, batches by a budget, packed rows and windows have the same global batches and drawn numbers for 1, 2, 3 and
  8 ranks, with 0, 2 or 8 workers.
- After a stop at any batch, any number of ranks resumes them with the same global batch. All that follows is equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np
import pytest
import torch

import fastload
from fastload import RankSampler
from fastload.sequences import Mixture, Packed, TokenBatchSampler, TokenWindows
from tests.fakes import Draws

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
GLOBAL_BATCH = 24
Case = Callable[..., "fastload.DataLoader[Any]"]


class Marked(Draws):
    """The same with a mark, which keeps a batch together."""

    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), 0


def mixture(rank: int, world: int, options: dict[str, Any], **arguments: Any) -> Any:
    mixed = Mixture(
        {"web": 131, "code": 40, "books": 17},
        seed=3,
        rank=rank,
        world_size=world,
        **{"weights": {"web": 5, "code": 3, "books": 1}, **arguments},
    )
    size = GLOBAL_BATCH // world
    return fastload.DataLoader(Draws(188), batch_size=size, sampler=mixed, seed=7, **options)


def by_quota(rank: int, world: int, **options: Any) -> Any:
    schedule = {0: {"web": 5, "code": 3, "books": 1}, 4: {"web": 1, "code": 1, "books": 1}}
    return mixture(rank, world, options, weights=schedule)


def by_quota_until_one_ends(rank: int, world: int, **options: Any) -> Any:
    return mixture(rank, world, options, on_exhausted="stop")


def by_ramp_until_all_end(rank: int, world: int, **options: Any) -> Any:
    def ramp(step: int) -> dict[str, float]:
        return {"web": 1, "code": 1 + step, "books": max(0, 3 - step)}

    return mixture(rank, world, options, weights=ramp, on_exhausted="drop")


def by_budget(rank: int, world: int, **options: Any) -> Any:
    lengths = [1 + index * 37 % 50 for index in range(400)]
    batches = TokenBatchSampler(
        lengths, budget=200, pool=100, batches_per_step=24, rank=rank, world_size=world, seed=3
    )
    return fastload.DataLoader(Marked(400), batch_sampler=batches, seed=7, **options)


def in_rows(rank: int, world: int, dataset: Any, options: dict[str, Any]) -> Any:
    sampler = RankSampler(dataset, rank=rank, world_size=world, seed=3, ends="drop")
    options |= {"batch_size": GLOBAL_BATCH // world, "drop_last": True}
    return fastload.DataLoader(dataset, sampler=sampler, seed=7, **options)


@functools.cache
def packed_texts() -> Packed:
    lengths = [1 + index * 37 % 50 for index in range(400)]
    texts = [torch.arange(length) + index for index, length in enumerate(lengths)]
    return Packed(texts, 64, lengths=lengths)


def packed(rank: int, world: int, **options: Any) -> Any:
    return in_rows(rank, world, packed_texts(), options)


def windows(rank: int, world: int, **options: Any) -> Any:
    return in_rows(rank, world, TokenWindows(STREAM, 8, end=0), options)


CASES = [by_quota, by_quota_until_one_ends, by_ramp_until_all_end, by_budget, packed, windows]
SOME = [
    pytest.param(case, marks=() if case in (by_quota, by_budget) else pytest.mark.slow)
    for case in CASES
]
STREAM = ""


@pytest.fixture(scope="module", autouse=True)
def _stream(tmp_path_factory: pytest.TempPathFactory) -> None:
    global STREAM
    STREAM = str(tmp_path_factory.mktemp("stream") / "tokens.npy")
    np.save(STREAM, np.arange(1600, dtype=np.uint16) % 13)


def items(batches: tuple[Any, ...]) -> list[Any]:
    """Return what all ranks got in a step, in the order of all ranks: samples, or whole batches of a token budget."""
    fields = [batch.values() if isinstance(batch, dict) else batch for batch in batches]
    ranks = [list(zip(*(part.tolist() for part in batch), strict=True)) for batch in fields]
    if len(batches[0]) == 3:  # marked by `Marked`
        return ranks
    return [*chain.from_iterable(zip(*ranks, strict=True))]


def epoch(loaders: list[Any]) -> list[Any]:
    return [*chain.from_iterable(map(items, zip(*loaders, strict=True)))]


def epochs(loaders: list[Any]) -> list[Any]:
    return [*chain.from_iterable(epoch(loaders) for _ in range(3))]


def world_of(case: Case, world: int, **options: Any) -> list[Any]:
    return [case(rank, world, **options) for rank in range(world)]


def close(loaders: list[Any]) -> None:
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_ranks_gets_the_same_global_batches(case: Case) -> None:
    expected = epochs(world_of(case, 1))
    for world in (2, 3, 8):
        assert epochs(world_of(case, world)) == expected


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_workers_gets_the_same_global_batches(case: Case) -> None:
    """With two workers and with processes: see `test_workers_resume_too`."""
    loaders = world_of(case, 3, num_workers=8, worker_method="thread")
    assert epoch(loaders) == epoch(world_of(case, 1))
    close(loaders)


@pytest.mark.parametrize("case", SOME)
def test_any_world_resumes_after_any_batch(case: Case) -> None:
    whole = world_of(case, 1)
    parts = [epoch(whole) for _ in range(3)]
    expected, ends = [*chain(*parts)], {*accumulate(map(len, parts))}
    for turn, (before_world, after_world) in enumerate(((1, 3), (3, 8), (8, 2), (2, 1))):
        loaders, delivered = world_of(case, before_world), list[Any]()
        for _ in range(2):
            for step, batches in enumerate(zip(*loaders, strict=True)):
                delivered += items(batches)
                if len(delivered) % after_world:
                    continue  # within an optimizer step of whole batches
                if step % 8 != 2 * turn:
                    continue  # a stop at each second batch by one of the pairs
                resumed = world_of(case, after_world)
                for loader in resumed:
                    loader.load_state_dict(loaders[-1].state_dict())
                rest = epoch(resumed)
                assert rest == expected[len(delivered) :][: len(rest)]
                assert len(delivered) + len(rest) in ends
                if step < 4:  # and the epoch after it
                    rest += epoch(resumed)
                    assert rest == expected[len(delivered) :][: len(rest)]
        assert delivered == expected[: len(delivered)]


@pytest.mark.parametrize(
    ("method", "case"), [*(("thread", case) for case in CASES), ("process", packed)]
)
def test_workers_resume_too(case: Case, method: str) -> None:
    expected = epoch(world_of(case, 1))
    stopped = world_of(case, 2, num_workers=2, worker_method=method)
    taken = [*chain.from_iterable(map(items, islice(zip(*stopped, strict=True), 3)))]
    resumed = world_of(case, 1, num_workers=2, worker_method=method)
    for loader in resumed:
        loader.load_state_dict(stopped[1].state_dict())
    assert taken + epoch(resumed) == expected
    close([*stopped, *resumed])
