"""Several ranks that make one set: each makes a share of the parts, rank 0 seals, and all end in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from fastload import distributed
from fastload._kit.cores import usable_cores
from fastload.distributed import Control, Rank, detect_rank
from fastload.errors import PrepareError, RankError

T = TypeVar("T")

_PATIENCE = timedelta(days=20)
"""Time that a finished rank waits for the others. If one of them ends, it notices that at once."""


class Ranks:
    """The ranks of a job. Each calls the same methods in the same order. One rank alone waits for nothing.

    Args:
        control: collective calls, by which the ranks agree.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self.rank = control.rank

    def __str__(self) -> str:
        return "" if self.rank.world_size == 1 else f", {self.rank}"

    def share(self, parts: Sequence[T]) -> Sequence[T]:
        """Return those of the missing parts that this rank makes."""
        return parts[self.rank.rank :: self.rank.world_size]

    def cores(self) -> int:
        """Return how many threads this rank can keep busy."""
        return usable_cores() if self.rank.world_size == 1 else distributed.cores()

    def each(self, function: Callable[[], T]) -> T:
        """Call `function`, and return what it returns, once it has ended on all ranks.

        If it raises on some ranks, all raise PrepareError with the first of them and its reason. If it raises on all
        ranks, each raises its own error.
        """
        value, error = _outcome(function)
        reasons = self._together(lambda: self._control.gather(_reason(error)))
        failed = [rank for rank, reason in enumerate(reasons) if reason is not None]
        if error is not None and len(failed) == len(reasons):
            raise error
        if failed:
            first = failed[0] if error is None else self.rank.rank
            raise self._failed(first, reasons[first]) from error
        return value  # type: ignore[return-value]

    def first(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 alone, and return its result. Other ranks get a pickled copy of it.

        Raise what `each` raises.
        """
        value = self.each(lambda: function() if self.rank.rank == 0 else None)
        found: T = self._together(lambda: self._control.broadcast(value))
        return found

    def expect_same(self, key: Mapping[str, str]) -> None:
        """Raise PrepareError, on all ranks, if the key of a rank differs from that of rank 0."""
        keys = self._together(lambda: self._control.gather(dict(key)))
        for rank, other in enumerate(keys):
            differing = [name for name in key if other[name] != keys[0][name]]
            if differing:
                raise PrepareError(
                    f"rank {rank} of {len(keys)} differs from rank 0 in {' and '.join(differing)}. Give all ranks the "
                    "same model and dataset, with the same weights"
                )

    def _together(self, call: Callable[[], T]) -> T:
        """Return what a collective call returns. Raise PrepareError if another rank has ended."""
        try:
            return call()
        except RuntimeError as error:
            raise PrepareError(
                f"{self.rank}: another rank has ended, or was killed. Look for the reason in the launcher's output. "
                "Complete parts are kept. Start the ranks again to continue"
            ) from error

    def _failed(self, rank: int, reason: str | None) -> PrepareError:
        return PrepareError(
            f"rank {rank} of {self.rank.world_size} failed ({reason}). Complete parts are kept. Start the ranks again "
            "to continue"
        )


def _outcome(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what a function returns, or the error that it raises."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def _reason(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


@contextmanager
def meet(rank: Rank | None) -> Iterator[Ranks]:
    """Wait for all ranks of this job, and yield them. `rank` None: the rank that the launcher sets.

    Raise RankError if the launcher has started this process as another rank.
    """
    rank = rank or detect_rank().rank
    if rank.world_size > 1:
        joined = distributed.init("gloo")
        if (joined.rank, joined.world_size) != (rank.rank, rank.world_size):
            raise RankError(
                f"rank= is {rank}, but this process was started as {joined}. Remove rank=, or start the ranks with "
                "torchrun, mpiexec or srun"
            )
    control = Control(rank, timeout=_PATIENCE)
    try:
        yield Ranks(control)
    finally:
        control.close()
