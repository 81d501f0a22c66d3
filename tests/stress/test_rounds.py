"""Promises:
- Loaders in threads, several at once, give what one loop without workers gives, round after round.
- Faults, stops and resumes at random cause no hang, lose no sample, deliver none twice and leave no thread.

Samples draw from all global functions, stall, fail for good or once, and are large or small. Loops end in the middle,
are closed, and resume again and again with other numbers of workers. Other threads ask for statistics and states beside
them.

`FASTLOAD_STRESS_ROUNDS` is the number of rounds. `scripts/test --no-gil` runs 1,000 on a Python without the GIL.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

import fastload
from fastload import DataLoader
from tests.fakes import hasty

ROUNDS = int(os.environ.get("FASTLOAD_STRESS_ROUNDS", "8"))
EPOCHS = 4
JOIN_S = 50.0


class Bad(Exception):
    """What a sample raises."""


class Drawn(Dataset[Any]):
    """A sample is its index, draws from all global functions and from a generator of its own, and a row."""

    def __init__(self, length: int, row: int, bad: set[int], flaky: Set[int] = frozenset()) -> None:
        self.length, self.row, self.bad, self.flaky = length, row, bad, flaky
        self.own = random.Random(1)
        self.read: list[int] = []  # a worker's own

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        again = self.read[-1:] == [index]
        self.read.append(index)
        if index % 3 == 0:
            torch.manual_seed(index)
        if index in self.flaky:
            time.sleep(0.001)
            if not again:
                raise OSError(errno.EIO, f"simulated, {random.random()}")
        if index in self.bad:
            raise Bad(f"sample {index}, {random.random()}")
        assert self.read[-1] == index, "another worker's list"
        return {
            "index": index,
            "python": random.gauss(0, 1),
            "numpy": np.random.standard_normal(3),
            "torch": torch.rand(2),
            "own": self.own.random(),
            "row": np.full(self.row, index, np.int32),
        }


class Lanes(IterableDataset[int]):
    """Each worker yields its part of the numbers."""

    def __init__(self, length: int, bad: set[int]) -> None:
        self.length, self.bad = length, bad

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return Numbers(iter(range(info.id, self.length, info.num_workers)), self.bad)


class Numbers(Iterator[int]):
    """Goes on after a number that fails."""

    def __init__(self, numbers: Iterator[int], bad: set[int]) -> None:
        self.numbers, self.bad = numbers, bad

    def __next__(self) -> int:
        number = next(self.numbers)
        if number in self.bad:
            raise Bad(f"number {number}")
        return number


def with_a_draw(samples: list[Any]) -> Any:
    return default_collate(samples), torch.rand(1), random.random()


def replaced(index: int, error: Exception) -> Any:
    return Drawn(index + 1, 5, set())[index] | {"row": np.zeros(5, np.int32)}


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [plain(part) for part in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def given(iterator: Iterator[Any], count: int | None = None) -> list[Any]:
    """Return the next `count` batches, or all. An error stands in its place."""
    found: list[Any] = []
    while count is None or len(found) < count:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except Bad as error:
            found.append(str(error))
        else:
            found.append(plain(batch))
    return found


@dataclass
class Case:
    """A loader's arguments."""

    dataset: Any
    batch_size: int
    workers: int
    options: dict[str, Any]

    def loader(self, workers: int) -> DataLoader[Any]:
        options = {"persistent_workers": False, "prefetch_batches": None} if not workers else {}
        return DataLoader(
            self.dataset,
            self.batch_size,
            num_workers=workers,
            worker_method="thread",
            **self.options | options,
        )


def a_case(choose: random.Random) -> Case:
    length, batch_size = choose.randrange(1, 60), choose.randrange(1, 9)
    bad = {n for n in range(length) if choose.random() < choose.choice((0, 0, 0.1, 0.5))}
    options: dict[str, Any] = {
        "seed": choose.randrange(1000),
        "persistent_workers": choose.random() < 0.5,
        "prefetch_batches": choose.choice((None, 1, 2, 7)),
        "on_error": choose.choice(("raise", "skip", replaced)),
        "in_order": choose.random() < 0.7,
    }
    workers = choose.randrange(1, 6)
    if choose.random() < 0.25:
        options["on_error"] = "raise"
        return Case(Lanes(length, bad), batch_size, workers, options)
    if choose.random() < 0.3:
        options["collate_fn"] = with_a_draw
    row = choose.choice((5, 5, 8192))  # 32 KiB: a row in a slot
    options["retries"] = 1
    flaky = {n for n in range(length) if choose.random() < 0.1}
    if options["on_error"] == "skip":
        bad -= {n for n in bad if n % batch_size == 0}  # no batch is empty
    if options["on_error"] is replaced:
        row = 5
    options["shuffle"] = options["on_error"] != "skip" and choose.random() < 0.7
    return Case(Drawn(length, row, bad, flaky), batch_size, workers, options)


