"""Those parts of Twister2's environment, sources and TSets that programs feeding PyTorch use. No Java is needed.

from fastload.compat.twister2 import SourceFunc, TSetContext, Twister2Environment

Each rank runs the program, with sources of its own: `mpiexec -n 4 python program.py`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastload.compat.ranks import join, wait_for_all
from fastload.errors import RankError

__all__ = ["Collector", "SourceFunc", "TSet", "TSetContext", "Twister2Environment"]


class SourceFunc(ABC):
    """A source of values. Subclasses define both methods."""

    @abstractmethod
    def has_next(self) -> bool:
        """Return True if `next` has another value."""

    @abstractmethod
    def next(self) -> Any:
        """Return the next value."""


@dataclass(frozen=True)
class TSetContext:
    """Passed to functions of `TSet.compute`: the rank that runs the function, and the number of ranks."""

    index: int
    parallelism: int


class Collector:
    """The collector to which a function of `TSet.compute` passes its results."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def collect(self, value: Any) -> None:
        """Add a value to the results."""
        self.values.append(value)


class TSet:
    """The values of one rank. They are computed when they are first needed, and cached."""

    def __init__(self, make: Callable[[], Iterable[Any]], context: TSetContext) -> None:
        self._make = make
        self._context = context
        self._values: list[Any] | None = None

    def compute(self, function: Callable[[Iterator[Any], Collector, TSetContext], Any]) -> TSet:
        """Return a TSet of what `function(values, collector, context)` collects. `cache()` calls the function."""

        def collected() -> list[Any]:
            collector = Collector()
            function(iter(self), collector, self._context)
            return collector.values

        return TSet(collected, self._context)

    def cache(self) -> TSet:
        """Compute the values, unless they are cached. Return this TSet."""
        if self._values is None:
            self._values = list(self._make())
        return self

    def __iter__(self) -> Iterator[Any]:
        self.cache()
        return iter(self._values or ())


class Twister2Environment:
    """One of the ranks that run the program. All ranks create one.

    Args:
        resources: what Twister2 would start. The sum of their "instances" must be the number of ranks. The launcher
            decides on processors and memory, so "cpu", "ram" and other options are ignored.

    Raises RankError with the right command if the number of ranks is a different one.
    """

    def __init__(self, *, resources: Sequence[Mapping[str, Any]] = (), **_options: Any) -> None:
        rank = join()
        self.worker_id = rank.rank
        self._world_size = rank.world_size
        if resources:
            wanted = sum(int(one.get("instances", 1)) for one in resources)
            self._expect(wanted, "the resources have", "instances")

    def create_source(self, source_func: SourceFunc, parallelism: int) -> TSet:
        """Return the values of this rank's source. All ranks call this, and wait for one another.

        So all ranks see a folder that one rank has created before the call.

        Raises RankError if `parallelism` is not the number of ranks.
        """
        self._expect(parallelism, "the source has", "as its parallelism")
        wait_for_all()

        def values() -> Iterator[Any]:
            while source_func.has_next():
                yield source_func.next()

        return TSet(values, TSetContext(self.worker_id, parallelism))

    def _expect(self, wanted: int, has: str, what: str) -> None:
        if wanted != self._world_size:
            raise RankError(
                f"The program runs on {self._world_size} ranks, but {has} {wanted} {what}. "
                f"Start it with: mpiexec -n {wanted} python {sys.argv[0]}"
            )
