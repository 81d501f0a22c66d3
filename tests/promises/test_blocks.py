"""Promises:
- With `RankSampler(block=...)` the batches of all ranks, one after another, are in the global order. With "uneven"
  every sample comes exactly once, with "pad" all ranks get equally many.
- A sample draws the same with blocks, without them, and in a world of another size, which can also resume the epoch.
"""

from __future__ import annotations

from typing import Any

import pytest

import fastload
from fastload import RankSampler
from tests.fakes import Draws


def loader(length: int, rank: int, world: int, size: int, **options: Any) -> Any:
    sampler = RankSampler(length, rank=rank, world_size=world, seed=5, **options)
    return fastload.DataLoader(Draws(length), batch_size=size, sampler=sampler, seed=5)


def batches(*arguments: int, **options: Any) -> list[list[tuple[int, float]]]:
    return [
        list(zip(indices.tolist(), drawn.tolist(), strict=True))
        for indices, drawn in loader(*arguments, **options)
    ]


def in_turn(length: int, world: int, size: int, **options: Any) -> list[tuple[int, float]]:
    """Return the samples of the ranks' batches, one batch after another."""
    ranks = [batches(length, rank, world, size, **options) for rank in range(world)]
    longest = max(map(len, ranks))
    return [
        sample
        for k in range(longest)
        for rank in ranks
        for sample in (rank[k] if k < len(rank) else ())
    ]


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 23, 24, 25])
@pytest.mark.parametrize(("world", "size", "block"), [(1, 4, 4), (2, 4, 4), (3, 4, 4), (2, 4, 2)])
def test_the_batches_of_all_ranks_are_the_global_order(
    length: int, world: int, size: int, block: int
) -> None:
    order = [sample for batch in batches(length, 0, 1, size) for sample in batch]
    uneven = in_turn(length, world, size, block=block, ends="uneven")
    assert sorted(uneven) == sorted(order), "each sample once, and it draws the same"
    padded = in_turn(length, world, size, block=block)
    dropped = in_turn(length, world, size, block=block, ends="drop")
    if block == size:
        assert uneven == order
        assert [index for index, _ in padded[:length]] == [index for index, _ in order]
        assert dropped == order[: length - length % (world * size)]
    assert len(padded) == -(-length // (world * block)) * world * block
    begin = [index for index, _ in order] * (world * size)
    assert sorted(index for index, _ in padded) == sorted(begin[: len(padded)])


@pytest.mark.parametrize(("world", "size"), [(1, 8), (4, 2), (2, 4)])
def test_another_number_of_ranks_resumes_blocks(world: int, size: int) -> None:
    whole = in_turn(33, 2, 4, block=4, ends="uneven")
    first = loader(33, 1, 2, 4, block=4, ends="uneven")
    running = iter(first)
    next(running)
    next(running)
    state = first.state_dict()
    rest: list[list[Any]] = []
    for rank in range(world):
        again = loader(33, rank, world, size, block=size, ends="uneven")
        again.load_state_dict(state)
        rest.append([list(zip(a.tolist(), b.tolist(), strict=True)) for a, b in again])
    got = [
        sample for k in range(3) for rank in rest for sample in (rank[k] if k < len(rank) else ())
    ]
    assert got == whole[16:]


def test_a_block_that_a_batch_would_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"multiple of the sampler's block.*size 4 and block=3"):
        loader(20, 0, 2, 4, block=3)
    with pytest.raises(ValueError, match="block must be 1 or more, got 0"):
        RankSampler(20, block=0)
    with pytest.raises(TypeError, match="block must be an integer"):
        RankSampler(20, block="4")  # type: ignore[arg-type]
