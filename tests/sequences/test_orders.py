"""Promises:
- Mixtures give the same global batches, drawn numbers included, for 1, 2, 3 and 8 ranks, with 0, 2 or 8 workers of both
  kinds.
- After a stop at any batch, any number of ranks resumes them with the same global batch. All that follows is equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch

import fastload
from fastload.sequences.mixture import Mixture
from tests.fakes import Numbers

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
GLOBAL_BATCH = 24
WORLDS = (1, 2, 3, 8)
Case = Callable[..., "fastload.DataLoader[Any]"]


class Draws(Numbers):
    """An index and a number drawn for it."""

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(()))


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
    schedule = [(0, {"web": 5, "code": 3, "books": 1}), (4, {"web": 1, "code": 1, "books": 1})]
    return mixture(rank, world, options, weights=schedule)


def by_draw_until_one_ends(rank: int, world: int, **options: Any) -> Any:
    return mixture(rank, world, options, by="draw", on_exhausted="stop")


def by_ramp_until_all_end(rank: int, world: int, **options: Any) -> Any:
    def ramp(step: int) -> dict[str, float]:
        return {"web": 1, "code": 1 + step, "books": max(0, 3 - step)}

    return mixture(rank, world, options, weights=ramp, on_exhausted="drop")


CASES = [by_quota, by_draw_until_one_ends, by_ramp_until_all_end]


def samples(batches: tuple[Any, ...]) -> list[Any]:
    """Return the samples of the ranks' batches of one step, in the order of all ranks."""
    ranks = [list(zip(*(part.tolist() for part in batch), strict=True)) for batch in batches]
    return [*chain.from_iterable(zip(*ranks, strict=True))]


def steps(loaders: list[Any]) -> Iterator[list[Any]]:
    """Yield what all ranks get in each step of an epoch."""
    for batches in zip(*loaders, strict=True):
        yield samples(batches)


def world_of(case: Case, world: int, **options: Any) -> list[Any]:
    return [case(rank, world, **options) for rank in range(world)]


def three_epochs(loaders: list[Any]) -> list[list[list[Any]]]:
    return [[*steps(loaders)] for _ in range(3)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_any_number_of_ranks_gets_the_same_global_batches(case: Case, world: int) -> None:
    assert three_epochs(world_of(case, world)) == three_epochs(world_of(case, 1))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", ["thread", "process"])
@pytest.mark.parametrize("workers", [2, 8])
def test_any_number_of_workers_gets_the_same_global_batches(
    case: Case, method: str, workers: int
) -> None:
    expected = [*steps(world_of(case, 1))]
    for world in (1, 3):
        loaders = world_of(case, world, num_workers=workers, worker_method=method)
        assert [*steps(loaders)] == expected
        for loader in loaders:
            loader.close()


@pytest.mark.parametrize("case", CASES)
def test_any_world_resumes_after_any_batch(case: Case) -> None:
    expected = list(chain.from_iterable(three_epochs(world_of(case, 1))))
    per_epoch = [len(epoch) for epoch in three_epochs(world_of(case, 1))]
    for number in range(sum(per_epoch[:2]) + 2):
        before = world_of(case, WORLDS[number % 4])
        left, states = number, []
        for epoch in per_epoch:  # the loop may stop within an epoch, or see its end
            taken = zip(*before, strict=True)
            for _ in range(min(left, epoch)):
                next(taken)
            if left <= epoch:
                states = [loader.state_dict() for loader in before]
                break
            assert next(taken, None) is None
            left -= epoch
        after = world_of(case, WORLDS[(number + 1 + number // 4) % 4])
        for loader in after:
            loader.load_state_dict(states[0])
        resumed = list(chain.from_iterable([*steps(after)] for _ in range(3)))
        rest = expected[number:]
        assert resumed[: len(rest)] == rest, f"after {number} batches"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", ["thread", "process"])
def test_workers_resume_too(case: Case, method: str) -> None:
    expected = [*steps(world_of(case, 1))]
    stopped = world_of(case, 2, num_workers=2, worker_method=method)
    taken = zip(*stopped, strict=True)
    for _ in range(3):
        next(taken)
    state = stopped[1].state_dict()
    resumed = world_of(case, 3, num_workers=8, worker_method=method)
    for loader in resumed:
        loader.load_state_dict(state)
    assert [*steps(resumed)] == expected[3:]
    for loader in [*stopped, *resumed]:
        loader.close()
