"""Promises:
- `torch.distributed.checkpoint` saves and loads a loader with `RankSampler`, also asynchronously, on the same ranks and
  on others. The batches of all ranks together are those of the undisturbed run.
- With `RankSampler` the states of all ranks are the same, byte for byte.
- A stream's state belongs to its rank. Under one key for all, or on another number of ranks, it is refused.
- torchtitan's convention holds: pickled bytes under a key of the rank. So does torchft's: a replica that joins late
  takes the position of its peers.
- A state survives `torch.save`, `torch.load(weights_only=True)` and JSON.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler

import fastload
from tests.promises import checkpoint_cases as cases
from tests.promises.checkpoint_cases import LENGTH, Rows, Stream, plain
from tests.promises.framework_ranks import on_ranks


def run(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    modules = "torch.distributed.checkpoint"
    return on_ranks(function, *arguments, world_size=world, modules=modules)


def together(ranks: list[list[Any]]) -> list[Any]:
    """Return the batches of all ranks, in the order of all ranks."""
    return [
        [s for row in zip(*parts, strict=True) for s in row] for parts in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 2), (4, 2)))],
)
def test_dcp_resumes_ranks_in_the_middle_of_an_epoch(
    before: int, after: int, tmp_path: Path
) -> None:
    answers = run(before, cases.saved, str(tmp_path))
    assert len({state for _, state in answers}) == 1
    epochs = [together([batches[k] for batches, _ in answers]) for k in range(3)]
    assert sorted(index for batch in epochs[1] for index, _ in batch) == list(range(LENGTH))
    found = run(after, cases.loaded, str(tmp_path))
    for way in found[0]:
        rest = [together([batches[way][k] for batches in found]) for k in range(2)]
        assert rest == [epochs[1][3:], epochs[2]], way


# ---- streams ----

worlds = pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])


@worlds
def test_streams_under_a_key_of_each_rank_resume(world: int, tmp_path: Path) -> None:
    names = ["own key", "torchtitan"]
    before = run(world, cases.saved_streams, str(tmp_path), names)
    after = run(world, cases.loaded_streams, str(tmp_path), names)
    for name in names:
        rest = [answers[name] for answers in after]
        assert rest == [answers[name][1] for answers in before], name
        numbers = [
            n for had, left in (a[name] for a in before) for batch in had + left for n in batch
        ]
        assert sorted(numbers) == list(range(LENGTH)), name


@worlds
def test_a_stream_of_all_ranks_under_one_key_is_refused(world: int, tmp_path: Path) -> None:
    """torchtitan's issue 291: DCP saves the value of one rank for all, and all began at its place."""
    names = ["one key"]
    before = run(world, cases.saved_streams, str(tmp_path), names)
    after = [
        answers["one key"] for answers in run(world, cases.loaded_streams, str(tmp_path), names)
    ]
    [whose] = [rank for rank, found in enumerate(after) if isinstance(found, list)]
    assert after[whose] == before[whose]["one key"][1]
    for rank, found in enumerate(after):
        if rank != whose:
            assert f"rank: the state has {whose}, this loader {rank}; " in found
            assert 'such as f"loader_{rank}"' in found


def test_a_stream_on_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    names = ["own key"]
    run(4, cases.saved_streams, str(tmp_path), names)
    for answers in run(2, cases.loaded_streams, str(tmp_path), names):
        assert (
            "world_size: the state has 4, this loader 2; use the same number" in answers["own key"]
        )


# ---- the states of all ranks ----


def of_rank(rank: int, world: int, *, workers: int = 2, **options: Any) -> fastload.DataLoader[Any]:
    sampler = fastload.RankSampler(Rows(), rank=rank, world_size=world, seed=3, **options)
    return fastload.DataLoader(Rows(), 4, sampler=sampler, num_workers=workers, seed=3)


@pytest.mark.parametrize(
    "options", [{}, {"ends": "drop"}, {"shuffle": False}, {"window": 9, "run": 2}]
)
def test_the_states_of_all_ranks_are_the_same_bytes(options: dict[str, Any]) -> None:
    def states(rank: int) -> list[str]:
        with of_rank(rank, 3, **options) as loader:
            found = [json.dumps(loader.state_dict())]
            for _ in range(2):
                found += [json.dumps(loader.state_dict()) for _ in loader]
                found.append(json.dumps(loader.state_dict()))
            return found

    first = states(0)
    assert len(set(first)) == len(first) > 10
    assert states(1) == states(2) == first


class OfTorchft(DistributedSampler[Any]):
    """As torchft's sampler: torch's, with ranks that count the replicas."""

    def __init__(self, replica: int, replicas: int) -> None:
        super().__init__(range(LENGTH), num_replicas=replicas, rank=replica, seed=3)


