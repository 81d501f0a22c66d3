"""What the ranks of a training run agree on beside their gradients: on the CPU, over Gloo."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from fastload.distributed import Rank

T = TypeVar("T")


class Control:
    """Collective calls: every rank makes the same ones in the same order. With one rank they cost nothing."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._group: Any = dist.new_group(backend="gloo") if rank.world_size > 1 else None

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.rank.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value; what the others give does not count."""
        values: list[Any] = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self._group, device=torch.device("cpu"))
        found: T = values[0]
        return found

    def union(self, mask: torch.Tensor) -> torch.Tensor:
        """bool[N], on the CPU: true where it is true on any rank."""
        found = mask.to("cpu", torch.uint8)
        if self._group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return found.bool()

    def cast(self, vote: int) -> Vote:
        """Give a vote; the greatest of all is known when it is asked for."""
        ballot = torch.tensor([vote], dtype=torch.int64)
        if self._group is None:
            return Vote(ballot, None)
        return Vote(
            ballot, dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self._group, async_op=True)
        )


class Vote:
    """A vote of all ranks that is under way."""

    def __init__(self, ballot: torch.Tensor, work: Any) -> None:
        self._ballot = ballot
        self._work = work

    def result(self) -> int:
        """The greatest vote of any rank. Raises RuntimeError where a rank has died."""
        if self._work is not None:
            self._work.wait()
        return int(self._ballot)


class Stopping:
    """Lets SIGINT and SIGTERM end the block between two steps, on all ranks between the same two.

    A rank that gets a signal must not leave alone: the others would wait for its gradients. So each votes
    before every step. The vote is counted one step later, in which it has travelled beside the step's work, and costs
    no wait. A second signal does at once what it would have done outside the block. In the main thread alone.

    A SIGINT that is ignored outside the block stays ignored, as in a job that a shell started in the background.
    SIGTERM is always taken. A job script may ignore it and its ranks inherit that. They must still write their
    checkpoint.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._vote: Vote | None = None
        self._arrived = 0
        self._before: dict[int, Any] = {}

    def asked(self) -> int:
        """The signal on which all ranks stop here, 0 if none. Collective: each rank asks once before every step."""
        if agreed := self._settled():
            return agreed
        vote = self._control.cast(self._arrived)
        if self._control.rank.world_size == 1:
            return vote.result()
        self._vote = vote
        return 0

    def _settled(self) -> int:
        """What the vote under way comes to; 0 without one."""
        vote, self._vote = self._vote, None
        return vote.result() if vote is not None else 0

    def __enter__(self) -> Self:
        taken = [signal.SIGTERM]
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            taken.append(signal.SIGINT)
        self._before = {number: signal.signal(number, self._arrive) for number in taken}
        return self

    def _arrive(self, number: int, _: FrameType | None) -> None:
        if self._arrived:
            self._restore()
            signal.raise_signal(number)
        self._arrived = number

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._restore()
        if exc is None:
            self._settled()
        else:
            # Another rank may be gone, and then nobody counts this vote.
            self._vote = None


def signal_name(number: int) -> str:
    """SIGINT for 2, and so on."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return str(number)
