"""Promises:
- With `EvenSteps` all ranks take as many steps as the first or the last of them has batches.
- Its state does not count what was read ahead. One that was saved as a rank repeats batches resumes too.
- If the stream knows its counts, the ranks need no word, and read nothing ahead.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fastload.streams import EvenSteps, Mixed
from fastload.streams.passes import Place
from tests.streams.chains import source
from tests.streams.test_loaders import loader, samples
from tests.streams.test_resume import reading

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


def with_counts(rank: int, meeting: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    for case in range(8):
        rng = random.Random(case)
        sizes = [rng.choice([4, 9, 30]) for _ in range(3 * RANKS)]
        (place := Path(folder) / f"{rank}-{case}").mkdir()
        counted = source(rng, place, "jsonl", sizes, counts=sizes).shuffle(5)
        ends = rng.choice(["drop", "pad"])
        make = partial(loader, workers=rng.choice([0, 2]), rank=rank, world_size=RANKS)
        make = partial(make, drop_last=rng.random() < 0.5)
        with make(counted) as ours, make(counted.filter(lambda n: True)) as theirs:
            for _ in range(2):
                silent = same(EvenSteps(ours, ends), speaks=False)
                agreed = same(EvenSteps(theirs, ends))
                # A rank that repeats may repeat others.
                assert len(silent) == len(agreed)
                assert {*samples(silent)} == {*samples(agreed)}
        with make(counted) as stopped, make(counted) as resumed:
            even = EvenSteps(stopped, ends)
            batches = list(even)
            stop = len(batches) - rng.choice([0, 0, 1, 2, len(batches) - 1])
            stopped.set_epoch(0)
            head = [*islice(even, stop)]
            states: list[Any] = [None] * RANKS
            dist.all_gather_object(states, json.loads(json.dumps(even.state_dict())))
            (even := EvenSteps(resumed, ends)).load_state_dict(states if case % 2 else states[rank])
            rest = same(even)
            assert len(head) + len(rest) == len(batches)
            assert {*samples(head), *samples(rest)} == {*samples(batches)}
    dist.destroy_process_group()


def same(even: EvenSteps, *, speaks: bool = True) -> list[Any]:
    """Return the batches of a rank, which takes as many steps as each other, and has asked them only if it `speaks`."""
    with mock.patch.object(even, "_agreed", wraps=even._agreed) as words:
        batches = list(even)
    assert words.called is speaks
    dist.all_reduce(most := torch.tensor(len(batches)), dist.ReduceOp.MAX)
    assert len(batches) == int(most)
    return batches


def test_counts_need_no_word_between_ranks(tmp_path: Path) -> None:
    mp.spawn(with_counts, (str(tmp_path / "meeting"), str(tmp_path)), nprocs=RANKS)


@pytest.mark.parametrize("counts", [[4, 5], [4, 3]])
def test_wrong_counts_are_an_error(counts: list[int], tmp_path: Path) -> None:
    stream = source(random.Random(0), tmp_path, "jsonl", [4, 4], counts=counts)
    with (
        loader(stream, 0, batch_size=1) as them,
        pytest.raises(ValueError, match="counts of Shards say"),
    ):
        list(EvenSteps(them))


def test_counts_are_those_of_what_is_read(tmp_path: Path) -> None:
    rng = random.Random(0)
    shards = source(rng, tmp_path, "jsonl", sizes := [4, 9, 1, 30, 2], counts=sizes)
    own = source(rng, tmp_path, "own", sizes, counts=sizes)
    known = [
        shards,
        shards.shuffle(5),
        Mixed([shards, own.shuffle(2)], [1, 2]),
        Mixed([shards, own], [0, 1]),
        Mixed([shards, own], lambda n: [1, n % 2]),
    ]
    for stream, readers in itertools.product(known, [1, 3, 5]):
        for reader in range(readers):
            place = Place(1, reader, readers)
            assert stream.count(place) == len([*reading(stream, 1, reader, readers)])
    assert own.count(Place(0, 6, 7)) == 0
    unknown = [
        shards.filter(bool),
        shards.flat_map(lambda n: [n]),
        shards.apply(iter),
        Mixed([shards, own], [1, 1], until="first"),
        source(rng, tmp_path, "jsonl", sizes),
    ]
    assert [stream.count(Place(0, 0, 1)) for stream in unknown] == [None] * len(unknown)
    assert shards.count(Place(0, 0, 6)) is None  # parts of shards
