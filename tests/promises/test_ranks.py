"""Promises:
- The ranks share one epoch: the union of their samples is the epoch, and all ranks take the same number of steps.
- The same global batch size gives the same global batches for any world size.
- `ends="pad"` repeats samples, `"drop"` leaves out the last ones, and `"uneven"` gives each sample once.
- A dataset that is already one rank's part refuses a rank sampler, inside torch's wrappers too. See also
  `tests/datasets/test_image_files.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from typing import Any, Literal

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    StackDataset,
    Subset,
    random_split,
)

import fastload
from tests.fakes import Numbers

WORLDS = [2, 3, 4]
Ends = Literal["pad", "drop", "uneven"]


def parts(length: int, world: int, **options: Any) -> list[list[int]]:
    """Return every rank's part of the epoch."""
    return [
        list(fastload.RankSampler(length, rank=rank, world_size=world, **options))
        for rank in range(world)
    ]


def interleaved(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the global order: position k * world + r is position k of rank r."""
    missing = object()
    turns = zip_longest(*lists, fillvalue=missing)
    return [entry for turn in turns for entry in turn if entry is not missing]


@hypothesis.given(
    length=st.integers(0, 300),
    world=st.integers(1, 20),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 10_000),
)
def test_the_ranks_share_the_one_epoch(
    length: int, world: int, shuffle: bool, seed: int, epoch: int
) -> None:
    """Uneven parts are the epoch once; dropping leaves out, and padding repeats, less than one each."""

    def parts(world: int, **ends: Any) -> list[list[int]]:
        found = []
        for rank in range(world):
            sampler = fastload.RankSampler(
                length, rank=rank, world_size=world, shuffle=shuffle, seed=seed, **ends
            )
            sampler.set_epoch(epoch)
            found.append(list(sampler))
            assert len(sampler) == len(found[-1])
        return found

    whole = parts(1)[0]
    assert sorted(whole) == list(range(length))
    uneven = parts(world, ends="uneven")
    assert interleaved(uneven) == whole
    assert [len(part) for part in uneven] == [len(range(r, length, world)) for r in range(world)]
    dropped = parts(world, ends="drop")
    assert [len(part) for part in dropped] == [length // world] * world
    assert interleaved(dropped) == whole[: length // world * world]
    padded = parts(world, ends="pad")
    assert [len(part) for part in padded] == [-(-length // world)] * world
    assert interleaved(padded)[:length] == whole
    assert set(interleaved(padded)[length:]) <= set(whole)
    assert parts(world) == padded, "the default"


# Through the loader.


def rank_batches(
    length: int, world: int, local_batch: int, *, workers: int = 2, **options: Any
) -> list[list[list[int]]]:
    """Return, for each rank, the batches of its loader."""
    ranks = []
    for rank in range(world):
        sampler = fastload.RankSampler(length, rank=rank, world_size=world, **options)
        with fastload.DataLoader(
            Numbers(length), local_batch, sampler=sampler, num_workers=workers
        ) as loader:
            assert len(loader) == -(-len(sampler) // local_batch)
            ranks.append([batch.tolist() for batch in loader])
    return ranks


def global_batches(ranks: list[list[list[int]]]) -> list[list[int]]:
    """Return the batches of all ranks together, step for step, in the global order."""
    return [interleaved(step) for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("ends", ["pad", "drop", "uneven"])
def test_the_same_global_batches_for_any_world(ends: Ends) -> None:
    one = global_batches(rank_batches(96, 1, 12, seed=7, ends=ends))
    assert sorted(chain.from_iterable(one)) == list(range(96))
    for world in WORLDS:
        assert global_batches(rank_batches(96, world, 12 // world, seed=7, ends=ends)) == one


# Epochs and seeds.


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_goes_on_to_the_next_epoch_by_itself(workers: int) -> None:
    orders = []
    for epoch in range(5):
        reference = fastload.RankSampler(60, rank=1, world_size=3, seed=3)
        reference.set_epoch(epoch)
        orders.append(list(reference))
    sampler = fastload.RankSampler(60, rank=1, world_size=3, seed=3)
    loader = fastload.DataLoader(Numbers(60), 5, sampler=sampler, num_workers=workers)
    assert torch.cat(list(loader)).tolist() == orders[0]
    assert torch.cat(list(loader)).tolist() == orders[1]
    loader.set_epoch(3)
    assert torch.cat(list(loader)).tolist() == orders[3]
    assert torch.cat(list(loader)).tolist() == orders[4]
    sampler.set_epoch(1)
    assert torch.cat(list(loader)).tolist() == orders[1]
    assert torch.cat(list(loader)).tolist() == orders[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_is_set_behind_iter_is_the_one_that_begins(workers: int) -> None:
    """Lightning calls `iter()` first and `set_epoch` then: the same epoch, or another, and the next one after it."""
    reference = fastload.RankSampler(60, rank=0, world_size=1, seed=3)
    orders = []
    for epoch in range(4):
        reference.set_epoch(epoch)
        orders.append(list(reference))
    sampler = fastload.RankSampler(60, rank=0, world_size=1, seed=3)
    with fastload.DataLoader(Numbers(60), 5, sampler=sampler, num_workers=workers) as loader:
        for said, after in ((0, 1), (2, 3)):
            iterator = iter(loader)
            sampler.set_epoch(said)
            assert torch.cat(list(iterator)).tolist() == orders[said]
            assert torch.cat(list(loader)).tolist() == orders[after]


class Drawn(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(())


def drawn(loader: Any) -> list[float]:
    rows: list[float] = torch.cat(list(loader)).tolist()
    return rows


@pytest.mark.parametrize("workers", [0, 2])
def test_where_nobody_sets_the_epoch_of_torchs_sampler_the_samples_draw_anew(workers: int) -> None:
    """The order repeats, as in torch; the augmentation does not. Where it is set, both are the epoch's."""

    def make() -> tuple[Any, fastload.DataLoader[Any]]:
        sampler = DistributedSampler(range(12), num_replicas=1, rank=0, seed=3)  # type: ignore[arg-type]
        return sampler, fastload.DataLoader(
            Drawn(12), 4, sampler=sampler, num_workers=workers, seed=1
        )

    sampler, loader = make()
    never = [drawn(loader) for _ in range(3)]
    assert len({tuple(epoch) for epoch in never}) == 3
    states = []
    for _ in range(2):
        rest = iter(loader)
        next(rest)
        states.append((json.loads(json.dumps(loader.state_dict())), drawn(rest)))
    for epoch, (state, rest) in enumerate(states):
        other, again = make()
        other.set_epoch(9)
        again.load_state_dict(state)
        assert (state["epoch"], state["sampler_epoch"], other.epoch) == (3 + epoch, 0, 0)
        assert drawn(again) == rest
    sampler, loader = make()
    expected = []
    for epoch in (0, 1, 2):
        sampler.set_epoch(epoch)
        expected.append(drawn(loader))
    assert expected[0] == never[0]
    assert expected[1:] != never[1:], "the order is another"
    sampler, loader = make()
    for epoch in (2, 0, 1):
        sampler.set_epoch(epoch)
        assert drawn(loader) == expected[epoch]
    loader.set_epoch(2)
    assert drawn(loader) == expected[2]


# Which rank this is, if nobody says.


def test_the_process_group_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 3)
    assert list(fastload.RankSampler(9, shuffle=False)) == [2, 5, 8]
    explicit = fastload.RankSampler(9, rank=1, world_size=4, shuffle=False, ends="drop")
    assert list(explicit) == [1, 5], "what is said goes before what is found"


