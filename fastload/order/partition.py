"""Which part of the samples belongs to a rank, as the sampler, the dataset or torch.distributed says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.utils.data import ConcatDataset, DistributedSampler, StackDataset, Subset

from fastload.order.sampler_state import rank_sampler, single_sampler


def partition(sampler: Any, dataset: Any) -> tuple[int, int]:
    """Return rank and world size of the sampler, of the dataset, or of torch.distributed."""
    if (ours := rank_sampler(sampler)) is not None:
        return ours.rank, ours.world_size
    single = single_sampler(sampler)
    if isinstance(single, DistributedSampler):
        return int(single.rank), int(single.num_replicas)
    part = _part_of_rank(dataset)
    if part is not None and hasattr(part, "world_size"):
        return int(part.rank), int(part.world_size)
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _part_of_rank(dataset: Any) -> Any:
    """Return the dataset, or one inside torch's wrappers, that has only its rank's samples. Return None if none has."""
    if getattr(dataset, "partitioned_by_rank", False) is True:
        return dataset
    held: Iterable[Any] = ()
    if isinstance(dataset, Subset):
        held = (dataset.dataset,)
    elif isinstance(dataset, ConcatDataset):
        held = dataset.datasets
    elif isinstance(dataset, StackDataset):
        held = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
    return next((part for part in map(_part_of_rank, held) if part is not None), None)


def divided_once(sampler: Any) -> Any:
    """Return the RankSampler that Lightning's wrapper would divide among the same ranks again, or else `sampler`."""
    inner = rank_sampler(getattr(getattr(sampler, "dataset", None), "_sampler", None))
    ranks = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
    return inner if inner is not None and (inner.rank, inner.world_size) == ranks else sampler


def refuse_two_partitions(dataset: Any, samplers: list[Any]) -> None:
    """Raise ValueError if a sampler would divide among ranks what is already one rank's part."""
    part = _part_of_rank(dataset)
    for sampler in samplers:
        # Lightning's DistributedSamplerWrapper divides another sampler, its `dataset._sampler`, among ranks.
        inner = getattr(getattr(sampler, "dataset", None), "_sampler", None)
        held = inner if ranks_of(inner) > 1 else part
        if held is not None and ranks_of(sampler) > 1:
            raise ValueError(
                f"{type(held).__name__} gives only the samples of its rank, but {type(sampler).__name__} would divide "
                f"them again, into {ranks_of(sampler)} parts. Use only one of the two. With Lightning's Trainer, pass "
                "use_distributed_sampler=False"
            )


def ranks_of(sampler: Any) -> int:
    """Return among how many ranks a sampler divides the samples."""
    return int(getattr(sampler, "world_size", getattr(sampler, "num_replicas", 1)))
