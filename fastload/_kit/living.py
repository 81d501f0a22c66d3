"""The objects of a kind that are alive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Living(Generic[T]):
    """Objects that were added and are alive. Other threads may add some, or drop them, while one iterates.

    `WeakSet` fails then: a set changes while it is iterated over. Here each step copies, or is atomic.
    """

    def __init__(self) -> None:
        self._by_id: WeakValueDictionary[int, T] = WeakValueDictionary()

    def add(self, x: T) -> None:
        """Add an object."""
        self._by_id[id(x)] = x

    def __iter__(self) -> Iterator[T]:
        return iter([x for ref in self._by_id.valuerefs() if (x := ref()) is not None])
