"""What ranks do that save and load loaders by torch.distributed.checkpoint, and by the conventions of torchtitan."""

from __future__ import annotations

import json
import pickle
from abc import ABC
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info

import fastload
from fastload.errors import StateError
from tests.fakes import Draws

GLOBAL_BATCH = 8
LENGTH = 52
"""A multiple of four ranks, so that none is filled up: six global batches, and a half."""
WAYS = [("save", "loader"), ("save", "json"), ("async_save", "loader")]
"""How DCP saves, and what it is given: the loader itself, or its state as a string."""


class Rows(Draws):
    def __init__(self) -> None:
        super().__init__(LENGTH)


class Stream(IterableDataset[int]):
    """The numbers that a part of `parts` reads, by a convention of its own. It knows its place."""

    def __init__(self, part: int, parts: int) -> None:
        self.part, self.parts = part, parts
        self.read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker is not None
        mine = range(self.part + self.parts * worker.id, LENGTH, self.parts * worker.num_workers)
        for number in islice(mine, len(self.read), None):
            self.read.append(number)
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


class AsJson(Stateful):
    """A loader whose state is one string to DCP, which takes lists and dicts apart."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        return {"json": json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(json.loads(state_dict["json"]))


class Base(Stateful, ABC):
    """As torchtitan's BaseDataLoader."""


class OfTorchtitan(fastload.DataLoader[Any], Base):
    """As torchtitan's ParallelAwareDataloader: attributes before the constructor, pickled bytes under a rank's key."""

    def __init__(self, dataset: Any, dp_rank: int, dp_world_size: int, **options: Any) -> None:
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
        self.batch_size = options["batch_size"]
        super().__init__(dataset, **options)
        self._rank_id = f"dp_rank_{dp_rank}"

    def state_dict(self) -> dict[str, Any]:
        return {self._rank_id: pickle.dumps(super().state_dict()), "world_size": self.dp_world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.dp_world_size == state["world_size"]
        super().load_state_dict(pickle.loads(state[self._rank_id]))


def begin() -> tuple[int, int]:
    """Join the ranks. Return this one, and their number."""
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def of_rank() -> fastload.DataLoader[Any]:
    """Return a loader of a rank's part, which finds its rank."""
    sampler = fastload.RankSampler(Rows(), seed=3)
    size = GLOBAL_BATCH // dist.get_world_size()
    return fastload.DataLoader(Rows(), size, sampler=sampler, num_workers=2, seed=3)


def plain(batch: Any) -> Any:
    """Return a batch as a list of samples."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return list(zip(*(part.tolist() for part in batch), strict=True))


def as_held(loader: Any, kind: str) -> Any:
    return loader if kind == "loader" else AsJson(loader)


def saved(folder: str) -> Any:
    """Save in each way after the third batch of the second epoch. Return all batches of three epochs."""
    begin()
    loader = of_rank()
    whole = [[plain(batch) for batch in loader]]
    batches = iter(loader)
    whole.append([plain(batch) for batch in islice(batches, 3)])
    for way, kind in WAYS:
        held = {"loader": as_held(loader, kind)}
        saving = getattr(dcp, way)(held, checkpoint_id=f"{folder}/{way}-{kind}")
    whole[1].append(plain(next(batches)))
    saving.result()  # of async_save
    state = json.dumps(loader.state_dict())
    whole[1] += [plain(batch) for batch in batches]
    whole.append([plain(batch) for batch in loader])
    return whole, state


def loaded(folder: str) -> Any:
    """Return for each way what is left of the second epoch, and the third."""
    begin()
    answers = {}
    for way, kind in WAYS:
        loader = of_rank()
        dcp.load({"loader": as_held(loader, kind)}, checkpoint_id=f"{folder}/{way}-{kind}")
        answers[way, kind] = [[plain(batch) for batch in loader] for _ in range(2)]
        loader.close()
    return answers


def of_stream(kind: type[Stream], part: int, parts: int) -> fastload.DataLoader[Any]:
    return fastload.DataLoader(kind(part, parts), 2, num_workers=2, seed=3)


def of_titan(part: int, parts: int) -> OfTorchtitan:
    return OfTorchtitan(Stream(part, parts), part, parts, batch_size=2, num_workers=2, seed=3)


Held = Callable[[int, int], dict[str, Any]]
STREAMS: dict[str, Held] = {
    "own key": lambda rank, n: {f"loader_{rank}": AsJson(of_stream(Stream, rank, n))},
    "torchtitan": lambda rank, n: {"dataloader": of_titan(rank, n)},
    "one key": lambda rank, n: {"loader": AsJson(of_stream(Stream, rank, n))},
}
"""What a rank of n ranks passes to DCP."""


def saved_streams(folder: str, names: list[str]) -> Any:
    """Save after the third batch. Return the batches after it."""
    rank, n = begin()
    answers = {}
    for name in names:
        held = STREAMS[name](rank, n)
        batches = iter(_loader(held))
        had = [plain(batch) for batch in islice(batches, 3)]
        dcp.save(held, checkpoint_id=f"{folder}/{name}")
        answers[name] = had, [plain(batch) for batch in batches]
    return answers


def loaded_streams(folder: str, names: list[str]) -> Any:
    """Return the batches after those that were saved, or the error of the loader."""
    rank, n = begin()
    answers: dict[str, Any] = {}
    for name in names:
        held = STREAMS[name](rank, n)
        try:
            dcp.load(held, checkpoint_id=f"{folder}/{name}")
            answers[name] = [plain(batch) for batch in _loader(held)]
        except StateError as error:
            answers[name] = str(error)
    return answers


def _loader(held: dict[str, Any]) -> Any:
    [one] = held.values()
    return one.loader if isinstance(one, AsJson) else one
