"""Promises:
- A state taken at any step of three epochs resumes with other worker counts and world sizes. All remaining batches
  are bit-equal, augmentation included, also after a second resume and in the two epochs after it.
- No sample is read to resume. This holds after skipped samples, deliveries out of order and at the end of an epoch,
  and with torch's and a user's samplers.
- A state that does not fit is refused. The error names the field, both values and the remedy.
- A sampler is run again from torch's global state, its generators and its own `state_dict()`. One that gives other
  indices than before raises `StateError`.
- With a seed, a sampler draws from a stream of (seed, epoch), apart from the loop. So the epochs after a resume are the
  same.
- A loader that resumes after Ctrl-C gives the rest of the epoch.
- An `on_stats` that raises costs no batch.
- A state that another thread takes is that before or after a batch, at every line that the loop runs.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import re
import struct
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import fastload
from fastload import DataLoader
from fastload.errors import StateError
from fastload.order.sampler_state import checksum
from tests.resuming import resumes_twice, through_json

SEED = 7
Row = tuple[float, ...]


class Augmented(Dataset[torch.Tensor]):
    """Rows of the index and three numbers drawn for it; `reads` holds the indices read."""

    fastload_per_worker = ()  # one for all workers, to be looked at

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads.append(int(index))
        return torch.cat([torch.tensor([index], dtype=torch.float64), torch.rand(3).double()])


def plain(batch: torch.Tensor) -> list[Row]:
    return [tuple(row) for row in batch.reshape(-1, 4).tolist()]


def indices(batches: list[list[Row]]) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


def history(loader: DataLoader[Any], epochs: int) -> tuple[list[list[list[Row]]], list[Any]]:
    """Run `epochs`; return their batches and the state at every step, each with what is left then.

    A state comes with (the epoch that goes on or is next, the batches of it that are handed out).
    """
    batches: list[list[list[Row]]] = []
    states = [(loader.state_dict(), 0, 0)]
    for epoch in range(epochs):
        iterator = iter(loader)
        batches.append([])
        states.append((loader.state_dict(), epoch, 0))
        for batch in iterator:
            batches[-1].append(plain(batch))
            states.append((loader.state_dict(), epoch, len(batches[-1])))
        states.append((loader.state_dict(), epoch + 1, 0))
    return batches, states


def run(loader: DataLoader[Any], epochs: int = 1) -> list[list[list[Row]]]:
    return [[plain(batch) for batch in loader] for _ in range(epochs)]


# At every step.


def alone(workers: int, **more: Any) -> DataLoader[Any]:
    options: dict[str, Any] = {"shuffle": True, "seed": SEED, **more}
    return DataLoader(Augmented(26), 4, num_workers=workers, **options)


class Broken(Augmented):
    fastload_per_worker = ()

    def __getitem__(self, index: int) -> torch.Tensor:
        row = super().__getitem__(index)
        if index % 5 == 0:
            raise ValueError(index)
        return row


@pytest.mark.parametrize("workers", [0, 2])
def test_after_skipped_samples_no_sample_is_read_to_resume(workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Broken(26), 4, seed=SEED, num_workers=workers, on_error="skip")

    for state, _, done in history(make(), 1)[1]:
        with make() as loader:
            loader.load_state_dict(state)
            run(loader)
            reads = loader.dataset.reads  # type: ignore[attr-defined]
            assert sorted(reads) == list(range(4 * done, 26))


# Ranks.


def ranks(
    world: int,
    *,
    length: int = 28,
    batch: int = 8,
    workers: int = 0,
    ends: Any = "pad",
    shuffle: bool = True,
    **more: Any,
) -> list[DataLoader[Any]]:
    options: dict[str, Any] = {"seed": SEED, **more}
    return [
        DataLoader(
            Augmented(length),
            batch // world,
            sampler=fastload.RankSampler(
                length, rank=rank, world_size=world, seed=3, ends=ends, shuffle=shuffle
            ),
            num_workers=workers,
            **options,
        )
        for rank in range(world)
    ]


def together(parts: list[list[list[Row]]]) -> list[list[Row]]:
    """The global batches of one epoch, in the global order."""
    merged = []
    for step in itertools.zip_longest(*parts, fillvalue=[]):
        turns = itertools.zip_longest(*step)
        merged.append([row for turn in turns for row in turn if row is not None])
    return merged


WORLDS = [
    *((*worlds, 26, "pad") for worlds in ((1, 2), (2, 2), (2, 4), (4, 1))),
    *((*worlds, 28, "pad") for worlds in ((1, 4), (4, 2))),
    *((1, 2, 29, "drop"), (4, 1, 29, "drop"), (1, 2, 29, "uneven"), (4, 1, 29, "uneven")),
]


@pytest.mark.parametrize(("before", "after", "length", "ends"), WORLDS)
def test_from_every_step_in_another_world(before: int, after: int, length: int, ends: str) -> None:
    workers = (0, 1, 3)
    """The worlds together take each step."""
    saved = [history(loader, 2)[1] for loader in ranks(before, length=length, ends=ends)]
    reference = [run(loader, 3) for loader in ranks(after, length=length, ends=ends)]
    for place, step in enumerate(zip(*saved, strict=True)):
        assert all(one == step[0] for one in step), "the state is the same on all ranks"
        if place % 3 != (before + after + length) % 3:
            continue
        state, epoch, done = step[0]
        following = []
        for rank, loader in enumerate(
            ranks(after, length=length, ends=ends, workers=workers[place % 3] if after < 4 else 0)
        ):
            with loader:
                loader.load_state_dict(through_json(state))
                rest = run(loader)[0]
                assert rest == reference[rank][epoch][done:], (place, epoch, done)
                reads = loader.dataset.reads  # type: ignore[attr-defined]
                assert Counter(reads) == Counter(indices(rest)), "its part of what is left"
                following += run(loader)
        if epoch < 2:
            assert following == [one[epoch + 1] for one in reference], (place, epoch, done)


def test_five_kills_and_resumes_with_changing_worlds() -> None:
    """Each sample of the epoch exactly once, in the one order, drawing what it would have drawn."""
    whole = together([run(loader)[0] for loader in ranks(1, length=120, batch=12)])
    got: list[list[Row]] = []
    state: Any = None
    lives = [(1, 2, 0), (2, 1, 3), (4, 3, 1), (2, 0, 2), (1, 1, 0), (3, None, 1)]
    for world, steps, workers in lives:
        loaders = ranks(world, length=120, batch=12, workers=workers)
        parts = []
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            parts.append([plain(batch) for batch in itertools.islice(iter(loader), steps)])
        got += together(parts)
        state = through_json(loaders[-1].state_dict())
        for loader in loaders:
            loader.close()
    assert got == whole
    assert Counter(indices(got)) == Counter(range(120))


@pytest.mark.parametrize("ends", ["pad", "drop", "uneven"])
@pytest.mark.parametrize("length", [41, 43])
def test_the_states_of_ranks_that_end_apart_are_taken_and_lose_nothing(
    length: int, ends: str
) -> None:
    """Ranks of one sample more have one batch more: a state of the others leaves it to be read."""
    whole = [run(loader)[0] for loader in ranks(4, length=length, ends=ends)]
    for rank, saver in enumerate(ranks(4, length=length, ends=ends)):
        for done, _ in enumerate(saver, 1):
            if done < len(saver) - 1:
                continue
            state = through_json(saver.state_dict())
            for other, loader in enumerate(ranks(4, length=length, ends=ends)):
                loader.load_state_dict(state)
                assert run(loader)[0] == whole[other][done:], (rank, done, other)


# Torch's samplers, and a user's.


TORCHS: dict[str, Callable[[Augmented, int], dict[str, Any]]] = {
    "shuffle": lambda data, s: {"shuffle": True},
    "generator": lambda data, s: {"shuffle": True, "generator": torch.Generator().manual_seed(s)},
    "sampler's generator": lambda data, s: {
        "sampler": RandomSampler(data, generator=torch.Generator().manual_seed(s))
    },
    "weighted": lambda data, s: {
        "sampler": WeightedRandomSampler([1.0 + k for k in range(26)], 26)
    },
    "batch sampler": lambda data, s: {
        "batch_sampler": BatchSampler(RandomSampler(data), 4, drop_last=False),
        "batch_size": 1,
    },
    "a user's": lambda data, s: {"sampler": Own(26)},
    "a user's batches": lambda data, s: {"batch_sampler": OwnBatches(26), "batch_size": 1},
}


class Held(Sampler[int]):
    """Draws each index from generators of its own."""

    def __init__(self) -> None:
        self.python, self.new = random.Random(3), np.random.default_rng(3)
        self.old, self.torchs = np.random.RandomState(3), torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return 26

    def __iter__(self) -> Iterator[int]:
        for _ in range(26):
            drawn = self.python.gauss(0, 1) + self.new.normal() + self.old.normal()
            yield int(100 * abs(drawn + torch.randn((), generator=self.torchs).item())) % 26


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "distributed": lambda: {"sampler": DistributedSampler(range(52), 2, 1, seed=3)},
    "windows": lambda: {"sampler": fastload.RankSampler(26, rank=0, world_size=1, window=9, run=2)},
    "epochs of its own": lambda: {"sampler": Own(26)},
    "batches of its own": lambda: {"batch_sampler": OwnBatches(26), "batch_size": 1},
    "a state of its own": lambda: {"sampler": Remembering()},
    "a state of its batches": lambda: {"batch_sampler": RememberingBatches(), "batch_size": 1},
    "torch's global generator, given": lambda: {
        "sampler": RandomSampler(range(26), generator=torch.default_generator)
    },
    "generators of its own": lambda: {"sampler": Held()},
    "draws batch by batch": lambda: {
        "batch_sampler": Lazy(from_torch, from_python, from_numpy),
        "batch_size": 1,
    },
    "lists of indices": lambda: {
        "batch_size": None,
        "sampler": BatchSampler(fastload.RankSampler(26, rank=0, world_size=1), 4, drop_last=False),
    },
}


class ByList(Augmented):
    def __getitem__(self, index: Any) -> torch.Tensor:
        if not isinstance(index, list):
            return super().__getitem__(index)
        return torch.stack([super(ByList, self).__getitem__(k) for k in index])


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_second_resume_and_two_epochs_after_it_with_a_sampler(kind: str) -> None:
    """Whatever the global generators hold as the loader is made."""
    states = itertools.count()

    def make() -> DataLoader[Any]:
        torch.manual_seed(next(states))
        options = {"batch_size": 4, "num_workers": 2, "seed": SEED, **SAMPLERS[kind]()}
        return DataLoader(ByList(52), **options)

    resumes_twice(make)


@pytest.mark.parametrize("kind", TORCHS)
def test_the_rest_of_an_epoch_of_torchs_and_a_users_samplers(kind: str) -> None:
    """Whatever the generators hold where it is loaded: another process may have drawn from them."""

    def make(workers: int, generator_seed: int) -> DataLoader[Any]:
        data = Augmented(26)
        options = {"batch_size": 4, **TORCHS[kind](data, generator_seed)}
        return DataLoader(data, num_workers=workers, **options)

    torch.manual_seed(5)
    loader = make(2, 5)
    for epoch in range(2):
        batches, states = [], {}
        for done, batch in enumerate(loader, 1):
            batches.append(plain(batch))
            if done % 3 == epoch:
                states[done] = through_json(loader.state_dict())
        for done, state in states.items():
            torch.manual_seed(1000 + done)
            with make((0, 1, 3)[done // 3 % 3], 1000 + done) as again:
                again.load_state_dict(state)
                rest = run(again)[0]
                assert rest == batches[done:], done
                assert Counter(again.dataset.reads) == Counter(indices(rest))  # type: ignore[attr-defined]
    loader.close()


@pytest.mark.parametrize("seed", [None, SEED])
def test_asking_for_the_state_draws_nothing(seed: int | None) -> None:
    loader = DataLoader(Augmented(26), 4, shuffle=True, seed=seed, num_workers=2)
    before = torch.get_rng_state()
    loader.state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    iterator = iter(loader)
    next(iterator)
    before = torch.get_rng_state()
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), before)
    loader.close()


# A user's samplers.


class Own(Sampler[int]):
    """A sampler with an epoch, and nothing that fastload could know."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(self.length, generator=generator).tolist()


