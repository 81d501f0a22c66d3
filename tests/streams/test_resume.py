"""Promises:
- A stream that is stopped and resumed, any number of times, gives the order of one that was not, for the same readers.
- Other readers that go on give together what is left: each sample once, none twice.
- A state is JSON, takes microseconds, and does not grow with what a buffer holds. To resume reads at most that again.
- What fails raises once, and the next sample follows.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fastload.errors import StateError
from fastload.streams import Shards, Stream
from fastload.streams.passes import Place, Reading
from tests.streams.chains import SAME_READERS, chain, id_of, is_kept, packed, source, write


def reading(stream: Stream, epoch: int, reader: int, readers: int, state: Any = None) -> Reading:
    found = Reading(stream, Place(epoch, reader, readers))
    if state is not None:
        found.load_state_dict(json.loads(json.dumps(state)))
    return found


def check_same_readers(rng: random.Random, stream: Stream) -> None:
    """Stop and resume each reader up to three times."""
    epoch, readers = rng.randint(0, 3), rng.choice([1, 2, 3, 5, 8, 16])
    for reader in range(readers):
        expected = list(reading(stream, epoch, reader, readers))
        found: list[Any] = []
        it = reading(stream, epoch, reader, readers)
        for _ in range(rng.randint(0, 3)):
            found += itertools.islice(it, rng.choice([0, 1, rng.randint(0, 60)]))
            state = it.state_dict()
            it = reading(stream, epoch, reader, readers, state)
            assert it.state_dict() == json.loads(json.dumps(state))
        assert [*found, *it] == expected


def check_other_readers(rng: random.Random, stream: Stream) -> None:
    """Let other readers go on, up to three times. Some have not begun."""
    epoch, readers = rng.randint(0, 3), rng.choice([1, 2, 3, 5, 8])
    expected = Counter(x for k in range(readers) for x in reading(stream, epoch, k, readers))
    found = Counter[Any]()
    states: list[Any] = [None] * readers
    for _ in range(rng.randint(1, 3)):
        for k, state in enumerate(states):
            if rng.random() < 0.8:
                it = reading(stream, epoch, k, len(states), state)
                found.update(itertools.islice(it, rng.choice([0, 1, rng.randint(0, 40)])))
                states[k] = it.state_dict()
        states = stream.redealt(states, epoch, rng.choice([1, 2, 4, 7]))
    for k, state in enumerate(states):
        found.update(reading(stream, epoch, k, len(states), state))
    assert found == expected


CASES = [range(start, start + 20) for start in range(0, 60, 20)]
SLOW = [
    pytest.param(range(start, start + 100), marks=pytest.mark.slow)
    for start in range(60, 3060, 100)
]


@pytest.mark.parametrize("seeds", [*CASES, *SLOW])
def test_any_chain_resumes(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        (folder := tmp_path / str(seed)).mkdir()
        if seed % 8 == 0:
            check_same_readers(rng, packed(rng, folder))
        elif seed % 8 == 1:
            check_same_readers(rng, chain(rng, folder, SAME_READERS))
        else:
            check_same_readers(rng, stream := chain(rng, folder))
            check_other_readers(rng, stream)


def test_rows_that_other_readers_pack_have_the_same_tokens(tmp_path: Path) -> None:
    rng = random.Random(1)
    stream = packed(rng, tmp_path)
    expected = Counter(t for x in reading(stream, 0, 0, 1) for t in x if t)
    it = reading(stream, 0, 0, 1)
    found = Counter(t for x in itertools.islice(it, 9) for t in x if t)
    for k, state in enumerate(stream.redealt([it.state_dict()], 0, 3)):
        found.update(t for x in reading(stream, 0, k, 3, state) for t in x if t)
    assert found == expected


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "tar"])
def test_fewer_shards_than_readers_are_divided(kind: str, tmp_path: Path) -> None:
    stream = source(random.Random(0), tmp_path, kind, [50, 0, 31])
    parts = [list(reading(stream, 0, k, 9)) for k in range(9)]
    assert sorted(itertools.chain(*parts)) == [*range(50), *range(2000, 2031)]
    assert sum(map(bool, parts)) >= 6


def test_a_state_is_small_and_reads_no_more_than_the_buffer(tmp_path: Path) -> None:
    read = []

    def counted(n: int) -> int:
        read.append(n)
        return n

    stream = source(random.Random(0), tmp_path, "jsonl", [2000] * 5).map(counted).shuffle(1000)
    it = reading(stream, 0, 0, 1)
    given = [*itertools.islice(it, 4321)]
    state = it.state_dict()
    assert len(json.dumps(state)) < 300
    read.clear()
    resumed = reading(stream, 0, 0, 1, state)
    following = next(resumed)
    assert len(read) <= 1000 + 128  # and, as ever, what comes next
    assert [following, *resumed] == [*it]
    assert following not in given


def test_the_order_depends_on_seed_and_epoch(tmp_path: Path) -> None:
    stream = source(random.Random(0), tmp_path, "jsonl", [9] * 12).shuffle(20)
    orders = [list(reading(stream, epoch, 0, 1)) for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])
    moved = [abs(place - n) for place, n in enumerate(orders[0])]
    assert max(moved) > 20  # the shards are shuffled too


def test_what_fails_raises_once(tmp_path: Path) -> None:
    def fails_at_13(n: int) -> int:
        if n == 13:
            raise ValueError("13")
        return n

    write("jsonl", path := tmp_path / "a.jsonl", [*range(40)])
    path.write_text(path.read_text().replace('{"id": 7}', "{oops"))
    missing = tmp_path / "missing.jsonl"
    for size in (1, 5, 100):
        stream = Shards([missing, path], shuffle=False).map(id_of).map(fails_at_13)
        it = reading(stream.shuffle(size).filter(is_kept), 0, 0, 1)
        found, errors = [], []
        while True:
            try:
                found.append(next(it))
            except StopIteration:
                break
            except Exception as error:
                errors.append(error)
        assert sorted(found) == [n for n in range(40) if n not in (7, 13) and is_kept(n)]
        assert [type(e).__name__ for e in errors] == [
            "FileNotFoundError",
            "JSONDecodeError",
            "ValueError",
        ]
        assert f"shard {path}" in errors[1].__notes__[0]


def test_a_state_of_other_readers_is_refused(tmp_path: Path) -> None:
    stream = source(random.Random(0), tmp_path, "jsonl", [9] * 3)
    with pytest.raises(StateError, match="readers: the stream's state is of 2, this one is 3"):
        reading(stream, 0, 1, 3, reading(stream, 0, 1, 2).state_dict())
