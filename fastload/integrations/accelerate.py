"""A fastload loader that `accelerator.prepare` has taken: the rank's part, batches on the device, state in checkpoints.

The batches of a rank are those of Accelerate's own loaders: of the batches of one order, each rank takes every n-th.
"""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate import skip_first_batches as _theirs
from accelerate.data_loader import BatchSamplerShard, DataLoaderStateMixin, IterableDatasetShard
from accelerate.state import DistributedType, GradientState
from accelerate.utils import broadcast_object_list, send_to_device, synchronize_rng_states
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from fastload._kit.hashing import mix64
from fastload.errors import LoaderTimeoutError
from fastload.loader import DataLoader
from fastload.order.batches import draws_nothing, position_after
from fastload.order.epochs import Epochs, fresh_state
from fastload.order.sampler import RankSampler
from fastload.order.sampler_state import generators, own_state, random_states, single_sampler
from fastload.order.state import known_length
from fastload.settings import Settings

_hooked: weakref.WeakSet[Accelerator] = weakref.WeakSet()
"""The accelerators whose checkpoints hold the states of our loaders."""


def prepare(loader: DataLoader[Any], *, asked_by: FrameType) -> bool:
    """Prepare `loader` for an Accelerator, and return True. It stays the same object, with the same workers.

    Args:
        loader: a fastload loader that is not prepared yet.
        asked_by: the frame that asks whether the loader is prepared. It is a method of the Accelerator, which is told
            to nobody in another way.

    Return False if no Accelerator asks. Raises ValueError if its settings do not fit the loader.
    """
    accelerator = asked_by.f_locals.get("self")
    if not isinstance(accelerator, Accelerator):
        return False
    _check(loader, accelerator)
    rank, world_size = _data_rank(accelerator)
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    batch_size = getattr(sampler, "batch_size", None) or loader.batch_size
    total = batch_size and batch_size * (1 if accelerator.split_batches else world_size)
    seed = _agreed_seed(loader, accelerator, world_size)
    length = known_length(loader.dataset)
    if world_size > 1 or seed is not None:
        _divide(loader, accelerator, rank, world_size, seed)
    vars(loader).update(
        device=accelerator.device if accelerator.device_placement else None,
        gradient_state=GradientState(),
        total_batch_size=total,
        total_dataset_length=length,
        _rest=-1 if loader.drop_last or not length or not total else length % total,
        _non_blocking=accelerator.non_blocking,
        _rng_types=[t for t in accelerator.rng_types or () if str(t) != "generator"],
        _agreed=seed,
        _skipped=0,
        _state_before=None,
    )
    loader.__class__ = type(type(loader).__name__, (Prepared, type(loader)), {})
    if accelerator not in _hooked:
        _hooked.add(accelerator)
        _know_of_loaders(accelerator)
    return True


class Prepared(DataLoader[Any], DataLoaderStateMixin):  # in this order: only then an object can change its class
    """What a loader is after `accelerator.prepare(loader)`: the same object, of this class beside its own."""

    _is_accelerate_prepared = True

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin the next epoch. It says to Accelerate which batch is the last, and how many samples of it are new."""
        if self._rng_types:
            synchronize_rng_states(self._rng_types)
        epoch = self._epochs.coming()
        for part in (self.dataset, self.batch_sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        if self._agreed is not None:
            for generator in generators(self._index_sampler):
                generator.manual_seed(mix64(mix64(self._agreed) ^ epoch) >> 1)
        read = self._skip(epoch)
        self._state_before = None
        batches = super().__iter__()
        for _ in range(read):
            next(batches, None)
        return _Batches(self, batches)

    def state_dict(self) -> dict[str, Any]:
        """See `fastload.DataLoader.state_dict`."""
        return self._state_before or super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `fastload.DataLoader.load_state_dict`. A seed that the ranks have agreed on is taken from the state."""
        if self._agreed is not None and isinstance(state.get("seed"), int):
            self._agreed = self.seed = state["seed"]
            if isinstance(sampler := single_sampler(self._index_sampler), RankSampler):
                sampler.seed = state["sampler_seed"]
        super().load_state_dict(state)
        self._state_before = None

    def begin(self) -> None:
        """Tell Accelerate that an epoch of this loader runs."""
        super().begin()
        self.remainder = self._rest

    def skip(self, batches: int) -> None:
        """Let the next `iter()` begin after the first `batches` batches of its epoch."""
        self._skipped = batches

    def _skip(self, epoch: int) -> int:
        """Move the beginning of the coming epoch. Return how many batches must be read and dropped for it."""
        count, self._skipped = self._skipped, 0
        sampler = self._index_sampler
        size = getattr(sampler, "batch_size", None)
        if not count or not size or isinstance(self.dataset, IterableDataset):
            return count
        state: Any = self._epochs.resume
        if state is None or state.ended:
            state = fresh_state(Settings.of(self), epoch, None)
            if not draws_nothing(sampler):
                state = replace(
                    state, draws=[random_states(sampler)], sampler_state=own_state(sampler)
                )
        if state.batches != count:
            position = position_after(sampler, state.world_size, count)
            state = replace(
                state,
                batches=count,
                position=count * size * state.world_size if position is None else position,
                ahead=[],
                checksum=None,
            )
            super().load_state_dict(state.to_json())
        return 0


