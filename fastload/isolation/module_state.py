"""Module-level objects of its own for each worker, although all threads read them by one name.

While a loader needs it, a module-level instance belongs to a subclass of its class, which is created here. In a worker,
every attribute and operator of the instance acts on the worker's copy. In any other thread it acts on the instance
itself. So code may reach the object in any way: by name, by `globals()`, through a module, in a closure. Functions,
classes and modules stay as they are, but a router stands for a function under `functools.lru_cache`: see `cached`.
"""

from __future__ import annotations

import copyreg
import functools
import random
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from typing import Any

from fastload.isolation.cached import CACHED, Place, Router, places_in, unrouted, worker
from fastload.isolation.classify import kind_of
from fastload.isolation.code import ModuleObject, held, is_stateless
from fastload.isolation.kinds import is_plain, solid_base
from fastload.isolation.rules import ELEMENTS, own_dict

OBJECTS = 2_000
"""The search for instances below one module-level object looks at no more objects."""


class ModuleState:
    """The module-level instances of which each worker of a loader gets its own.

    `roots` are the instances, and `paths` their names, all different. Each worker gets copies of them, and of the
    functions in `cached`, which are listed by name. `unreached` are the objects of which threads still
    share something: containers, arrays, generators, names that code rebinds. Of these, `unroutable` hold a cached
    function that no router can replace.

    Args:
        objects: the module-level objects that code reads by name.
        graph: the objects of the dataset's graph, which may hold routers of another loader.
    """

    def __init__(self, objects: Iterable[ModuleObject], graph: Iterable[object] = ()) -> None:
        reached: dict[int, tuple[Any, str]] = {}
        self.unreached: list[ModuleObject] = []
        self.unroutable: list[ModuleObject] = []
        self._places: list[Place] = []
        for found in objects:
            if not _reach(found, reached, self._places):
                self.unroutable.append(found)
            elif not found.rebound and _is_whole(found.value, reached):
                continue
            self.unreached.append(found)
        for x in graph:
            if type(x) is Router:
                _add(unrouted(x), f"cached function {len(reached) + 1}", reached)
        instances = [(x, path) for x, path in reached.values() if type(x) is not CACHED]
        self.roots: list[Any] = [x for x, _ in instances]
        self.paths: list[str] = [path for _, path in instances]
        self.cached: dict[str, Any] = {}
        for x, path in reached.values():
            if type(x) is CACHED:  # two modules may have one name
                self.cached[path if path not in self.cached else f"{path}, {len(self.cached)}"] = x

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yield the objects of which each worker gets its own, by name."""
        yield from zip(self.paths, self.roots, strict=True)
        yield from self.cached.items()

    def install(self) -> None:
        """Let the threads that `enter` act on copies, until `remove` was called as often as this."""
        with _lock:
            # Count all of them first, so that `remove` undoes an install that failed half-way.
            for key, x in self._needed():
                _installed.setdefault(key, [x, 0])[1] += 1
            for key, _ in self._needed():
                _put(_installed[key][0], routed=True)

    def remove(self) -> None:
        """Restore the instances that no other loader needs."""
        with _lock:
            for key, _ in self._needed():
                entry = _installed[key]
                entry[1] -= 1
                if not entry[1]:
                    del _installed[key]
                    _put(entry[0], routed=False)

    def _needed(self) -> Iterator[tuple[Hashable, Any]]:
        yield from ((id(x), x) for x in self.roots)
        yield from ((place.id, place) for place in self._places)

    def enter(self, copies: Mapping[int, Any]) -> None:
        """Let this thread act on `copies`, by the ids of the originals, from now on.

        An object without a copy, or that is its own copy, is shared.
        """
        mine = ((x, copies.get(id(x), x)) for x in (*self.roots, *self.cached.values()))
        worker.copies = {id(x): copy for x, copy in mine if copy is not x}
        worker.state = self


def original(cls: type) -> type:
    """Return the class that instances of `cls` had before `install`. For most classes that is `cls` itself."""
    found: type = vars(cls).get(_ORIGINAL, cls)
    return found


_ORIGINAL = "__fastload_original__"
_installed: dict[Hashable, list[Any]] = {}
"""Each installed instance or place, by its id, and the number of loaders that need it."""
_lock = threading.RLock()  # owns _installed, its instances' classes, and what its places hold


def _put(x: Any, *, routed: bool) -> None:
    if type(x) is Place:
        (x.replace if routed else x.restore)()
    else:
        cls = original(type(x))
        _set_class(x, _routing(cls) if routed else cls)


# ---- which instances ----


def _reach(found: ModuleObject, reached: dict[int, tuple[Any, str]], places: list[Place]) -> bool:
    """Add to `reached` the instances and the cached functions at or below a module-level object.

    Add to `places` the variables that hold the functions. Return False if something else holds one as well.
    """
    name = f"{found.module}.{found.name}"
    if type(found.value) is CACHED:
        places.append(Place(found.holder, found.name, found.value))
        _add(found.value, name, reached)
        return True
    placed = True
    todo, seen = [found.value], dict[int, Any]()
    while todo and len(seen) < OBJECTS:
        x = todo.pop()
        if type(x) is Router:  # held by an object that was created while another loader ran
            _add(unrouted(x), f"{name}, function {len(reached) + 1}", reached)
            continue
        if id(x) in seen or is_stateless(x) or kind_of(original(type(x))).shared:
            continue
        seen[id(x)] = x
        if _can_route(x):
            _add(x, name if x is found.value else f"{name}, instance {len(reached) + 1}", reached)
        elif len(parts := list(held(x, 2 * ELEMENTS))) <= ELEMENTS:  # longer ones are data
            placed &= type(x) is not CACHED
            own = {place: id(place.cached) for place in places_in(x)}
            for place in own:
                _add(place.cached, f"{name}, function {len(reached) + 1}", reached)
            places += own
            parts += own_dict(x).values()
            todo += [part for part in parts if id(unrouted(part)) not in own.values()]
    return placed


def _add(x: Any, path: str, reached: dict[int, tuple[Any, str]]) -> None:
    reached.setdefault(id(x), (x, path))


def _is_whole(x: Any, reached: Container[int]) -> bool:
    """Return whether each worker has its own copy of every changeable part of a module-level object."""
    if type(x) in (tuple, types.MethodType):
        return all(is_stateless(part) or id(part) in reached for part in held(x))
    return id(x) in reached


def _can_route(x: Any) -> bool:
    """Return whether a routing class works for an instance: Python allows it, and no C code bypasses the class."""
    cls = original(type(x))
    plain = is_plain(cls) or solid_base(cls) in _ASKED_BY_C or issubclass(cls, random.Random)
    if not plain:
        return False
    with _lock:
        if type(x) is cls:
            try:
                _set_class(x, _routing(cls))
            except TypeError:  # it is written in C, or its metaclass refuses
                return False
            _set_class(x, cls)
    return True


_ASKED_BY_C = (dict, OrderedDict, defaultdict, deque)
"""C code calls the methods of subclasses of these. From a list or a set, it takes elements without any method."""


def _set_class(x: Any, cls: type) -> None:
    vars(object)["__class__"].__set__(x, cls)


# ---- the class that they are of meanwhile ----


def _routing(cls: type) -> type:
    """Return the subclass of `cls` whose instances act on the calling worker's copies of them.

    This calls neither a user's metaclass nor a user's `__init_subclass__`.
    """
    known: type
    for known in type.__subclasses__(cls):
        if _ORIGINAL in vars(known):
            return known
    space: dict[str, Any] = {
        "__slots__": (),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__class__": property(lambda _: cls, _set_class),
        _ORIGINAL: cls,
    }
    for name, value in _special_methods(cls).items():
        make = _MAKERS.get(name, _method)
        space[name] = functools.update_wrapper(make(cls, name), value)  # for its signature
    space["__reduce_ex__"] = _reduce(cls)
    space.setdefault("__hash__", cls.__hash__)
    meta: type = type(cls)
    quiet = {"mro": lambda made: [made, _Quiet, *cls.__mro__]}
    return type.__new__(
        type.__new__(type(meta), meta.__name__, (meta,), quiet), cls.__name__, (cls,), space
    )


class _Quiet:
    """Comes before a class in the method resolution order, so that its `__init_subclass__` does not run."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        pass


