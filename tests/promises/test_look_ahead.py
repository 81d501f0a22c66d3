"""Promises:
- A dataset with `will_read(indices)` hears of each batch once, in the order of reading, before a sample of it is read.
  This holds for the loop, for threads, and for the copy that each worker process has.
- It hears of as many batches ahead as are in flight. Without workers it hears of two more than the one that is read, if
  the sampler has fixed its order. No state counts them.
- It gets one empty list when the loop ends, however that ends, and before another epoch replaces one that was left.
- If it raises, its batch raises that, with a note that names the dataset. An error for the empty list is logged.
- `will_read` is found through Subset, ConcatDataset and `Packed`. A dataset without it pays nothing.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, Dataset, Sampler, Subset

import fastload
from fastload import DataLoader
from fastload._kit.will_read import will_read_of
from fastload.measure.samples import Numbered
from fastload.sequences import Packed
from tests.fakes import Numbers, fastload_threads

WAIT_S = 30.0
FORK: dict[str, Any] = {"worker_method": "process", "multiprocessing_context": "fork"}
SPAWN: dict[str, Any] = {"worker_method": "process", "multiprocessing_context": "spawn"}
KINDS: dict[str, dict[str, Any]] = {
    "loop": {"num_workers": 0},
    "threads": {"num_workers": 2},
    "persistent threads": {"num_workers": 2, "persistent_workers": True},
    "forks": {"num_workers": 2, **FORK},
    "persistent forks": {"num_workers": 2, "persistent_workers": True, **FORK},
    "threads of a fork": {"num_workers": 3, "worker_processes": 1, **FORK},
    "spawned": {"num_workers": 1, "persistent_workers": True, **SPAWN},
}
kinds = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "spawned"])
with_spawned = pytest.mark.parametrize("kind", KINDS)


class Hears(Dataset[int]):
    """Its own indices. It writes what it is told, and what is read, into a file that all processes append to."""

    fastload_per_worker = ()

    def __init__(self, log: Path, length: int = 24, *, raises_at: int = -1) -> None:
        self.log, self.length, self.raises_at = log, length, raises_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.note("read", index)
        return index

    def will_read(self, indices: list[int]) -> None:
        if self.raises_at in indices:
            raise OSError("no route to the store")
        self.note("told", indices)

    def note(self, what: str, value: Any) -> None:
        with open(self.log, "a") as file:
            file.write(json.dumps([os.getpid(), what, value]) + "\n")  # one write: no line is torn


class Getitems(Hears):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.touch()
    return path


def heard(log: Path) -> dict[int, list[tuple[str, Any]]]:
    """What each process wrote, in order."""
    found: dict[int, list[tuple[str, Any]]] = {}
    for line in log.read_text().splitlines():
        pid, what, value = json.loads(line)
        found.setdefault(pid, []).append((what, value))
    return found


def told(log: Path) -> list[list[int]]:
    """What all processes were told, one after another."""
    return [value for events in heard(log).values() for what, value in events if what == "told"]


def check(log: Path, batches: list[list[int]], *, loops: int = 1) -> None:
    """Each of these batches was told of once, in order and before it was read; each loop ended with an empty list."""
    assert sorted(filter(None, told(log))) == sorted(batches)
    for events in heard(log).values():
        mine = [value for what, value in events if what == "told"]
        assert mine.count([]) == loops
        assert mine[-1] == []
        places = [batches.index(value) for value in mine if value]
        if loops == 1:
            assert all(a < b for a, b in pairwise(places))
        known: set[int] = set()
        for what, value in events:
            if what == "told":
                known = known | set(value) if value else set()
            else:
                assert value in known


# ---- each batch once, in order, before it is read ----


@kinds
@pytest.mark.parametrize("of", [Hears, Getitems])
def test_it_hears_of_each_batch_before_it_is_read(kind: str, of: type[Hears], log: Path) -> None:
    loader = DataLoader(of(log), batch_size=4, shuffle=True, seed=1, **KINDS[kind])
    loader.begin_early = False
    batches = [batch.tolist() for batch in loader]
    loader.close()
    assert len(batches) == 6
    check(log, batches)


@with_spawned
def test_each_epoch_ends_with_an_empty_list(kind: str, log: Path) -> None:
    loader = DataLoader(Hears(log), batch_size=4, begin_early=False, **KINDS[kind])
    both = [[batch.tolist() for batch in loader] for _ in range(2)]
    loader.close()
    if loader.persistent_workers or not loader.num_workers or "process" not in loader.worker_method:
        check(log, [*both[0], *both[1]], loops=2)
    else:
        for events in heard(log).values():  # each epoch has processes of its own
            assert [value for what, value in events if what == "told"].count([]) == 1


def test_threads_that_begin_the_next_epoch_early_keep_what_they_were_told(log: Path) -> None:
    loader = DataLoader(Hears(log), 4, num_workers=2, persistent_workers=True, prefetch_batches=3)
    for _ in range(3):
        assert len(list(loader)) == 6
    loader.close()
    ours = told(log)
    assert ours.count([]) == 1
    assert ours[-1] == []
    assert len(ours) >= 3 * 6 + 1


# ---- how far ahead ----


class Gated(Hears):
    """The first sample waits until the gate is open."""

    def __init__(self, log: Path, gate: Any) -> None:
        super().__init__(log)
        self.gate = gate

    def __getitem__(self, index: int) -> int:
        if index == 0:
            assert self.gate.wait(WAIT_S)
        return super().__getitem__(index)


def test_threads_hear_of_all_batches_in_flight(log: Path) -> None:
    gate = threading.Event()
    loader = DataLoader(Gated(log, gate), batch_size=4, num_workers=1, prefetch_batches=3)
    batches = iter(loader)
    assert told(log) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    gate.set()
    assert len(list(batches)) == 6


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_hears_of_all_that_it_was_sent_before_it_goes_on(method: str, log: Path) -> None:
    gate = multiprocessing.get_context(method).Event()
    options: Any = {"worker_method": "process", "multiprocessing_context": method}
    loader = DataLoader(Gated(log, gate), 4, num_workers=1, prefetch_batches=4, **options)
    batches = iter(loader)
    gate.set()  # all four are sent
    assert len(list(batches)) == 6
    [events] = heard(log).values()
    before = events[: events.index(("read", 4))]
    assert [what for what, _ in before].count("told") >= 4


def test_three_batches_for_each_process_are_in_flight_by_default(log: Path) -> None:
    gate = multiprocessing.get_context("fork").Event()
    loader = DataLoader(Gated(log, gate), batch_size=2, num_workers=2, **FORK)
    batches = iter(loader)
    gate.set()
    assert len(list(batches)) == 12
    [events] = [events for events in heard(log).values() if ("read", 0) in events]
    before = events[: events.index(("read", 4))]  # of its second batch
    assert [value for what, value in before if what == "told"][:3] == [[0, 1], [4, 5], [8, 9]]


def test_the_loop_hears_of_two_more_and_no_state_counts_them(log: Path) -> None:
    loader = DataLoader(Hears(log), batch_size=4)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1, 2, 3]
    assert told(log) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    state = loader.state_dict()
    assert state["batches"] == 1
    del batches
    loader.close()
    resumed = DataLoader(Hears(log), batch_size=4)
    resumed.load_state_dict(state)
    log.write_text("")
    found = [batch.tolist() for batch in resumed]
    assert found[0] == [4, 5, 6, 7]
    check(log, found)


def test_the_loop_asks_no_sampler_early_that_may_follow_the_loop(log: Path) -> None:
    asked: list[int] = []

    class Follows(Sampler[int]):
        def __len__(self) -> int:
            return 8

        def __iter__(self) -> Iterator[int]:
            for index in range(8):
                asked.append(index)
                yield index

    batches = iter(DataLoader(Hears(log), batch_size=2, sampler=Follows()))
    next(batches)
    assert asked == [0, 1]
    assert told(log) == [[0, 1]]


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": True, "seed": 3}, {}])
def test_the_loop_gives_the_batches_that_it_gives_without(options: Any, log: Path) -> None:
    found = []
    for dataset in (Numbers(24), Hears(log)):
        torch.manual_seed(5)
        draws = [(b.tolist(), torch.rand(()).item()) for b in DataLoader(dataset, 4, **options)]
        found.append(draws)
    assert found[0] == found[1]


@kinds
def test_a_resumed_loader_tells_only_of_what_is_read(kind: str, log: Path) -> None:
    dataset = Hears(log)
    first = DataLoader(dataset, batch_size=4, shuffle=True, seed=1)
    batches = iter(first)
    next(batches), next(batches)
    loader = DataLoader(
        dataset, batch_size=4, shuffle=True, seed=1, begin_early=False, **KINDS[kind]
    )
    loader.load_state_dict(first.state_dict())
    first.close()
    log.write_text("")
    found = [batch.tolist() for batch in loader]
    loader.close()
    assert len(found) == 4
    check(log, found)


# ---- the end ----


class Ends(Numbers):
    """Sets an event when it is to forget."""

    fastload_per_worker = ()

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.ended, self.ends = threading.Event(), 0

    def will_read(self, indices: list[int]) -> None:
        if not indices:
            self.ends += 1
            self.ended.set()


@pytest.mark.parametrize("kind", ["loop", "threads"])
def test_a_break_ends_it_without_a_further_call(kind: str) -> None:
    dataset = Ends(24)
    for _ in DataLoader(dataset, batch_size=2, **KINDS[kind]):
        break
    assert dataset.ended.wait(WAIT_S)
    assert dataset.ends == 1


@kinds
@pytest.mark.parametrize("way", ["break", "close", "error"])
def test_each_way_out_ends_it_once(kind: str, way: str, log: Path) -> None:
    loader = DataLoader(Hears(log), batch_size=4, **KINDS[kind])
    try:
        for _ in loader:
            if way == "error":
                raise KeyError
            if way == "close":
                loader.close()
            break
    except KeyError:
        pass
    loader.close()
    for events in heard(log).values():
        mine = [value for what, value in events if what == "told"]
        assert mine.count([]) == 1
        assert mine[-1] == []


@pytest.mark.parametrize("kind", ["persistent threads", "persistent forks"])
def test_an_epoch_that_was_left_is_forgotten_before_the_next(kind: str, log: Path) -> None:
    loader = DataLoader(Hears(log), batch_size=4, begin_early=False, **KINDS[kind])
    next(iter(loader))
    assert len(list(loader)) == 6
    loader.close()
    whole: list[list[int]] = []
    for events in heard(log).values():
        loops: list[list[list[int]]] = [[]]
        for value in (value for what, value in events if what == "told"):
            if value:
                loops[-1].append(value)
            else:
                loops.append([])
        assert all(loop == sorted(loop) for loop in loops)  # none has batches of two epochs
        assert loops.pop() == []
        assert len(loops) <= 2
        whole += loops[-1]
    assert sorted(whole) == [[*range(k, k + 4)] for k in range(0, 24, 4)]


# ---- errors ----


@kinds
@pytest.mark.parametrize("of", [Hears, Getitems])
def test_its_error_is_raised_by_the_batch(kind: str, of: type[Hears], log: Path) -> None:
    dataset = of(log, raises_at=9)
    loader = DataLoader(dataset, 4, on_error="skip", retries=1, begin_early=False, **KINDS[kind])
    batches, found = iter(loader), []
    for place in range(6):
        if place == 2:
            with pytest.raises(OSError, match="no route to the store") as caught:
                next(batches)
            [note] = caught.value.__notes__[-1:]
            assert f"batch 2 of epoch 0; stage: {of.__name__}.will_read([8, 9, 10, 11])" in note
            del caught
        else:
            found += next(batches).tolist()
    with pytest.raises(StopIteration):
        next(batches)
    loader.close()
    assert found == [*range(8), *range(12, 24)]
    assert all(events[-1] == ("told", []) for events in heard(log).values())


@pytest.mark.parametrize("kind", ["loop", "threads", "persistent threads"])
def test_its_error_at_the_end_is_logged(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Numbers):
        fastload_per_worker = ()

        def will_read(self, indices: list[int]) -> None:
            assert indices

    with caplog.at_level(logging.ERROR, "fastload"):
        loader = DataLoader(Fails(8), batch_size=4, begin_early=False, **KINDS[kind])
        assert len(list(loader)) == 2
        loader.close()
    assert ["Fails.will_read([]) raised" in record.message for record in caplog.records] == [True]


# ---- which batches ----


class Sizes(Sampler[list[int]]):
    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@pytest.mark.parametrize("kind", ["loop", "threads", "forks"])
def test_it_hears_what_a_batch_sampler_gives_but_no_empty_batch(kind: str, log: Path) -> None:
    batches: Any = [[0, 1, 2], [], (3, 4), [5]]
    given = Sizes(*batches)
    loader = DataLoader(Hears(log), batch_sampler=given, collate_fn=list, **KINDS[kind])
    assert list(loader) == [list(batch) for batch in batches]
    check(log, [[0, 1, 2], [3, 4], [5]])


@pytest.mark.parametrize("kind", ["loop", "threads", "forks"])
def test_without_batches_it_hears_of_each_key(kind: str, log: Path) -> None:
    loader = DataLoader(Hears(log, 6), batch_size=None, **KINDS[kind])
    assert list(loader) == [*range(6)]
    check(log, [[k] for k in range(6)])


def test_a_list_as_a_key_is_told_as_its_indices() -> None:
    heard: list[list[int]] = []

    class Lists(Numbers):
        def __getitem__(self, index: Any) -> Any:
            return torch.tensor(index)

        def will_read(self, indices: list[int]) -> None:
            heard.append(indices)

    sampler = BatchSampler(range(4), 2, drop_last=False)
    assert len(list(DataLoader(Lists(4), batch_size=None, sampler=sampler))) == 2
    assert heard[:2] == [[0, 1], [2, 3]]


def test_a_batch_that_only_the_dataset_understands_is_not_told() -> None:
    heard: list[list[int]] = []

    class Blocks(Numbers):
        def __getitems__(self, block: int) -> list[int]:
            return [2 * block, 2 * block + 1]

        def will_read(self, indices: list[int]) -> None:
            heard.append(indices)

    batches: Any = Sizes(0, 1)
    loader = DataLoader(Blocks(4), batch_sampler=batches)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert heard == []


# ---- how it is found ----


class Told(Numbers):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.told: list[list[int]] = []

    def will_read(self, indices: list[int]) -> None:
        self.told.append(indices)


def test_it_is_found_through_torchs_wrappers() -> None:
    a, b = Told(10), Told(10)
    whole: Any = Subset(ConcatDataset([a, Numbers(5), Subset(b, [9, 8, 7])]), [17, 0, 12, 16, -1])
    will_read = will_read_of(whole)
    assert will_read is not None
    will_read([1, 0, 4, 2, 3])
    will_read([2])
    assert (a.told, b.told) == ([[0]], [[7, 7, 8]])
    will_read([])
    assert (a.told, b.told) == ([[0], []], [[7, 7, 8], []])


def test_it_is_found_through_fastloads_wrappers() -> None:
    class Texts(Told):
        def __getitem__(self, index: int) -> Any:
            return [index] * 3

    texts = Texts(6)
    rows = Packed(texts, length=6, lengths=[3] * 6, max_segments=2)
    assert [batch["tokens"].shape[0] for batch in DataLoader(rows, batch_size=2)] == [2, 1]
    assert [len(batch) for batch in texts.told] == [4, 2, 0]
    assert sorted(texts.told[0] + texts.told[1]) == [*range(6)]
    found: Any = Told(4)
    assert will_read_of(Numbered(found)) == found.will_read
    nothing: Any = Numbers(4)
    assert will_read_of(Numbered(nothing)) is None
    assert will_read_of(Packed([[1]], length=4)) is None


def test_an_index_that_is_out_of_range_raises_only_as_it_is_read() -> None:
    a = Told(4)
    parts: Any = ConcatDataset([a, Numbers(4)])
    for dataset in (parts, Subset(parts, range(8))):
        loader = DataLoader(dataset, batch_sampler=Sizes([0, 1], [2, 99]))
        batches = iter(loader)
        next(batches)
        with pytest.raises(IndexError) as caught:
            next(batches)
        assert "sample index 99" in caught.value.__notes__[-1]
        del caught


def test_a_wrapper_that_reads_in_its_own_way_is_not_looked_through() -> None:
    class Shifted(Subset[int]):
        def __getitem__(self, index: Any) -> int:
            return self.dataset[index + 1]

        def __getitems__(self, indices: list[int]) -> list[int]:
            return [self[index] for index in indices]

    assert will_read_of(Shifted(Told(4), [0, 1])) is None
    assert will_read_of(ConcatDataset([Numbers(4), Numbers(4)])) is None
    assert will_read_of([1, 2]) is None


def test_a_loader_through_a_subset_tells_the_dataset_below(log: Path) -> None:
    dataset = Subset(Hears(log), [*range(20, 4, -1)])
    loader = DataLoader(dataset, batch_size=4, num_workers=2, **FORK)
    check(log, [batch.tolist() for batch in loader])


def test_a_dataset_without_it_is_asked_once_and_has_no_thread() -> None:
    class Asked(Numbers):
        fastload_per_worker = ()
        asked = 0

        def __getattr__(self, name: str) -> Any:
            Asked.asked += name == "will_read"
            raise AttributeError(name)

    loader = DataLoader(Asked(8), batch_size=2, num_workers=2)
    batches = iter(loader)
    next(batches)
    assert "fastload-look-ahead" not in fastload_threads()
    assert len(list(batches)) == 3
    assert Asked.asked == 1
    assert fastload.DataLoader(Asked(8)).chosen().kind == "none"
