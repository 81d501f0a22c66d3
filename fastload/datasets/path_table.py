"""Sequences that create an element when it is read, and `PathTable`, one of paths."""

from __future__ import annotations

import operator
import os
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from typing import TypeVar, overload

import numpy as np

T = TypeVar("T", covariant=True)


class Lazy(Sequence[T]):
    """A sequence that creates an element when it is read. A slice of it is a list."""

    @abstractmethod
    def _at(self, position: int) -> T:
        """Return the element at `position`, which is in range."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._at(position) for position in range(*index.indices(len(self)))]
        return self._at(range(len(self))[operator.index(index)])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lstrip('_')} of {len(self)}>"


class PathTable(Lazy[str]):
    """Packed paths: each directory is stored once, and file names lie end to end in one buffer.

    A path costs 12 bytes and its file name (36 for ImageNet's), however long its directory is. As a str it costs 57
    bytes and the whole path. `total` counts the paths of all ranks. `directories` are those of all ranks, each with
    its trailing slash, in order of appearance. `directory_of`, int32[len(self)], gives the directory of each path.
    """

    def __init__(self, files: Iterable[tuple[bytes, bytes]], *, rank: int, world_size: int) -> None:
        """Store the rank's part of `files`: (directory with trailing slash, file name)."""
        if not 0 <= rank < world_size:
            raise ValueError(f"expected 0 <= rank < world_size, got {rank=} and {world_size=}")
        numbers: dict[bytes, int] = {}
        names, ends, directory_of = bytearray(), array("q", [0]), array("i")
        self.total = 0
        for directory, name in files:
            number = numbers.setdefault(directory, len(numbers))
            if self.total % world_size == rank:
                names += name
                ends.append(len(names))
                directory_of.append(number)
            self.total += 1
        self.rank, self.world_size = rank, world_size
        self.directories = [os.fsdecode(directory) for directory in numbers]
        self.directory_of = np.array(directory_of, dtype=np.int32)
        self._names, self._ends = bytes(names), np.array(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.directory_of)

    def _at(self, position: int) -> str:
        name = self._names[self._ends[position] : self._ends[position + 1]]
        directory: str = self.directories[self.directory_of[position]]
        return directory + os.fsdecode(name)