def _special_methods(cls: type) -> dict[str, Any]:
    """Return, by name, the methods that Python looks up in the class of an object, not in the object."""
    names = {"__getattribute__", "__setattr__", "__delattr__"}
    found = {name: vars(object)[name] for name in names}
    for k in reversed(cls.__mro__[:-1]):
        found |= {n: v for n, v in vars(k).items() if n.startswith("__") and n.endswith("__")}
    return {
        name: value
        for name, value in found.items()
        if name in names
        or (
            hasattr(type(value), "__get__")
            and not isinstance(value, _NO_METHODS)
            and name not in ("__init__", "__del__")
            and value is not vars(object).get(name)
        )
    }


_NO_METHODS = (
    *(staticmethod, classmethod, property, types.ClassMethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
)


def _method(cls: type, name: str) -> Callable[..., Any]:
    def method(self: Any, /, *args: Any, **keywords: Any) -> Any:
        mine = worker.copies.get(id(self), self)
        result = getattr(cls, name)(mine, *args, **keywords)
        if type(result) is type(self) and id(result) not in _installed:
            _set_class(result, cls)  # created as a `type(self)`, for example by `__deepcopy__`
        return self if result is mine else result

    return method


def _getattribute(cls: type, name: str) -> Callable[..., Any]:
    """Return the method that reads an attribute. It is called most often."""
    of_class: Any = cls

    def method(self: Any, name: str, /) -> Any:
        return of_class.__getattribute__(worker.copies.get(id(self), self), name)

    return method


def _comparison(cls: type, name: str) -> Callable[..., Any]:
    """Return a method that compares the worker's copies of both objects: methods compare their classes."""

    def method(self: Any, other: Any, /) -> Any:
        copies = worker.copies
        return getattr(cls, name)(copies.get(id(self), self), copies.get(id(other), other))

    return method


_MAKERS = {"__getattribute__": _getattribute} | dict.fromkeys(
    ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"), _comparison
)


def _reduce(cls: type) -> Callable[..., Any]:
    """Return the method that pickle and copy call. They create an object of the original class."""

    def method(self: Any, protocol: Any, /) -> Any:
        mine = worker.copies.get(id(self), self)
        registered = copyreg.dispatch_table.get(cls)
        reduce: Any = cls.__reduce_ex__
        made = registered(mine) if registered else reduce(mine, protocol)
        if isinstance(made, str):  # the name of a global
            return made
        call, args, *rest = made
        return original_of(call), tuple(map(original_of, args)), *rest

    def original_of(part: Any) -> Any:
        return cls if isinstance(part, type) and original(part) is cls else part

    return method