# Refusals.


class Partitioned(Numbers):
    partitioned_by_rank = True


RANK_SAMPLERS = {
    "fastload's": lambda length: fastload.RankSampler(length, rank=0, world_size=2),
    "torch's": lambda length: DistributedSampler(range(length), num_replicas=2, rank=0),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", RANK_SAMPLERS)
def test_a_rank_part_is_not_partitioned_again(kind: str, workers: int) -> None:
    sampler = RANK_SAMPLERS[kind](10)
    with pytest.raises(ValueError, match="rank"):
        fastload.DataLoader(Partitioned(10), 2, sampler=sampler, num_workers=workers)
    with pytest.raises(ValueError, match="rank"):
        fastload.DataLoader(
            Partitioned(10),
            batch_sampler=BatchSampler(sampler, 2, drop_last=False),
            num_workers=workers,
        )


WRAPPERS: dict[str, Callable[[Any], Dataset[Any]]] = {
    "Subset": lambda part: Subset(part, range(8)),
    "random_split": lambda part: random_split(part, [8, 2])[0],
    "ConcatDataset": lambda part: ConcatDataset([Numbers(10), part]),
    "StackDataset": lambda part: StackDataset(part, part),
    "StackDataset of names": lambda part: StackDataset(image=part, label=part),
    "Subset of a ConcatDataset": lambda part: Subset(ConcatDataset([part, part]), range(8)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", RANK_SAMPLERS)
def test_a_rank_part_in_a_wrapper_is_not_partitioned_again(kind: str, wrapper: str) -> None:
    dataset = WRAPPERS[wrapper](Partitioned(10))
    with pytest.raises(ValueError, match="Partitioned gives only the samples of its rank"):
        fastload.DataLoader(dataset, 2, sampler=RANK_SAMPLERS[kind](8))


def test_a_rank_part_in_a_wrapper_says_which_rank_draws() -> None:
    def draws(rank: int, wrapped: bool) -> list[float]:
        class Part(Partitioned):
            world_size = 2

            def __getitem__(self, index: int) -> Any:
                return torch.rand(())

        part = Part(4)
        part.rank = rank  # type: ignore[attr-defined]
        dataset = Subset(part, range(4)) if wrapped else part
        return torch.cat(list(fastload.DataLoader(dataset, 2, seed=7))).tolist()

    assert draws(1, True) == draws(1, False) != draws(0, True) == draws(0, False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 2, "world_size": 2}, r"rank.*2"),
        ({"rank": -1, "world_size": 2}, r"rank.*-1"),
        ({"rank": 0, "world_size": 0}, r"world_size.*0"),
        ({"rank": 0, "world_size": 2, "ends": "wrap"}, r"pad.*drop.*uneven.*wrap"),
        ({"rank": 0}, r"world_size"),
        ({"world_size": 2}, r"rank"),
        ({"rank": 0.5, "world_size": 2}, r"rank"),
        ({"rank": 0, "world_size": "2"}, r"world_size"),
        ({"rank": 0, "world_size": 2, "seed": "abc"}, r"seed"),
        ({"rank": 0, "world_size": 1, "dataset": -1}, r"length.*-1"),
    ],
    ids=str,
)
def test_a_bad_argument_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"(?s){said}"):
        fastload.RankSampler(options.pop("dataset", 10), **options)