class _Batches(Iterator[Any]):
    """The batches of an epoch, on the device. If the loader does not know their number, one is read ahead."""

    def __init__(self, loader: Prepared, batches: Iterator[Any]) -> None:
        self._loader = loader
        self._batches = batches
        self._left: int | None = None
        if not isinstance(loader.dataset, IterableDataset):
            with suppress(TypeError):  # a batch sampler without length
                self._left = len(loader) - DataLoader.state_dict(loader)["batches"]
        self._ahead: list[Any] = []
        self._began = False

    def __next__(self) -> Any:
        loader = self._loader
        if not self._began:
            self._began = True
            loader.begin()
        try:
            batch = self._known() if self._left is not None else self._looked_ahead()
        except StopIteration:
            loader._state_before = None
            loader.end()
            raise
        if loader.device is None:
            return batch
        return send_to_device(batch, loader.device, non_blocking=loader._non_blocking)

    def _known(self) -> Any:
        assert self._left is not None
        try:
            batch = next(self._batches)
        except (StopIteration, LoaderTimeoutError):
            raise
        except Exception:
            self._left -= 1  # an error counts as the batch
            raise
        self._left -= 1
        self._loader.end_of_dataloader = not self._left
        return batch

    def _looked_ahead(self) -> Any:
        batch = self._ahead.pop() if self._ahead else next(self._batches)
        if isinstance(batch, Exception):
            raise batch
        self._loader._state_before = DataLoader.state_dict(self._loader)
        try:
            self._ahead.append(next(self._batches))
        except StopIteration:
            self._loader.end_of_dataloader = True
        except Exception as error:
            self._ahead.append(error)  # for the next `next()`
        return batch


class EvenBatches(BatchSampler):
    """Batches of a `RankSampler`. `Accelerator.join_uneven_inputs` asks and sets whether the ranks get equally many."""

    sampler: RankSampler

    @property
    def even_batches(self) -> bool:
        """Whether the last batches are filled up with samples of the beginning."""
        return self.sampler.ends == "pad"

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        if self.sampler.ends != "drop":
            self.sampler.ends = "pad" if even else "uneven"


class ShardedBatches(BatchSamplerShard):
    """Accelerate's part of the batches that another sampler makes."""

    @property
    def sampler(self) -> Any:
        """The sampler of single indices under the batches, as in torch's BatchSampler."""
        return single_sampler(self.batch_sampler)


def _check(loader: DataLoader[Any], accelerator: Accelerator) -> None:
    """Raise ValueError if the accelerator asks for what a fastload loader cannot do."""
    sampler = single_sampler(loader._index_sampler)
    ranks = getattr(sampler, "world_size", getattr(sampler, "num_replicas", 1))
    problem = None
    if accelerator.dispatch_batches:
        problem = (
            "dispatch_batches=True lets the first rank read for all, and sends its batches to the others. A fastload "
            "loader reads each rank's own part. Leave dispatch_batches out"
        )
    elif accelerator.distributed_type in (DistributedType.XLA, DistributedType.MEGATRON_LM):
        problem = (
            f"{accelerator.distributed_type} wraps torch's own loaders. Prepare torch's DataLoader"
        )
    elif isinstance(sampler, RankSampler | DistributedSampler) and ranks > 1:
        problem = (
            f"{type(sampler).__name__} gives only the samples of its rank, and Accelerate would divide them again. "
            "Give the loader shuffle=True and a seed, or leave it out of prepare()"
        )
    elif loader._epochs.resume is not None and accelerator.num_processes > 1:
        problem = "load the loader's state after prepare(), which divides it among the ranks"
    if problem is not None:
        raise ValueError(f"{loader!r} and Accelerate: {problem}")


def _data_rank(accelerator: Accelerator) -> tuple[int, int]:
    """Return rank and number of the parts that the data has: ranks of one tensor-parallel group read the same."""
    mesh = accelerator._prepare_device_mesh()
    if not mesh:
        return accelerator.process_index, accelerator.num_processes
    sizes = {name: mesh[name].size() for name in mesh.mesh_dim_names}
    same = sizes.get("tp", 1) * sizes.get("cp", 1)
    parts = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    return accelerator.process_index // same, parts


def _agreed_seed(loader: DataLoader[Any], accelerator: Accelerator, world_size: int) -> int | None:
    """Return a seed for an order that is drawn, the same on all ranks. Return None if the order needs none."""
    sampler = single_sampler(loader._index_sampler)
    if (
        getattr(sampler, "generator", loader) is not None
    ):  # it draws nothing, or has a generator of the user's
        if world_size > 1 and (found := generators(loader._index_sampler)):
            synchronize_rng_states(["generator"], found[0])
        return None
    seed = loader.seed
    if seed is None and accelerator.use_seedable_sampler:
        seed = accelerator.dataloader_config.data_seed
        seed = torch.initial_seed() if seed is None else seed
    if world_size > 1:
        drawn = seed if seed is not None else torch.empty((), dtype=torch.int64).random_().item()
        return int(broadcast_object_list([drawn])[0])
    return seed