class OwnBatches(Own):
    """Batches of the user's, of any size."""

    def __iter__(self) -> Iterator[Any]:
        order = list(super().__iter__())
        for size in itertools.cycle((3, 1, 4)):
            if not order:
                return
            yield order[:size]
            order = order[size:]

    def __len__(self) -> int:
        return 10


class Shuffled(Own):
    """Draws its order with `shuffled`, in `__iter__` or when it is first asked."""

    def __init__(self, shuffled: Callable[[int], list[int]], *, late: bool = False) -> None:
        super().__init__(26)
        self.shuffled, self.late = shuffled, late

    def __iter__(self) -> Iterator[int]:
        return self.lazily() if self.late else iter(self.shuffled(self.length))

    def lazily(self) -> Iterator[int]:
        yield from self.shuffled(self.length)


def from_torch(n: int) -> list[int]:
    return torch.randperm(n).tolist()  # type: ignore[no-any-return]


def from_python(n: int) -> list[int]:
    return random.sample(range(n), n)


def from_numpy(n: int) -> list[int]:
    return np.random.permutation(n).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("late", "workers", "seed"),
    [(False, 0, None), (False, 2, SEED), (True, 0, SEED), (True, 2, None)],
)
def test_an_order_drawn_from_torchs_global_state_is_drawn_again(
    late: bool, workers: int, seed: int | None
) -> None:
    """Whenever it is drawn, and whatever the loop draws between `iter()` and the first batch, or later."""

    def make(workers: int) -> DataLoader[Any]:
        sampler = Shuffled(from_torch, late=late)
        return DataLoader(Augmented(26), 4, sampler=sampler, num_workers=workers, seed=seed)

    torch.manual_seed(5)
    loader = make(workers)
    for _ in range(2):
        iterator = iter(loader)
        batches, states = [], []
        torch.rand(3)
        for batch in iterator:
            batches.append(plain(batch))
            states.append(through_json(loader.state_dict()))
            torch.rand(3)
        assert sorted(indices(batches)) == list(range(26))
        for done, state in enumerate(states, 1):
            torch.manual_seed(1000 + done)
            before = torch.get_rng_state()
            with make(2 - workers) as again:
                again.load_state_dict(state)
                assert run(again)[0] == batches[done:], done
            assert torch.equal(torch.get_rng_state(), before)
    loader.close()