def expected(case: Case) -> list[list[Any]]:
    """Return the batches of all epochs, read without workers."""
    if isinstance(case.dataset, Lanes):
        return [lanes_in_turn(case)] * EPOCHS
    loader = case.loader(0)
    return [given(iter(loader)) for _ in range(EPOCHS)]


def lanes_in_turn(case: Case) -> list[Any]:
    lanes = []
    for worker in range(case.workers):
        lane, batch = [], list[int]()
        for number in range(worker, case.dataset.length, case.workers):
            if number in case.dataset.bad:  # the batch that it would be in ends there
                lane.append(f"number {number}")
                batch = []
                continue
            batch.append(number)
            if len(batch) == case.batch_size:
                lane.append(batch)
                batch = []
        lanes.append([*lane, batch] if batch else lane)
    longest = max(map(len, lanes))
    return [lane[k] for k in range(longest) for lane in lanes if k < len(lane)]


def check(case: Case, found: list[Any], wanted: list[Any]) -> None:
    """Check that these are the first batches of an epoch, or some of them if they come in any order."""
    if case.options.get("in_order", True):
        assert found == wanted[: len(found)]
    else:
        assert Counter(map(str, found)) <= Counter(map(str, wanted))


def run(case: Case, choose: random.Random) -> None:
    """Read four epochs. The first may be left or closed in the middle, the third is resumed by other loaders."""
    wanted = expected(case)
    loader = case.loader(case.workers)
    with beside(lambda: str(loader.stats()), lambda: loader.state_dict()):
        iterator = iter(loader)
        way = choose.choice(("all", "left", "closed", "kept"))
        count = None if way == "all" else choose.randrange(len(wanted[0]) + 1)
        check(case, given(iterator, count), wanted[0])
        if way == "closed":
            loader.close()
        if way != "kept":
            del iterator
        whole = given(iter(loader))
        check(case, whole, wanted[1])
        assert len(whole) == len(wanted[1])
    resumes(case, choose, loader, wanted)


def resumes(
    case: Case, choose: random.Random, loader: DataLoader[Any], wanted: list[list[Any]]
) -> None:
    """Read the third epoch by a chain of loaders, some of them beside the ones before, and the fourth by the last."""
    loaders, got = [loader], list[Any]()
    while True:
        count = choose.choice((None, 0, 1, 2, 5))
        iterator = iter(loader)
        part = given(iterator, count)
        got += part
        if count is None or len(part) < count:
            break
        state = json.loads(json.dumps(loader.state_dict()))
        if choose.random() < 0.5:
            loader.close()
        fixed = isinstance(case.dataset, Lanes)
        loader = case.loader(case.workers if fixed else choose.randrange(5))
        loaders.append(loader)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
    following = given(iter(loader))
    for batches, epoch in ((got, 2), (following, 3)):
        check(case, batches, wanted[epoch])
        assert len(batches) == len(wanted[epoch])
    for one in loaders:
        one.close()


class beside:
    """Let other threads call functions again and again in a block."""

    def __init__(self, *functions: Callable[[], object]) -> None:
        self.ended = threading.Event()
        self.errors: list[BaseException] = []
        self.threads = [threading.Thread(target=self.call, args=(f,)) for f in functions]

    def call(self, function: Callable[[], object]) -> None:
        try:
            while not self.ended.wait(0.01):
                function()
        except BaseException as error:
            self.errors.append(error)

    def __enter__(self) -> None:
        for thread in self.threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()
        assert not self.errors, repr(self.errors)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_round_of_loaders_gives_what_a_loop_without_workers_gives(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastload.reading.failures, "RETRY_SECONDS", 0.001)
    choose = random.Random(f"round {number}")
    cases = [
        (a_case(choose), random.Random(choose.random())) for _ in range(choose.randrange(1, 4))
    ]
    errors: list[BaseException] = []

    def one(case: Case, own: random.Random) -> None:
        try:
            run(case, own)
        except BaseException as error:
            error.add_note(str(case))
            errors.append(error)

    before = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    threads = [threading.Thread(target=one, args=case, daemon=True) for case in cases]
    with hasty():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
    assert not any(thread.is_alive() for thread in threads), "a loop hangs"
    for error in errors:
        raise error
    after = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    assert str(after) == str(before), "a sample drew from a state of the process"
    gc.collect()


def test_a_round_notices_wrong_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounds would pass on anything if they did not compare."""
    case = Case(Drawn(9, 5, {4}), 2, 2, {"seed": 1})
    run(case, random.Random(0))
    monkeypatch.setattr(fastload.memory.collate.SlotBuilder, "put", lambda *_: None)
    with pytest.raises((AssertionError, KeyError, TypeError)):
        run(case, random.Random(0))
