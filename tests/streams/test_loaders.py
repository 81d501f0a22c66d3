"""Promises:
- A loader resumes a stream exactly, in threads, processes or without workers, and the epochs after it are whole.
- With other workers, or other ranks, it goes on with each sample once. What a sample draws stays the same.
- Epochs differ without a seed of the loader's.
- If workers have nothing to read, the loop is told once.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import fastload
from fastload.errors import StateError
from fastload.streams import Shards, Stream
from tests.streams.chains import SAME_DRAWS, Noisy, chain, id_of, own, source, write

KINDS = "thread", "process"


def loader(
    stream: Stream,
    workers: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    kind: str = "thread",
    **options: Any,
) -> fastload.DataLoader[Any]:
    stream = copy.deepcopy(stream)
    for shards in sources(stream):
        shards._place = rank, world_size
    method = {"worker_method": kind} if workers else {}
    options = {"batch_size": 4, "collate_fn": list, **method, **options}
    return fastload.DataLoader(stream, num_workers=workers, **options)


def sources(stream: Any) -> list[Any]:
    return [found for up in stream.ups for found in sources(up)] or [stream]


def samples(batches: Iterable[Any]) -> list[Any]:
    return [x for batch in batches for x in batch]


PLACES = [(ranks, k) for ranks in range(1, 9) for k in range(9) if ranks * max(1, k) <= 8]


def check(rng: random.Random, stream: Stream) -> None:
    ranks, workers = rng.choice(PLACES)
    first, second = Counter[Any](), Counter[Any]()
    begun, states = Counter[Any](), []
    for rank in range(ranks):
        place: Any = {"rank": rank, "world_size": ranks}
        with loader(stream, workers, kind=rng.choice(KINDS), **place) as whole:
            epochs = [samples(whole) for _ in range(2)]
        with loader(stream, workers, kind=rng.choice(KINDS), **place) as stopped:
            head = samples(itertools.islice(stopped, rng.choice([0, 1, 5])))
            states.append(json.loads(json.dumps(stopped.state_dict())))
        with loader(stream, workers, kind=rng.choice(KINDS), **place) as resumed:
            resumed.load_state_dict(states[-1])
            rest = [] if states[-1]["ended"] else samples(resumed)
            assert [*head, *rest] == epochs[0]
            assert samples(resumed) == epochs[1]
        first.update(epochs[0])
        second.update(epochs[1])
        begun.update(head)
    others, workers = rng.choice(PLACES)
    found, after = begun, Counter[Any]()
    for rank in range(others):
        place = {"rank": rank, "world_size": others}
        with loader(stream, workers, kind=rng.choice(KINDS), **place) as resumed:
            resumed.load_state_dict(states if ranks > 1 else states[0])
            if not all(state["ended"] for state in states):
                found.update(samples(resumed))
            after.update(samples(resumed))
    assert (found, after) == (first, second)


SLOW = [pytest.param(range(k, k + 20), marks=pytest.mark.slow) for k in range(4, 204, 20)]


@pytest.mark.filterwarnings("ignore:fastload. .* have nothing to read")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("seeds", [range(4), *SLOW])
def test_any_chain_resumes_with_any_workers_and_ranks(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        (folder := tmp_path / str(seed)).mkdir()
        check(rng, chain(rng, folder, SAME_DRAWS).map(Noisy()))


def test_other_ranks_need_the_states_of_all(tmp_path: Path) -> None:
    stream = source(random.Random(0), tmp_path, "jsonl", [9] * 4)
    with loader(stream, 2, rank=1, world_size=3) as saved, loader(stream, 2) as other:
        next(iter(saved))
        with pytest.raises(StateError, match=r"all 3 ranks.*Found those of ranks \[1\]"):
            other.load_state_dict(saved.state_dict())


def test_epochs_differ_without_a_seed_and_follow_set_epoch(tmp_path: Path) -> None:
    stream = source(random.Random(0), tmp_path, "jsonl", [5] * 8)
    with loader(stream, 1) as them:
        epochs = [samples(them) for _ in range(3)]
        them.set_epoch(1)
        assert samples(them) == epochs[1]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_sample_that_fails_is_left_out_alone(tmp_path: Path) -> None:
    def fails(n: int) -> int:
        if n % 10 == 3:
            raise ValueError(n)
        return n

    stream = source(random.Random(0), tmp_path, "jsonl", [40]).map(fails).shuffle(16)
    for workers in (0, 2):
        with fastload.DataLoader(
            stream, batch_size=4, collate_fn=list, num_workers=workers, on_error="skip"
        ) as skips:
            assert sorted(samples(skips)) == [n for n in range(40) if n % 10 != 3]


def test_workers_without_shards_are_named(tmp_path: Path) -> None:
    write("own", tmp_path / "a", [1, 2, 3])
    stream = Shards([tmp_path / "a"], own).map(id_of)
    with loader(stream, 3) as them:
        with pytest.warns(
            RuntimeWarning, match="2 of 3 workers have nothing to read.*paths names 1"
        ):
            assert samples(them) == [1, 2, 3]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert samples(them) == [1, 2, 3]


def test_other_workers_draw_the_same_below_a_flat_map(tmp_path: Path) -> None:
    stream = source(random.Random(0), tmp_path, "jsonl", [20] * 3)
    stream = stream.filter(lambda n: random.random() < 0.5).flat_map(lambda n: [n, n + 0.5])
    for stop in range(8):
        with loader(stream, 2) as whole, loader(stream, 2) as stopped, loader(stream, 3) as resumed:
            expected = samples(whole)
            head = samples(itertools.islice(stopped, stop))
            resumed.load_state_dict(stopped.state_dict())
            assert sorted([*head, *samples(resumed)]) == sorted(expected)


def test_a_rank_that_ended_waits_for_the_others(tmp_path: Path) -> None:
    stream = source(random.Random(0), tmp_path, "own", [4, 30])
    loaders = [loader(stream, 0, rank=rank, world_size=2) for rank in range(2)]
    short = min(range(2), key=lambda rank: len(samples(loader(stream, 0, rank=rank, world_size=2))))
    parts = [samples(itertools.islice(them, 3)) for them in loaders]
    states = [them.state_dict() for them in loaders]
    assert [state["ended"] for state in states] == [rank == short for rank in range(2)]
    for rank, part in enumerate(parts):
        resumed = loader(stream, 0, rank=rank, world_size=2)
        resumed.load_state_dict(states)
        assert bool(samples(resumed)) is (rank != short)
        assert len(part) == (4 if rank == short else 12)