class Lazy(Own):
    """12 batches. Each is drawn with all of `shuffled` when it is asked for."""

    def __init__(self, *shuffled: Callable[[int], list[int]]) -> None:
        super().__init__(12)
        self.shuffled = shuffled

    def __iter__(self) -> Iterator[Any]:
        for _ in range(12):
            yield [shuffled(26)[0] for shuffled in self.shuffled]


def lazily(workers: int) -> DataLoader[Any]:
    return DataLoader(Augmented(26), batch_sampler=Lazy(from_torch), num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_with_a_seed_a_sampler_and_the_loop_draw_apart(workers: int) -> None:
    """Neither changes what the other draws: not in an epoch, and not after a resume."""

    def make() -> DataLoader[Any]:
        sampler = Lazy(from_torch, from_python, from_numpy)
        return DataLoader(Augmented(26), batch_sampler=sampler, num_workers=workers, seed=SEED)

    def drawn(seed: int, loader: Any, *, states: list[Any] | None = None) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        batches, draws = [], []
        for batch in loader:
            batches.append(plain(batch))
            draws += [float(torch.rand(())), random.random(), np.random.random()]
            if states is not None:
                states.append(through_json(loader.state_dict()))
        return batches, draws

    states: list[Any] = []
    batches, draws = drawn(1, make(), states=states)
    others, _ = drawn(2, make())
    assert batches == others
    assert draws == drawn(1, torch.zeros(12, 1, 4))[1]
    assert all(draws["torch"] is None for draws in states[0]["draws"])
    for done, state in enumerate(states, 1):
        with make() as again:
            again.load_state_dict(state)
            assert drawn(1, again) == (batches[done:], draws[: 3 * (12 - done)])


@pytest.mark.parametrize("workers", [0, 2])
def test_draws_batch_by_batch_resume_exactly_without_a_seed(workers: int) -> None:
    """What the sampler draws after the replay continues it, whatever the generator held that was there."""

    torch.manual_seed(5)
    with lazily(workers) as loader:
        batches, states = [], []
        for batch in loader:
            batches.append(plain(batch))
            states.append(through_json(loader.state_dict()))
    for done, state in enumerate(states, 1):
        torch.manual_seed(1000 + done)
        before = torch.get_rng_state()
        with lazily(2 - workers) as again:
            again.load_state_dict(state)
            assert indices(run(again)[0]) == indices(batches[done:]), done
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("done", "before"), [(1, False), (7, False), (3, True)])
def test_draws_batch_by_batch_between_those_of_the_loop_are_refused(
    done: int, before: bool, workers: int
) -> None:
    """At once if the loop drew before the state was taken. Else by the checksum, or at the draws after the resume."""

    with lazily(workers) as loader:
        for _ in itertools.islice(loader, done):
            if before:
                torch.rand(3)
            state = through_json(loader.state_dict())
            torch.rand(3)
    with lazily(workers) as again:
        again.load_state_dict(state)
        with pytest.raises(StateError, match=r"(?s)(gave other indices|draws from torch).*seed="):
            for _ in again:
                assert not before
                torch.rand(3)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("draw", [from_python, from_numpy])
