"""Promises:
- A generator of the user's resumes exactly with a size, or if it keeps a state. Else the state says that it is
  approximate, and loading warns once.
- What it draws belongs to the sample that it took last. After an error it begins anew, also if it keeps a state.
- A shuffle over one that holds samples goes on.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastload.streams import Stream
from tests.streams.chains import Late, Noisy, late, source
from tests.streams.test_loaders import loader, samples
from tests.streams.test_resume import reading


def numbers(folder: Path, *counts: int) -> Stream:
    return source(random.Random(0), folder, "jsonl", counts)


def stopped(stream: Stream, workers: int, kind: str = "thread") -> tuple[list[Any], Any, list[Any]]:
    """Return the samples of 5 batches, the state after them, and all samples of an epoch."""
    with loader(stream, workers, kind=kind) as whole:
        everything = samples(whole)
    with loader(stream, workers, kind=kind) as first:
        head = samples(itertools.islice(first, 5))
        return head, json.loads(json.dumps(first.state_dict())), everything


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("how", [(late, 8), (Late,)])
def test_it_resumes_exactly(workers: int, kind: str, how: Any, tmp_path: Path) -> None:
    stream = numbers(tmp_path, 30, 40).apply(*how).map(Noisy()).shuffle(7)
    head, state, whole = stopped(stream, workers, kind)
    with warnings.catch_warnings(), loader(stream, workers, kind=kind) as resumed:
        warnings.simplefilter("error")
        resumed.load_state_dict(state)
        assert [*head, *samples(resumed)] == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_state_it_says_so(workers: int, tmp_path: Path) -> None:
    stream = numbers(tmp_path, 30, 40).apply(late)
    head, state, whole = stopped(stream, workers)
    assert [lane["state"]["approximate"] for lane in state["lanes"]] == [True] * max(1, workers)
    with loader(stream, workers) as resumed:
        with pytest.warns(UserWarning, match=r"approximate.*\.apply\(\)") as said:
            resumed.load_state_dict(state)
        rest = samples(resumed)
    assert len(said) == 1
    assert len({*whole} - {*head} - {*rest}) == max(1, workers)  # what each generator held


def test_other_readers_are_told_what_is_lost(tmp_path: Path) -> None:
    stream = numbers(tmp_path, 30, 40).apply(Late)
    head, state, whole = stopped(stream, 2)
    with loader(stream, 3) as resumed:
        with pytest.warns(UserWarning, match="approximate.*stay with the readers that saved them"):
            resumed.load_state_dict(state)
        assert len({*whole} - {*head} - {*samples(resumed)}) == 2


def test_it_goes_on_after_a_sample_that_fails(tmp_path: Path) -> None:
    def checked(n: int) -> int:
        if n == 5:
            raise ValueError(n)
        return n

    def squares(numbers: Iterator[int]) -> Iterator[int]:
        return (n * n for n in numbers)

    it = reading(numbers(tmp_path, 10).map(checked).apply(squares), 0, 0, 1)
    assert [*itertools.islice(it, 5)] == [0, 1, 4, 9, 16]
    with pytest.raises(ValueError, match="5"):
        next(it)
    assert [*it] == [36, 49, 64, 81]


class Squares:
    """Keeps a state, and iterates by a generator."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        for n in self.numbers:
            yield n * n

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_one_with_a_state_goes_on_after_a_sample_that_fails(tmp_path: Path) -> None:
    it = reading(numbers(tmp_path, 4).map(checked_at(1)).apply(Squares), 0, 0, 1)
    assert next(it) == 0
    with pytest.raises(ValueError, match="1"):
        next(it)
    assert [*it] == [4, 9]


def checked_at(bad: int) -> Any:
    def checked(n: int) -> int:
        if n == bad:
            raise ValueError(n)
        return n

    return checked


def test_a_function_that_always_raises_ends(tmp_path: Path) -> None:
    def raises(_: Iterator[int]) -> Iterator[int]:
        raise KeyError

    it = reading(numbers(tmp_path, 4).apply(raises), 0, 0, 1)
    for _ in range(5):  # one for each sample, and one as none is left
        with pytest.raises(KeyError):
            next(it)


def jittered(samples: Iterator[tuple[int, float]]) -> Iterator[tuple[int, float, float, float]]:
    before = 0.0
    for n, below in samples:
        yield n, below, random.random(), before
        before = random.random()


def test_what_it_draws_belongs_to_its_sample(tmp_path: Path) -> None:
    stream = numbers(tmp_path, 9, 9, 9, 9).map(lambda n: (n, random.random())).apply(jittered)
    found = []
    for workers in (0, 4):
        with loader(stream, workers) as them:
            found.append(sorted(samples(them)))
    assert [x[:3] for x in found[0]] == [x[:3] for x in found[1]]
    draws = [x for sample in found[1] for x in sample[1:] if x]
    assert len({*draws}) == len(draws)


def test_a_shuffle_over_one_that_holds_samples_goes_on(tmp_path: Path) -> None:
    stream = numbers(tmp_path, 60).apply(late).shuffle(20)
    for stop in (21, 25, 45):
        it = reading(stream, 0, 0, 1)
        head = [*itertools.islice(it, stop)]
        state = it.state_dict()
        assert state["approximate"]
        rest = [*reading(stream, 0, 0, 1, state)]
        assert len({*range(60)} - {*head} - {*rest}) < 20


@pytest.mark.parametrize("function", [late, Late])
def test_an_epoch_that_is_left_closes_its_files_at_once(function: Any, tmp_path: Path) -> None:
    it = reading(numbers(tmp_path, 30).apply(function), 0, 0, 1)
    assert next(it) == 0
    opened = weakref.ref(it._pass)
    gc.disable()
    try:
        del it
        assert opened() is None
    finally:
        gc.enable()
