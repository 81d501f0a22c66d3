"""Values that ranks exchange on the CPU, over Gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fastload.distributed.detect import Rank

T = TypeVar("T")


class Control:
    """Collective calls: every rank makes the same calls in the same order. With one rank, they cost nothing.

    Args:
        timeout: time that a rank waits for the others in a call. None: the timeout of `init`.
        rank: this rank.

    Examples:
        >>> control = fastload.distributed.Control(fastload.distributed.init("gloo"))
        >>> control.gather("ready")
        ['ready']
    """

    def __init__(self, rank: Rank, *, timeout: timedelta | None = None) -> None:
        self.rank = rank
        self._group: Any = None
        if rank.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def close(self) -> None:
        """Leave the group. A rank that still waits in it for this one gets an error."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.rank.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: T | None) -> T:
        """Return rank 0's value. The values of other ranks are ignored."""
        values: list[Any] = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self._group, device=torch.device("cpu"))
        found: T = values[0]
        return found

    def union(self, mask: torch.Tensor) -> torch.Tensor:
        """Return bool[N], on the CPU: an item is true if it is true on any rank."""
        found = mask.to("cpu", torch.uint8)
        if self._group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return found.bool()

    def cast(self, vote: int) -> Vote:
        """Return a vote in progress. `Vote.result` returns the greatest vote of all ranks."""
        ballot = torch.tensor([vote], dtype=torch.int64)
        if self._group is None:
            return Vote(ballot, None)
        work = dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return Vote(ballot, work)


class Vote:
    """A vote of all ranks in progress.

    Args:
        ballot, work: tensor with this rank's vote, and its all-reduce, or None on one rank. `Control.cast` gives both.

    Examples:
        >>> control = fastload.distributed.Control(fastload.distributed.init("gloo"))
        >>> control.cast(1).result()
        1
    """

    def __init__(self, ballot: torch.Tensor, work: Any) -> None:
        self._ballot = ballot
        self._work = work

    def result(self) -> int:
        """Return the greatest vote of any rank.

        Raises:
            RuntimeError: a rank has died.
        """
        if self._work is not None:
            self._work.wait()
        return int(self._ballot)
