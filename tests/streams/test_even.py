"""Promises:
- With `EvenSteps` all ranks take as many steps as the first or the last of them has batches.
- Its state does not count what was read ahead.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from fastload.streams import EvenSteps

RANKS = 3


class Counting:
    """Stands for a loader of `n` batches."""

    def __init__(self, n: int) -> None:
        self.n, self.given = n, 0

    def __iter__(self) -> Iterator[int]:
        for k in range(self.n):
            self.given = k + 1
            yield k

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "ended": False}


def check(rank: int, counts: list[int], ends: Any, every: int) -> None:
    own, steps = counts[rank], min(counts) if ends == "drop" else max(counts)
    even = EvenSteps(Counting(own), ends, every=every)
    found = []
    if ends == "pad" and 0 == min(counts) < steps:
        try:
            found += even
        except ValueError as error:
            assert "a rank has no batch at all" in str(error)
            return
        raise AssertionError("it repeated a batch that it does not have")
    for batch in even:
        found.append(batch)
        assert even.state_dict()["given"] == min(len(found), own)
    assert len(found) == steps
    assert found[:own] == [*range(min(own, steps))]
    assert set(found) <= {*range(own)}
    assert even.state_dict()["ended"]


def all_cases(rank: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    rng = random.Random(0)
    for _ in range(100):
        counts = [rng.choice([0, 1, 2, 3, 7, 8, 64, 65, 130]) for _ in range(RANKS)]
        check(rank, counts, rng.choice(["drop", "pad"]), rng.choice([1, 4, 64]))
    dist.destroy_process_group()


def test_ranks_take_equally_many_steps(tmp_path: Path) -> None:
    mp.spawn(all_cases, (str(tmp_path / "meeting"),), nprocs=RANKS)
