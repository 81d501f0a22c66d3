"""A cache for each worker of a function under `functools.lru_cache`, although all threads call it by one name.

The function is a C object, so its class cannot be exchanged. While a loader needs it, its holder (a module, a class, a
closure or a dictionary) holds a router instead.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import WeakValueDictionary

CACHED = type(functools.lru_cache(print))


class Worker(threading.local):
    """The objects that the calling thread acts on: in a worker, copies of module-level ones, by the originals' ids."""

    def __init__(self) -> None:
        self.copies: dict[int, Any] = {}
        self.state: Any = None
        """A reference that keeps the originals alive, so that no other object gets their ids."""


worker = Worker()


class Router:
    """Stands for a cached function: a worker calls its own, any other thread calls the function itself."""

    __slots__ = ("__dict__", "__weakref__", "fastload_cached")
    __class__ = property(lambda _: CACHED)

    def __init__(self, cached: Any) -> None:
        self.fastload_cached = cached
        self.__dict__ = cached.__dict__  # its name, `__wrapped__`, `cache_parameters`

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        """Call the calling thread's function."""
        return _mine(self.fastload_cached)(*args, **keywords)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def cache_info(self) -> Any:
        """Return the statistics of the calling thread's cache."""
        return _mine(self.fastload_cached).cache_info()

    def cache_clear(self) -> None:
        """Clear the calling thread's cache."""
        _mine(self.fastload_cached).cache_clear()

    def __reduce__(self) -> Any:
        name: str = self.fastload_cached.__reduce__()
        found: Any = sys.modules.get(self.__module__)
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (unrouted, (self.fastload_cached,))

    def __hash__(self) -> int:
        return hash(self.fastload_cached)

    def __eq__(self, other: object) -> bool:
        return cached_in(other) is self.fastload_cached


def _mine(cached: Any) -> Any:
    return worker.copies.get(id(cached), cached)


_routers: WeakValueDictionary[int, Router] = WeakValueDictionary()  # by the id of the function


def cached_in(x: Any) -> Any:
    """Return the cached function that an object is, routes to, or wraps as a method or property. Otherwise None."""
    kind = type(x)
    if kind in (staticmethod, classmethod):
        x = x.__func__
    elif kind is property:
        x = x.fget
    x = unrouted(x)
    return x if type(x) is CACHED else None


def unrouted(x: Any) -> Any:
    """Return the cached function that a router stands for, or any other object as it is."""
    return x.fastload_cached if type(x) is Router else x


class Place:
    """A variable that holds a cached function: in a module, a class, a dictionary or a closure."""

    def __init__(self, holder: Any, key: Any, cached: Any) -> None:
        self.cached = cached
        self.id = (id(holder), key, id(cached))
        self._holder, self._key = holder, key
        self._before: Any = None
        self._after: Any = _NOTHING

    def replace(self) -> None:
        """Assign a router, unless code has assigned something else meanwhile."""
        x = self._get()
        if x is self._after or cached_in(x) is not self.cached:
            return
        router = _routers.setdefault(id(self.cached), Router(self.cached))
        self._before, self._after = x, router
        if type(x) in (staticmethod, classmethod):
            self._after = type(x)(router)
        elif type(x) is property:
            self._after = x.getter(router)
        self._set(self._after)

    def restore(self) -> None:
        """Assign the earlier value again, unless code has assigned something else meanwhile."""
        if self._get() is self._after:
            self._set(self._before)

    def _get(self) -> Any:
        if type(self._holder) is CellType:
            return contents(self._holder)
        return namespace(self._holder).get(self._key)

    def _set(self, value: Any) -> None:
        if type(self._holder) is CellType:
            self._holder.cell_contents = value
        elif issubclass(type(self._holder), type):
            type.__setattr__(self._holder, self._key, value)
        else:
            self._holder[self._key] = value


_NOTHING = object()


def namespace(holder: Any) -> Mapping[str, Any]:
    """Return the names in a class, or in a dictionary of names."""
    space: Mapping[str, Any] = vars(holder) if issubclass(type(holder), type) else holder
    return space


def contents(cell: CellType) -> Any:
    """Return the value of a closure's variable, or None if it is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def places_in(x: Any) -> Iterator[Place]:
    """Yield the variables in which a function or a dictionary holds cached functions."""
    kind = type(x)
    if kind is FunctionType:
        for cell in x.__closure__ or ():
            if type(value := contents(cell)) in (CACHED, Router):
                yield Place(cell, None, cached_in(value))
    space = x if kind is dict else vars(x) if kind is FunctionType else {}
    for key, value in list(space.items()):
        if type(value) in (CACHED, Router) and type(key) in (str, int):
            yield Place(space, key, cached_in(value))