def test_a_sampler_that_gives_other_indices_on_resume_is_refused(draw: Any, workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Augmented(26), 4, sampler=Shuffled(draw), num_workers=workers)

    loader = make()
    next(iter(loader))
    state = through_json(loader.state_dict())
    loader.close()
    again = make()
    again.load_state_dict(state)
    with pytest.raises(StateError, match=r"checksum.*Shuffled gave other indices.*seed="):
        iter(again)
    again.close()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_epoch_that_runs_goes_on_after_a_state_that_is_refused(kind: Any) -> None:
    options: Any = {"num_workers": 2, "worker_method": kind, "persistent_workers": True}
    torch.manual_seed(2)
    with DataLoader(Augmented(26), 4, shuffle=True, **options) as loader:
        expected = indices(list(loader))
    torch.manual_seed(2)
    with DataLoader(Augmented(26), 4, shuffle=True, **options) as loader:
        running = iter(loader)
        first = [next(running), next(running)]
        loader.load_state_dict({**loader.state_dict(), "checksum": 5})
        with pytest.raises(StateError, match="checksum"):
            iter(loader)
        assert indices([*first, *running]) == expected


class Remembering(Own):
    """Draws from a generator that fastload does not know, and gives its state."""

    def __init__(self, bad: bool = False) -> None:
        super().__init__(26)
        self.source, self.bad = random.Random(5), bad

    def __iter__(self) -> Iterator[int]:
        yield from self.source.sample(range(26), 26)

    def state_dict(self) -> Any:
        version, words, gauss = self.source.getstate()
        return {"source": {1, 2} if self.bad else [version, list(words), gauss]}

    def load_state_dict(self, state: Any) -> None:
        version, words, gauss = state["source"]
        self.source.setstate((version, tuple(words), gauss))