# ---- torchft ----


class Manager:
    """The calls of torchft's Manager to a replica's functions.

    The thread of the quorum asks a healthy replica for its state, within a step. A replica that joins applies it in the
    thread of its loop, within a step too.
    """

    def __init__(self) -> None:
        self._functions: dict[str, tuple[Any, Any]] = {}

    def register_state_dict_fn(self, key: str, load_state_dict: Any, state_dict: Any) -> None:
        assert key not in self._functions
        self._functions[key] = load_state_dict, state_dict

    def send_checkpoint(self) -> bytes:
        """Return the state as another process gets it."""
        with ThreadPoolExecutor(1) as quorum:
            user = quorum.submit(
                lambda: {key: state() for key, (_, state) in self._functions.items()}
            )
            sent = io.BytesIO()
            torch.save({"user": user.result()}, sent)
        return sent.getvalue()

    def apply(self, received: bytes) -> None:
        user = torch.load(io.BytesIO(received), weights_only=True)["user"]
        for key, (load, _) in self._functions.items():
            load(user[key])


@pytest.mark.parametrize("sampler", ["RankSampler", "of torchft"])
@pytest.mark.parametrize("joined_in_epoch", [0, 1])
def test_a_replica_that_joins_late_takes_the_position_of_its_peers(
    joined_in_epoch: int, sampler: str
) -> None:
    """torchft's issue 309. It drops the batch that it had read, and begins anew: both go on with the same steps."""

    def replica(rank: int) -> tuple[fastload.DataLoader[Any], Manager]:
        loader = of_rank(rank, 2)
        if sampler != "RankSampler":
            loader = fastload.DataLoader(
                Rows(), 4, sampler=OfTorchft(rank, 2), num_workers=2, seed=3
            )
        manager = Manager()
        manager.register_state_dict_fn("loader", loader.load_state_dict, loader.state_dict)
        return loader, manager

    def train(loader: fastload.DataLoader[Any]) -> list[Any]:
        return [[plain(batch) for batch in loader] for _ in range(3)]

    undisturbed = [train(replica(rank)[0]) for rank in range(2)]
    healthy, its_manager = replica(0)
    for _ in range(joined_in_epoch):
        list(healthy)
    steps = iter(healthy)
    had = [plain(batch) for batch in islice(steps, 4)]

    late, manager = replica(1)
    its_first = next(iter(late))
    assert plain(its_first) == undisturbed[1][0][0]
    manager.apply(its_manager.send_checkpoint())

    for rank, rest in ((0, steps), (1, iter(late))):
        assert [plain(batch) for batch in rest] == undisturbed[rank][joined_in_epoch][4:]
    assert had == undisturbed[0][joined_in_epoch][:4]
    for rank, loader in ((0, healthy), (1, late)):
        for epoch in range(joined_in_epoch + 1, 3):
            assert [plain(batch) for batch in loader] == undisturbed[rank][epoch]
        loader.close()


# ---- files ----


def own_generator() -> fastload.DataLoader[Any]:
    sampler = RandomSampler(Rows(), generator=torch.Generator().manual_seed(5))
    return fastload.DataLoader(Rows(), 4, sampler=sampler, num_workers=1)


LOADERS: dict[str, Callable[[], fastload.DataLoader[Any]]] = {
    "seed": lambda: fastload.DataLoader(Rows(), 4, shuffle=True, num_workers=2, seed=3),
    "no seed": lambda: fastload.DataLoader(Rows(), 4, shuffle=True, num_workers=2),
    "generator": own_generator,
    "ranks": lambda: of_rank(1, 2),
    "stream": lambda: cases.of_stream(Stream, 0, 1),
    "titan": lambda: cases.of_titan(0, 1),
}


def through_a_file(state: Any, folder: Path) -> Any:
    torch.save({"loader": state}, folder / "checkpoint.pt")
    return torch.load(folder / "checkpoint.pt", weights_only=True)["loader"]


@pytest.mark.parametrize("kind", LOADERS)
def test_a_state_survives_torch_save_and_json(kind: str, tmp_path: Path) -> None:
    loader = LOADERS[kind]()
    batches = iter(loader)
    list(islice(batches, 3))
    state = loader.state_dict()
    copies = [through_a_file(state, tmp_path)]
    if kind != "titan":  # it holds bytes
        copies.append(json.loads(json.dumps(state, allow_nan=False)))
    rest = [plain(batch) for batch in batches]
    assert rest
    loader.close()
    for copy in copies:
        assert copy == state
        resumed = LOADERS[kind]()
        resumed.load_state_dict(copy)
        assert [plain(batch) for batch in resumed] == rest
        resumed.close()
