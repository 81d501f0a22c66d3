"""Finds the random generators that samples may draw from, although the dataset does not hold them. It runs no code."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

from fastload.safety import kinds
from fastload.safety.graph import Graph
from fastload.safety.modules import is_users_module
from fastload.safety.objects import is_global_generator

OBJECTS_AT_MOST = 100_000
"""It looks at no more objects, which takes a second, and warns."""


def generators_beside(graph: Graph) -> list[tuple[str, Any]]:
    """Return the generators below the user's modules and classes, each with its first path, in order of paths.

    Those of classes made in functions are found by the dataset's objects, which are in `graph`.
    """
    found: list[tuple[str, Any]] = []
    seen: dict[int, Any] = {}  # they stay alive, so that their ids stay valid
    # In order of depth: what a module or class itself holds has the path of that.
    todo = deque([*_of_modules(), *_of_classes(graph)])
    while todo:
        path, x = todo.popleft()
        kind = graph.kinds[type(x)]
        if id(x) in seen or (kind is kinds.ATOM and type(x) not in _CODE and not _is_class(x)):
            continue
        seen[id(x)] = x
        if len(seen) > OBJECTS_AT_MOST:
            what = "a random generator further below draws what depends on the workers"
            warnings.warn(
                f"fastload: too many objects are below modules, as at {path:.80}: {what}",
                stacklevel=2,
            )
            break
        if isinstance(kind, kinds.Generator) and not is_global_generator(x):
            found.append((path, x))
        with suppress(Exception):  # another thread may change it
            todo += [(path + way, part) for way, part in _parts(x, kind, graph)]
    return found


_CODE = staticmethod, classmethod, property


def _is_class(x: Any) -> bool:
    return issubclass(type(x), type)  # `isinstance` asks a proxy of the user's for its class


def _of_modules() -> Iterator[tuple[str, Any]]:
    """Yield the variables of the user's modules, and the attributes of their classes."""
    loaded = sorted(sys.modules.copy())  # other threads may import
    users = {top: is_users_module(top) for top in {name.partition(".")[0] for name in loaded}}
    for name in loaded:
        module = sys.modules.get(name) if users[name.partition(".")[0]] else None
        if type(module) is not ModuleType or not is_users_module(name):
            continue
        for key, value in sorted(vars(module).items()):
            yield f"{name}.{key}", value
            # In a spawned process, `__main__` is `__mp_main__`, too.
            if _is_class(value) and sys.modules.get(vars(value).get("__module__")) is module:
                for attribute, held in sorted(vars(value).items()):
                    yield f"{name}.{value.__qualname__}.{attribute}", held


def _of_classes(graph: Graph) -> Iterator[tuple[str, Any]]:
    """Yield the user's classes of the objects in a graph."""
    for cls, x in {type(node.x): node.x for node in reversed(graph.nodes.values())}.items():
        if is_users_module(cls.__module__):
            yield f"{graph.path(x)}.__class__", cls


def _parts(x: Any, kind: kinds.Kind, graph: Graph) -> Iterator[tuple[str, Any]]:
    """Yield what an object, a function or a class of the user's holds, and the object's class."""
    if _is_class(x):
        for cls in x.__mro__:
            if is_users_module(vars(cls).get("__module__", "builtins")):
                yield from ((f".{name}", value) for name, value in sorted(vars(cls).items()))
    elif type(x) in _CODE:
        yield "", x.fget if type(x) is property else x.__func__
    elif type(x) is FunctionType:
        yield from kinds.held_by(x)
    elif kind.shared is None and not isinstance(kind, kinds.Memory) and not graph.is_data(x, kind):
        yield from kind.parts(x)
        yield ".__class__", type(x)