class RememberingBatches(BatchSampler):
    """The same, as batches: the state is that of the batch sampler."""

    def __init__(self) -> None:
        super().__init__(Remembering(), 4, drop_last=False)
        self.source = random.Random(6)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.source.sample(range(26), 26)
        yield from (order[k : k + 4] for k in range(0, 26, 4))

    state_dict = Remembering.state_dict
    load_state_dict = Remembering.load_state_dict
    bad = False


def test_a_sampler_whose_state_is_no_json_is_named_when_the_state_is_asked_for() -> None:
    loader = DataLoader(Augmented(26), 4, sampler=Remembering(bad=True), seed=SEED)
    for _ in loader:
        with pytest.raises(StateError, match=r"sampler_state: JSON cannot hold .*Remembering"):
            loader.state_dict()


class OfRank(DistributedSampler[int]):
    """No class that fastload knows."""


def test_a_state_of_another_rank_is_not_held_against_its_indices() -> None:
    """A checkpoint is often that of rank 0 alone."""

    def make(rank: int) -> DataLoader[Any]:
        return DataLoader(Augmented(24), 4, sampler=OfRank(range(24), 2, rank), seed=SEED)

    loader, other = make(0), make(1)
    iterator, others = iter(loader), iter(other)
    next(iterator)
    next(others)
    state = through_json(loader.state_dict())
    again = make(1)
    again.load_state_dict(state)
    rest = iter(again)
    assert again.state_dict() == other.state_dict()
    assert [plain(batch) for batch in rest] == [plain(batch) for batch in others]


def test_the_checksum_of_indices() -> None:
    """That of the 64-bit integers, whatever holds them; of others that of their text, without addresses."""
    expected = zlib.crc32(struct.pack("<3q", 3, 1, -2))
    for given in ([3, 1, -2], (3, 1, -2), np.array([3, 1, -2]), torch.tensor([3, 1, -2])):
        assert checksum(given, 0) == expected
    assert checksum([1, -2], checksum(3, 0)) == expected
    assert checksum(["a"], 0) != checksum(["b"], 0)
    assert checksum(2**70, 0) != checksum(2**71, 0)
    assert checksum(object(), 0) == checksum(object(), 0)
    assert checksum((k for k in "a"), 0) == checksum((k for k in "b"), 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_on_stats_loses_no_batch(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastload.engine.epoch_counts, "TELL_SECONDS", 0.0)
    told = []

    def tell(stats: fastload.Stats) -> None:
        told.append(stats)
        if len(told) % 2:
            raise LookupError("the logger is simulated to fail")

    with alone(workers, on_stats=tell, shuffle=False) as loader:
        iterator = iter(loader)
        got: list[Any] = []
        failed = 0
        while True:
            try:
                got.append(plain(next(iterator)))
            except LookupError as error:
                failed += 1
                assert "on_stats" in error.__notes__[-1]
            except StopIteration:
                break
            assert loader.state_dict()["batches"] == len(got)
    assert failed > 3
    assert indices(got) == list(range(26))


# Out of order.


class Gated(Augmented):
    """Samples in `held` are read only when the test lets them."""

    def __init__(self, length: int, held: set[int]) -> None:
        super().__init__(length)
        self.held = held
        self.opened = threading.Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.held:
            assert self.opened.wait(30)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("workers", "in_order", "sampler"),
    [(0, False, None), (3, True, None), (0, True, range(20)), (3, False, range(20))],
)
def test_batches_that_came_before_their_turn_come_once(
    workers: int, in_order: bool, sampler: Any
) -> None:
    """Forced: batches 0 and 3 are held back while four others are handed out."""
    held = Gated(20, {0, 7})
    options: dict[str, Any] = {"sampler": sampler, "seed": SEED}
    loader = DataLoader(held, 2, num_workers=4, in_order=False, prefetch_batches=8, **options)
    iterator = iter(loader)
    early, states = [], []
    try:
        for _ in range(4):
            early.append(plain(next(iterator)))
            states.append(through_json(loader.state_dict()))
    finally:
        held.opened.set()
    late = [plain(batch) for batch in iterator]
    following = run(loader)[0]
    loader.close()
    assert len(early) == 4
    assert not {0, 1, 6, 7} & set(indices(early))
    whole = sorted(early + late)
    assert indices(whole) == list(range(20))
    for done, state in enumerate(states, 1):
        data = Augmented(20)
        with DataLoader(data, 2, num_workers=workers, in_order=in_order, **options) as again:
            again.load_state_dict(state)
            assert again.state_dict() == state
            rest = run(again)[0]
            assert sorted(early[:done] + rest) == whole, done
            if in_order:
                assert rest == sorted(rest)
            assert Counter(data.reads) == Counter(indices(rest))
            assert sorted(run(again)[0]) == sorted(following)


