"""Which samples a rank of an Accelerator reads: of the batches of one order, each rank takes every n-th."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.state import DistributedType
from accelerate.utils import broadcast_object_list, synchronize_rng_states
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from fastload.integrations.stream import Part
from fastload.order.partition import ranks_of
from fastload.order.sampler import RankSampler
from fastload.order.sampler_state import generators, single_sampler
from fastload.order.state import known_length
from fastload.settings import Settings


def check(loader: Any, index_sampler: Any, accelerator: Accelerator, *, resumes: bool) -> None:
    """Raise ValueError if the accelerator asks for what a fastload loader cannot do."""
    sampler = single_sampler(index_sampler)
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
    elif ranks_of(sampler) > 1:
        problem = (
            f"{type(sampler).__name__} gives only the samples of its rank, and Accelerate would divide them again. "
            "Give the loader shuffle=True and a seed, or leave it out of prepare()"
        )
    elif resumes and accelerator.num_processes > 1:
        problem = "load the loader's state after prepare(), which divides it among the ranks"
    if problem is not None:
        raise ValueError(f"{loader!r} and Accelerate: {problem}")


def number_of_samples(settings: Settings) -> int | None:
    """Return the number of samples in an epoch of all ranks, or None if dataset and sampler have no length."""
    sampler = single_sampler(settings.sampler)
    if settings.iterable or sampler is settings.sampler:
        return known_length(settings.dataset)
    return known_length(sampler)


def agreed_seed(settings: Settings, accelerator: Accelerator, world_size: int) -> int | None:
    """Return a seed of order and samples, the same on all ranks. Return None if the loader's own settings are enough.

    `use_seedable_sampler`, which the Trainer sets, asks for one: it cannot save what torch's global state was.
    """
    if found := [g for g in generators(settings.sampler) if isinstance(g, torch.Generator)]:
        if world_size > 1:
            synchronize_rng_states(["generator"], found[0])
        return None
    sampler = single_sampler(settings.sampler)
    draws = hasattr(sampler, "generator") and sampler.generator is None
    seed = settings.seed
    if seed is None and accelerator.use_seedable_sampler:
        seed = accelerator.dataloader_config.data_seed
        seed = torch.initial_seed() if seed is None else seed
    chosen = settings.seed is None and seed is not None
    if world_size > 1 and (draws or settings.iterable or chosen):
        drawn = seed if seed is not None else torch.empty((), dtype=torch.int64).random_().item()
        return int(broadcast_object_list([drawn])[0])
    return seed if draws or chosen else None


def divided(loader: Any, accelerator: Accelerator, rank: int, world_size: int) -> dict[str, Any]:
    """Return the attributes with which a loader reads the part of a rank."""
    if isinstance(loader.dataset, IterableDataset):
        return _part_of_stream(loader, accelerator, rank, world_size)
    key = "sampler" if loader.batch_sampler is None else "batch_sampler"
    batches = getattr(loader, key)
    if key == "sampler" and not isinstance(batches, BatchSampler):
        raise ValueError(
            f"{loader!r} and Accelerate: without batches there is nothing to divide. Give batch_size"
        )
    order = _order_arguments(single_sampler(batches), loader)
    if order is None or type(batches) is not BatchSampler:
        if world_size == 1:
            return {}
        own: Any = ShardedBatches(
            batches, world_size, rank, accelerator.split_batches, accelerator.even_batches
        )
        return {key: own, "sampler": own if key == "sampler" else own.sampler}
    size = _rank_batch_size(batches.batch_size, accelerator, world_size)
    ends: Any = "drop" if batches.drop_last else "pad" if accelerator.even_batches else "uneven"
    if world_size == 1:
        ends = "uneven"
    sampler = RankSampler(
        len(loader.dataset), rank=rank, world_size=world_size, ends=ends, block=size, **order
    )
    own = EvenBatches(sampler, size, batches.drop_last)
    if key == "sampler":
        return {key: own}
    return {key: own, "sampler": sampler, "batch_size": size}


def _order_arguments(sampler: Any, loader: Any) -> dict[str, Any] | None:
    """Return the arguments of a RankSampler with the order of `sampler` or one like it, or None."""
    if type(sampler) is RankSampler:
        names = ("shuffle", "seed", "window", "run")
        return {name: getattr(sampler, name) for name in names}
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    once = type(sampler) is RandomSampler and not sampler.replacement
    if once and loader.seed is not None and sampler.num_samples == known_length(loader.dataset):
        return {"shuffle": True, "seed": loader.seed}
    return None


def _part_of_stream(
    loader: Any, accelerator: Accelerator, rank: int, world_size: int
) -> dict[str, Any]:
    """Return the attributes of a loader of a rank's part of an iterable dataset.

    By default all ranks get equally many batches. So each must read all samples. `dispatch_batches=False` says, as it
    does to Accelerate, that a rank may read shards of its own.
    """
    dataset: Any = loader.dataset
    if world_size == 1 or getattr(dataset, "partitioned_by_rank", False):
        return {}
    own_shards = accelerator.dispatch_batches is False and not accelerator.split_batches
    if own_shards and getattr(dataset, "num_shards", 0) >= world_size and hasattr(dataset, "shard"):
        return {"dataset": dataset.shard(num_shards=world_size, index=rank)}
    if loader.batch_size is None:
        raise ValueError(
            f"{loader!r} and Accelerate: an iterable dataset is divided by batches. Give batch_size"
        )
    size = _rank_batch_size(loader.batch_size, accelerator, world_size)
    seed: Any = loader.seed  # agreed_seed() gave it one
    part = Part(dataset, size, rank, world_size, drop_last=loader.drop_last, seed=seed)
    return {"dataset": part, "batch_size": size}


def _rank_batch_size(batch_size: int, accelerator: Accelerator, world_size: int) -> int:
    """Return the size of a rank's batches. Raise ValueError if `split_batches` cannot split them."""
    if not accelerator.split_batches:
        return batch_size
    if batch_size % world_size:
        raise ValueError(
            f"split_batches=True splits batches among the {world_size} ranks, but batch_size={batch_size} is no "
            "multiple of their number. Give one that is"
        )
    return batch_size // world_size


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
