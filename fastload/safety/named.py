"""Finds the random generators that samples reach by name, in modules, classes and closures. It runs no code."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from sys import modules
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fastload.safety.graph import Graph
from fastload.safety.modules import is_users_module
from fastload.safety.objects import LEAVES, own_dict

_CACHED = type(lru_cache(print))
_CODE = FunctionType, ModuleType, type, _CACHED


def generators_by_name(graph: Graph) -> list[tuple[str, Any]]:
    """Return the generators that the code of a graph's objects can name, without those of the graph itself.

    Each has the path of the variable that reaches it (`module.AUGMENT.rng`), which is the same in all processes.
    """
    own = graph.generators()
    ids, paths = {id(x) for _, x in own}, {path for path, _ in own}
    found = [(path, x) for path, x in _reached(graph).generators() if id(x) not in ids]
    return [(f"{path} (by name)" if path in paths else path, x) for path, x in found]


def _reached(graph: Graph) -> Graph:
    """Return the graph of the objects that the user's functions and classes hold and name, from those of `graph` on."""
    objects = Graph({})
    code: dict[int, Any] = {}  # what was read. It stays alive, so that the ids stay valid
    todo = deque(_code_of(graph, 0, 0))
    # Looked at last: what else is named has the path of its name, whether it is cached yet or not.
    caches: list[Any] = []
    while todo or caches:
        if not todo:
            todo += _results(caches.pop(0))
            continue
        path, x = todo.popleft()
        with suppress(Exception):  # of a metaclass, or because another thread changes a dict
            x = _function_of(x)
            if type(x) in LEAVES or id(x) in code:
                continue
            if issubclass(type(x), _CODE):
                code[id(x)] = x
                caches += [x] if type(x) is _CACHED else []
                todo += _held_by(x)
            elif id(x) not in graph.nodes:
                known = len(objects.nodes), len(objects.code)
                objects.add(x, path)
                todo += _code_of(objects, *known)
    return objects


def _code_of(graph: Graph, nodes: int, code: int) -> list[tuple[str, Any]]:
    """Return the functions of a graph and the classes of its objects, without those of the first `nodes` and `code`."""
    new = [node.x for node in islice(graph.nodes.values(), nodes, None)]
    functions = [x for x in new if type(x) is FunctionType]
    found = {id(x): x for x in (*map(type, new), *functions, *graph.code[code:])}
    return [("", x) for x in found.values()]


def _held_by(x: Any) -> Iterable[tuple[str, Any]]:
    """Yield what a function, a cache, a class or a module holds, and what a function names."""
    if type(x) is FunctionType:
        yield from _held_by_function(x)
    elif type(x) is _CACHED:
        yield "", x.__wrapped__
    elif issubclass(type(x), ModuleType):
        # Not by its attributes: a lazy module would load.
        variables = own_dict(x).copy()
        if is_users_module(name := str(variables.get("__name__"))):
            yield from ((f"{_main(name)}.{key}", value) for key, value in variables.items())
    else:
        for owner in x.__mro__:
            if is_users_module(str(owner.__module__)):
                for name, value in vars(owner).copy().items():
                    yield f"{_name(owner)}.{name}", value


def _results(cached: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a cache holds: in a dict or, with a limit, beside it."""
    path = f"{_name(cached.__wrapped__)}()"
    for held in gc.get_referents(cached):
        values = held.copy().values() if type(held) is dict else (held,)
        yield from ((path, value) for value in values)


def _held_by_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    where, code, variables = _name(function), function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield f"{where} ({name})", cell
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield f"{where} (a default)", value
    yield from ((f"{where}.{name}", value) for name, value in vars(function).items())
    if is_users_module(variables.get("__name__")):
        yield from _named(variables, sorted(_names(code)), set())


def _named(
    variables: dict[str, Any], names: list[str], seen: set[int]
) -> Iterator[tuple[str, Any]]:
    """Yield a module's variables of these names, and so on with the user's modules among them."""
    seen.add(id(variables))
    of, package = _main(variables.get("__name__")), variables.get("__package__")
    for name in names:
        value = variables.get(name)
        if value is None:  # the function may import it
            value = modules.get(name) or _imported(package, name)
        if type(value) is not ModuleType:
            yield f"{of}.{name}", value
        elif is_users_module(value.__name__) and id(vars(value)) not in seen:
            yield from _named(vars(value), names, seen)


def _names(code: CodeType) -> set[str]:
    inner = (_names(x) for x in code.co_consts if type(x) is CodeType)
    return set(code.co_names).union(*inner)


def _imported(package: Any, name: str) -> Any:
    """Return the module that a function of a package may import as `from .name`, `from ..name`, ..."""
    while package:
        if (found := modules.get(f"{package}.{name}")) is not None:
            return found
        package = str(package).rpartition(".")[0]
    return None


def _function_of(x: Any) -> Any:
    """Return the function of a method or property, or `x` itself."""
    while type(x) in (property, staticmethod, classmethod):
        x = x.fget if type(x) is property else x.__func__
    return x


def _name(x: Any) -> str:
    return f"{_main(x.__module__)}.{x.__qualname__}"


def _main(module: Any) -> str:
    return "__main__" if module == "__mp_main__" else str(module)  # as a spawned process names it