def test_what_came_early_on_one_rank_is_not_what_came_early_on_another() -> None:
    """With `in_order=False` the ranks differ in what they had: a state is then its rank's own."""

    def make(rank: int, data: Augmented) -> DataLoader[Any]:
        sampler = fastload.RankSampler(24, rank=rank, world_size=2, shuffle=False)
        return DataLoader(
            data, 2, sampler=sampler, seed=SEED, num_workers=2, in_order=False, prefetch_batches=6
        )

    held = Gated(24, {0})
    loader = make(0, held)
    iterator = iter(loader)
    had = [plain(next(iterator)) for _ in range(2)]
    state = through_json(loader.state_dict())
    held.opened.set()
    loader.close()
    with make(1, Augmented(24)) as other, pytest.raises(StateError, match="rank"):
        other.load_state_dict(state)
    with make(0, Augmented(24)) as same_rank:
        same_rank.load_state_dict(state)
        assert sorted(indices(had) + indices(run(same_rank)[0])) == list(range(0, 24, 2))


# What the state is.


def test_a_state_stays_what_it_is() -> None:
    """It is a value: no part of the loader that goes on, on neither side."""
    loader = alone(0)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    kept = copy.deepcopy(state)
    rest = [plain(batch) for batch in iterator]
    assert state == kept
    again = alone(0)
    again.load_state_dict(state)
    for key in list(state):
        state[key] = None
    assert run(again)[0] == rest


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_is_pickled_or_copied_keeps_what_was_loaded(workers: int) -> None:
    batches, states = history(alone(0), 1)
    state, epoch, done = states[3]
    loader = alone(workers)
    loader.load_state_dict(state)
    for again in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert again.state_dict() == state
        assert run(again)[0] == batches[epoch][done:]
        again.close()
    assert run(loader)[0] == batches[epoch][done:]
    loader.close()


def test_a_state_is_loaded_under_a_loop_that_sets_the_epoch() -> None:
    """`for epoch in range(start, ...): set_epoch(epoch)`, as DDP scripts do: it fits, so it goes on."""
    for kind in ("loader", "sampler"):
        (reference,) = ranks(1)
        batches, states = history(reference, 2)
        state, epoch, done = states[-3]
        assert (epoch, done > 0) == (1, True)
        (loader,) = ranks(1)
        loader.load_state_dict(state)
        (loader if kind == "loader" else loader.sampler).set_epoch(1)  # type: ignore[union-attr]
        assert run(loader)[0] == batches[1][done:], kind


@pytest.mark.parametrize("kind", ["loader", "sampler"])
def test_another_epoch_after_loading_warns_and_begins_it(kind: str) -> None:
    (reference,) = ranks(1)
    batches, states = history(reference, 4)
    state = next(state for state, epoch, done in states if (epoch, done) == (1, 2))
    (loader,) = ranks(1)
    loader.load_state_dict(state)
    told: Any = loader if kind == "loader" else loader.sampler

    def set_and_run() -> Any:
        told.set_epoch(3)
        return run(loader)[0]

    with pytest.warns(UserWarning, match="epoch"):
        got = set_and_run()
    assert got == batches[3]


# What does not fit.


