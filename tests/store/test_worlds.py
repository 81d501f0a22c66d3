"""Promises:
- A set of 60,010 rows gives each row as often as the sampler says, in any world: padded, dropped, shuffled or in
  order.
- An epoch over a set resumes with another number of workers.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import covertable
import pytest
import torch

from fastload import DataLoader, RankSampler, store

PARTS = 20
ROWS = 60_010  # no multiple of 3, 4 or 32


def rows_of(number: int) -> dict[str, Any]:
    y = torch.arange(number, ROWS, PARTS)
    return {"x": y[:, None] * 7 + torch.arange(4), "y": y}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("worlds") / "set"
    store.prepare(rows_of, range(PARTS), path, workers=0)
    return path


def read(batches: Any) -> list[int]:
    rows: list[int] = []
    for x, y in batches:
        assert torch.equal(x, y[:, None] * 7 + torch.arange(4))
        rows += y.tolist()
    return rows


def loader_of(path: Path, workers: int, rank: int, world: int, **options: Any) -> Any:
    dataset = store.get(path, data="x", label="y")
    sampler = RankSampler(dataset, rank=rank, world_size=world, **options)
    return DataLoader(dataset, 128, sampler=sampler, num_workers=workers, seed=5)


@pytest.mark.parametrize(
    ("world", "ends", "shuffle"), covertable.make([[1, 3, 8], ["pad", "drop"], [True, False]])
)
def test_each_row_as_often_as_the_ends_say(
    world: int, ends: Literal["pad", "drop"], shuffle: bool, prepared: Path
) -> None:
    workers = 2 if world == 3 else 0
    ranks = [
        read(loader_of(prepared, workers, rank, world, ends=ends, shuffle=shuffle))
        for rank in range(world)
    ]
    steps = -(-ROWS // world) if ends == "pad" else ROWS // world
    assert [len(rows) for rows in ranks] == [steps] * world
    counts = Counter(row for rows in ranks for row in rows)
    once, twice = (sum(n == times for n in counts.values()) for times in (1, 2))
    assert set(counts) <= set(range(ROWS))
    assert twice == max(steps * world - ROWS, 0)
    assert once + twice == min(ROWS, steps * world)
    assert once + 2 * twice == steps * world
    if not shuffle:
        order = [row for number in range(PARTS) for row in range(number, ROWS, PARTS)]
        padded = (order + order[:world])[: steps * world]
        assert ranks == [padded[rank::world] for rank in range(world)]


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 3)])
def test_an_epoch_resumes_with_another_number_of_workers(
    before: int, after: int, prepared: Path
) -> None:
    whole = read(loader_of(prepared, 0, 1, 3))
    loader = loader_of(prepared, before, 1, 3)
    batches = iter(loader)
    begun = read(next(batches) for _ in range(50))
    state = loader.state_dict()
    loader.close()
    resumed = loader_of(prepared, after, 1, 3)
    resumed.load_state_dict(state)
    assert begun + read(resumed) == whole