def _divide(
    loader: DataLoader[Any], accelerator: Accelerator, rank: int, world_size: int, seed: int | None
) -> None:
    """Let `loader` read the part of a rank."""
    if isinstance(loader.dataset, IterableDataset):
        vars(loader)["dataset"] = _part_of_stream(loader, accelerator, rank, world_size)
        return
    key = "sampler" if loader.batch_sampler is None else "batch_sampler"
    batches: Any = vars(loader)[key]
    if key == "sampler" and not isinstance(batches, BatchSampler):
        raise ValueError(
            f"{loader!r} and Accelerate: without batches there is nothing to divide. Give batch_size"
        )
    if seed is not None and loader.seed is None:
        loader.seed, loader.generator = seed, None
    order = _order(single_sampler(batches), loader, seed)
    even = "pad" if accelerator.even_batches and world_size > 1 else "uneven"
    if order is not None and type(batches) is BatchSampler:
        size = batches.batch_size // (world_size if accelerator.split_batches else 1)
        ends: Any = "drop" if batches.drop_last and world_size > 1 else even
        sampler = RankSampler(
            len(loader.dataset), rank=rank, world_size=world_size, ends=ends, block=size, **order
        )
        divided: Any = EvenBatches(sampler, size, batches.drop_last)
        vars(loader)["batch_size"] = size
    else:
        if seed is not None:
            single_sampler(batches).generator = torch.Generator()  # seeded before each epoch
        divided = ShardedBatches(
            batches, world_size, rank, accelerator.split_batches, accelerator.even_batches
        )
    vars(loader)[key] = divided
    if key == "batch_sampler":
        vars(loader)["sampler"] = single_sampler(divided)
    coming = loader._epochs.coming()
    loader._epochs = Epochs(loader._samplers())
    loader._epochs.set(coming)


def _order(sampler: Any, loader: DataLoader[Any], seed: int | None) -> dict[str, Any] | None:
    """Return the arguments of a RankSampler with the order of `sampler` or one like it, or None."""
    if type(sampler) is RankSampler:
        names = ("shuffle", "seed", "window", "run")
        return {name: getattr(sampler, name) for name in names}
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    whole = getattr(sampler, "num_samples", None) == known_length(loader.dataset)
    if type(sampler) is RandomSampler and not sampler.replacement and whole and seed is not None:
        return {"shuffle": True, "seed": seed}
    return None


def _part_of_stream(
    loader: DataLoader[Any], accelerator: Accelerator, rank: int, world_size: int
) -> Any:
    """Return the part of an iterable dataset: whole shards if it has them for all ranks, or every n-th batch."""
    dataset: Any = loader.dataset
    if world_size == 1 or getattr(dataset, "partitioned_by_rank", False):
        return dataset
    if hasattr(dataset, "shard") and getattr(dataset, "num_shards", 0) >= world_size:
        return dataset.shard(num_shards=world_size, index=rank)
    if loader.batch_size is None:
        raise ValueError(
            f"{loader!r} and Accelerate: an iterable dataset is divided by batches. Give batch_size, or a dataset of "
            f"{world_size} shards or more"
        )
    return IterableDatasetShard(
        dataset,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        num_processes=world_size,
        process_index=rank,
        split_batches=accelerator.split_batches,
    )


def _know_of_loaders(accelerator: Accelerator) -> None:
    """Let `save_state`, `load_state` and `skip_first_batches` of an accelerator know of our loaders."""
    rank = accelerator.process_index

    def loaders() -> Iterator[tuple[int, Prepared]]:
        return enumerate(one for one in accelerator._dataloaders if isinstance(one, Prepared))

    def save(_models: Any, _weights: Any, folder: str) -> None:
        for number, loader in loaders():
            _file(folder, number, rank).write_text(json.dumps(loader.state_dict()))

    def load(_models: Any, folder: str) -> None:
        for number, loader in loaders():
            own, first = (_file(folder, number, r) for r in (rank, 0))
            found = own if own.exists() else first
            if found.exists():
                loader.load_state_dict(json.loads(found.read_text()))
            else:
                warnings.warn(
                    f"fastload: {folder} has no state of {loader!r} ({first.name}), so its epoch starts anew",
                    stacklevel=3,
                )

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    # The method of this accelerator alone: Accelerate's own makes one of torch's loaders out of any other.
    vars(accelerator)["skip_first_batches"] = partial(
        skip_first_batches, theirs=accelerator.skip_first_batches
    )


def skip_first_batches(dataloader: Any, num_batches: int = 0, *, theirs: Any = None) -> Any:
    """Return `dataloader`, the next epoch of which begins after `num_batches` batches. It reads none of them.

    `theirs` does this for loaders that are not ours.
    """
    if not isinstance(dataloader, Prepared):
        return (theirs or _theirs)(dataloader, num_batches)
    dataloader.skip(num_batches)
    return dataloader


def _file(folder: str, number: int, rank: int) -> Path:
    return Path(folder) / f"fastload_loader_{number}_rank_{rank}.json"