class Lines(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


def one_rank(
    *,
    length: int = 24,
    batch: int = 8,
    rank: dict[str, Any] | None = None,
    sampler: Any = None,
    dataset: Any = None,
    **more: Any,
) -> DataLoader[Any]:
    ours = {"rank": 0, "world_size": 1, "seed": 3, **(rank or {})}
    if sampler is None and dataset is None and "shuffle" not in more:
        sampler = fastload.RankSampler(length, **ours)
    options = {"seed": SEED, **more}
    return DataLoader(dataset or Augmented(length), batch, sampler=sampler, **options)


MISFITS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str, str]] = {
    # name: (made by, loaded by, the field, the value saved, the value here), as patterns
    "seed": (one_rank, lambda: one_rank(seed=8), "seed", "7", "8"),
    "no seed": (one_rank, lambda: one_rank(seed=None), "seed", "7", "None"),
    "sampler": (
        one_rank,
        lambda: one_rank(sampler=SequentialSampler(range(24))),
        "sampler",
        "RankSampler",
        "SequentialSampler|sequential",
    ),
    "sampler's seed": (one_rank, lambda: one_rank(rank={"seed": 4}), "seed", "3", "4"),
    "sampler's shuffle": (
        one_rank, lambda: one_rank(rank={"shuffle": False}), "shuffle", "(?i:true)", "(?i:false)",
    ),
    "ends": (one_rank, lambda: one_rank(rank={"ends": "drop"}), "ends", "pad", "drop"),
    "length": (one_rank, lambda: one_rank(length=25), "length|samples", "24", "25"),
    "batch": (one_rank, lambda: one_rank(batch=6), "batch", "8", "6"),
    "no batch": (one_rank, lambda: one_rank(batch=None), "batch", "8", "None|1"),
    "global batch": (
        one_rank,
        lambda: one_rank(rank={"rank": 1, "world_size": 2}),
        "global batch|global_batch",
        "8",
        "16",
    ),
    "drop_last": (
        one_rank, lambda: one_rank(drop_last=True), "drop_last", "(?i:false)", "(?i:true)",
    ),
    "generator": (
        lambda: one_rank(sampler=RandomSampler(range(24), generator=torch.Generator())),
        lambda: one_rank(sampler=RandomSampler(range(24))),
        "generators", "1", "0",
    ),
    "iterable": (
        lambda: DataLoader(Lines(), 8, seed=SEED), one_rank, "kind|iterable", "iterable", "map",
    ),
    "map": (
        one_rank, lambda: DataLoader(Lines(), 8, seed=SEED), "kind|iterable", "map", "iterable",
    ),
    "batch sampler": (
        lambda: DataLoader(Augmented(24), batch_sampler=OwnBatches(24), seed=SEED),
        one_rank,
        "sampler",
        "OwnBatches",
        "RankSampler",
    ),
}  # fmt: skip


@pytest.mark.parametrize("field", MISFITS)
@pytest.mark.parametrize("when", ["before", "within"])
def test_a_state_that_does_not_fit_is_refused(field: str, when: str) -> None:
    made_by, loaded_by, name, saved, here = MISFITS[field]
    maker = made_by()
    iterator = iter(maker)
    if when == "within":
        next(iterator)
    state = through_json(maker.state_dict())
    maker.close()
    loader = loaded_by()
    with pytest.raises(StateError) as refused:
        loader.load_state_dict(state)
        list(loader)  # what only the order can tell is told by iter()
    said = str(refused.value)
    for part in (name, rf"\b({saved})\b", rf"\b({here})\b"):
        assert re.search(part, said), (part, said)
    assert any(word in said for word in REMEDIES), f"no remedy in: {said}"
    assert isinstance(refused.value, ValueError)
    loader.close()


REMEDIES = ("build", "pass", "use", "give", "load it", "make", "choose", "set ", "keep", "start")


def world_of(patch: pytest.MonkeyPatch, size: int) -> None:
    """Stand in for a process group of `size` ranks, of which this is rank 0 (simulated)."""
    patch.setattr(torch.distributed, "is_available", lambda: True)
    patch.setattr(torch.distributed, "is_initialized", lambda: True)
    patch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    patch.setattr(torch.distributed, "get_world_size", lambda *_: size)


@pytest.mark.parametrize("batch", [(4, 4), (4, 2)], ids=["local batch", "global batch"])
def test_another_world_needs_a_sampler_that_knows_worlds(
    batch: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a user's sampler gives this rank in another world, fastload cannot know."""
    world_of(monkeypatch, 2)
    loader = DataLoader(Augmented(24), batch[0], sampler=Own(24), seed=SEED)
    next(iter(loader))
    state = through_json(loader.state_dict())
    world_of(monkeypatch, 4)
    other = DataLoader(Augmented(24), batch[1], sampler=Own(24), seed=SEED)
    with pytest.raises(StateError, match=r"world_size.*\b2\b.*\b4\b") as refused:
        other.load_state_dict(state)
    assert "RankSampler" in str(refused.value), "the remedy"


@pytest.mark.parametrize("batch", [(4, 2), (4, 4)], ids=["global batch", "local batch"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_torchs_sampler_of_ranks_goes_on_exactly_or_refuses(
    drop_last: bool, batch: tuple[int, int]
) -> None:
    """From two ranks to four: what is left at the same global batch, or a refusal."""

    def make(world: int, local: int) -> list[DataLoader[Any]]:
        return [
            DataLoader(
                Augmented(27),
                local,
                sampler=DistributedSampler(range(27), world, rank, seed=3, drop_last=drop_last),
                seed=SEED,
            )
            for rank in range(world)
        ]

    before = make(2, batch[0])
    iterators = [iter(loader) for loader in before]
    had = together([[plain(next(iterator)) for _ in range(2)] for iterator in iterators])
    states = [through_json(loader.state_dict()) for loader in before]
    assert states[0] == states[1]
    after = make(4, batch[1])
    if batch[0] == batch[1]:
        for loader in after:
            with pytest.raises(StateError, match="global_batch"):
                loader.load_state_dict(states[0])
        return
    whole = together([run(loader)[0] for loader in make(4, batch[1])])
    assert whole[:2] == had
    for loader in after:
        loader.load_state_dict(states[1])
    assert together([run(loader)[0] for loader in after]) == whole[2:]


def test_a_state_of_before_a_field_was_added_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = one_rank()
    next(iter(loader))
    older = loader.state_dict()
    del older["run"]
    with pytest.raises(StateError, match="run: the state has no such field"):
        one_rank().load_state_dict(older)
    monkeypatch.setitem(fastload.order.state.LATER, "run", None)
    loader.load_state_dict(older)
    assert loader.state_dict()["run"] is None


@pytest.mark.parametrize("until_the_end", [False, True])
def test_a_state_that_a_sampler_does_not_take_is_named(until_the_end: bool) -> None:
    maker = one_rank(sampler=Remembering())
    for _ in maker:
        if not until_the_end:
            break
    state = {**through_json(maker.state_dict()), "sampler_state": {"source": 3}}
    loader = one_rank(sampler=Remembering())
    before = loader.state_dict()
    with pytest.raises(StateError, match="^sampler_state: Remembering cannot load its saved state"):
        loader.load_state_dict(state)
        assert not until_the_end
        iter(loader)
    assert not until_the_end or loader.state_dict() == before


@pytest.mark.parametrize("garbage", [None, [], "x", 3, {}, {"epoch": 1}, {1: 2}, {"state": {}}])
def test_what_is_no_state_is_refused(garbage: Any) -> None:
    loader = alone(0)
    with pytest.raises(StateError):
        loader.load_state_dict(garbage)
    assert run(loader)[0] == run(alone(0))[0], "the loader is as it was"


def test_torchs_iterator_has_no_state_and_says_so() -> None:
    """A warning and no error: Lightning asks every loader that has the method, at each checkpoint."""
    state = alone(0).state_dict()
    loader = alone(1, worker_method="torch")
    with pytest.warns(UserWarning, match="worker_method.*nothing to save"):
        assert "batches" not in loader.state_dict()
    with pytest.warns(UserWarning, match="the epoch starts from its first batch"):
        loader.load_state_dict(state)


# States that another thread asks for. Forced: one is taken before every line that the loop runs.


class Streamed(IterableDataset[int]):
    """Numbers, with a place of its own in them."""

    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@contextmanager
def states_between_lines(loader: DataLoader[Any]) -> Iterator[list[dict[str, Any]]]:
    """Give the states of `loader` before every line of the package that this thread runs in the block."""
    states: list[dict[str, Any]] = []
    files = {
        sys.modules[f"fastload.{name}"].__file__
        for name in ("order.batches", "order.lanes", "engine.iterator", "loader")
    }

    def before_a_line(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            sys.settrace(None)
            states.append(loader.state_dict())
            sys.settrace(before_a_line)
        return before_a_line

    outer = sys.gettrace()
    sys.settrace(before_a_line)
    try:
        yield states
    finally:
        sys.settrace(outer)


@pytest.mark.parametrize("options", [{}, {"in_order": False}, {"num_workers": 2}], ids=str)
@pytest.mark.parametrize("kind", [Augmented, Streamed])
def test_a_state_that_another_thread_asks_for_is_that_before_or_after_a_batch(
    kind: Any, options: dict[str, Any]
) -> None:
    loader = DataLoader(kind(8), 2, seed=SEED, **options)
    with loader:
        iterator = iter(loader)
        while True:
            before = loader.state_dict()
            with states_between_lines(loader) as states:
                ended = next(iterator, None) is None
            assert states
            if ended and kind is Streamed:
                break  # the end of each lane is a place of its own
            assert all(state in (before, loader.state_dict()) for state in states)
            if ended:
                break
