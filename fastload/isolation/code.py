"""A search for the module-level objects that the code of a dataset reads by name.

`transform = A.Compose(...)` at the top of a script is not an attribute of the dataset. So copies of the dataset do not
reach it. The search reads the code and finds it before any sample is read. It runs no user code.
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import resolve_name
from itertools import islice
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from fastload.isolation.cached import CACHED, cached_in, namespace, unrouted
from fastload.isolation.classify import kind_of
from fastload.isolation.kinds import ATOM
from fastload.isolation.rules import is_global_generator, own_dict
from fastload.isolation.users import is_importable, is_users_function, is_users_module

FUNCTIONS, OBJECTS, ELEMENTS = 2_000, 10_000, 100
"""The search looks at no more functions and objects, and at no more elements of one container."""


@dataclass(frozen=True, eq=False)
class ModuleObject:
    """An object that user code reads by the name of a module's variable.

    Args:
        module: the module; `module.Class` for an attribute of a class, `module.function` for one of a function.
        name: the variable, or the qualified name of a function that holds objects in its closure or its defaults.
        value: the object, as it was found.
        rebound: the code also assigns the name.
        holder: the class or the dictionary of names in which the name is looked up.
    """

    module: str
    name: str
    value: object
    rebound: bool
    holder: Any = field(default_factory=dict, repr=False)

    def current(self) -> object:
        """Return the object that the name stands for now."""
        return namespace(self.holder).get(self.name, self.value)


def module_level(roots: Iterable[object]) -> list[ModuleObject]:
    """Return the module-level objects that user code reachable from `roots` reads by name.

    Code is reachable if an object below the roots, or its class, holds it, or if reachable code reads it by name.
    User code is neither in the standard library, nor in site-packages, nor fastload's own. Functions, classes, modules
    and values that cannot change are reported only if the code rebinds their name, or if a function holds objects. A
    function under `functools.lru_cache` is reported under each of its names, and as a method.
    """
    search = _Search()
    search.run(roots)
    return sorted(search.found.values(), key=lambda found: (found.module, found.name))


# ---- what has no state ----


def is_stateless(x: Any, depth: int = 6) -> bool:
    """Return whether samples cannot change `x`, or threads may share it: it need be neither copied nor watched."""
    kind: Any = type(x)
    if kind is FunctionType or kind in _TRANSPARENT:
        if not depth or not all(is_stateless(part, depth - 1) for part in held(x)):
            return False
        return kind is not FunctionType or not _rebinds_closure(x)
    return _is_stateless_class(kind) or is_global_generator(x)


@functools.lru_cache(256)
def _is_stateless_class(cls: type) -> bool:
    if cls is object or cls.__module__ in ("_abc", "abc", "datetime", "typing"):
        return True
    if cls.__name__ == "cython_function_or_method":  # of a module, not of an object
        return True
    kind = kind_of(cls)
    # Data may have a position, and a "closed" handle may be opened.
    return kind is ATOM or kind.shared not in (None, "data", "closed")


def _rebinds_closure(function: FunctionType) -> bool:
    closed = set(function.__code__.co_freevars)
    return bool(closed) and any(closed & _read(code).cells for code in _codes(function.__code__))


def held(x: Any, elements: int = ELEMENTS) -> Iterator[Any]:
    """Yield what a function, method, partial, descriptor or container holds. No code of a subclass runs."""
    kind = type(x)  # `isinstance` would ask the object for its `__class__`
    if kind is FunctionType:
        for cell in x.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # the variable is not bound yet
                continue
        yield from (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *vars(x).values())
    elif issubclass(kind, dict):
        for key, value in list(islice(dict.items(x), elements)):
            yield from (value,) if type(key) in _LEAVES else (key, value)
    elif issubclass(kind, list | tuple):
        base: Any = list if issubclass(kind, list) else tuple
        step = max(1, base.__len__(x) // elements)
        yield from base.__getitem__(x, slice(None, None, step))
    elif issubclass(kind, set | frozenset | deque):
        base = next(b for b in (set, frozenset, deque) if issubclass(kind, b))
        yield from list(islice(base.__iter__(x), elements))
    elif issubclass(kind, functools.partial | functools.partialmethod):
        yield from (x.func, *x.args, *x.keywords.values())
    elif kind is CACHED:
        yield x.__wrapped__
        for part in gc.get_referents(x):  # what it has cached, or a dictionary with that
            yield from list(islice(part.values(), elements)) if type(part) is dict else (part,)
    else:
        yield from (getattr(x, name) for name in _HELD.get(kind, ()))


_HELD: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    types.BuiltinFunctionType: ("__self__",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
}


_TRANSPARENT = {tuple, frozenset, functools.partial, *_HELD}
"""These cannot change themselves: only what they hold can."""


# ---- the search ----


class _Search:
    """Searches from objects to the code of their classes, from code to the objects that it names, and so on."""

    def __init__(self) -> None:
        self.found: dict[Hashable, ModuleObject] = {}
        self._todo: list[tuple[Any, bool]] = []
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that their ids stay valid
        self._functions = 0

    def run(self, roots: Iterable[object]) -> None:
        """Fill `found`."""
        for root in roots:
            self._push(root)
        while self._todo and self._functions < FUNCTIONS:
            x, stays = self._todo.pop()
            if type(x) is FunctionType:
                self._functions += 1
                if is_users_function(x):
                    self._read_function(x)
                stays = False
            elif issubclass(type(x), type):
                self._look_at_class(x)
                continue
            else:
                self._push(type(x))
                for part in list(own_dict(x).values()):
                    self._push(part)
            for part in held(x):
                self._push(part, stays=stays)

    def _push(self, x: Any, *, stays: bool = False) -> None:
        """Queue `x` for the search. A function that `stays` belongs to no graph, so its closure is not copied."""
        x = unrouted(x)
        kind = type(x)
        if kind is FunctionType and (stays or is_importable(x)) and is_users_module(x.__module__):
            self._report(x.__module__ or "__main__", x.__qualname__, x, {})
        if kind in _LEAVES or (kind in (dict, list, OrderedDict) and not x):
            return
        if id(x) in self._seen or len(self._seen) >= OBJECTS:
            return
        self._seen[id(x)] = x
        self._todo.append((x, stays))

    def _look_at_class(self, cls: type) -> None:
        if not is_users_module(cls.__module__):
            return
        for base in cls.__bases__:
            self._push(base)
        for name, value in list(vars(cls).items()):
            plain = not name.startswith("__") and not hasattr(type(value), "__get__")
            if plain or cached_in(value) is not None:
                self._report(f"{cls.__module__}.{cls.__qualname__}", name, value, cls)
            self._push(value, stays=True)

    def _read_function(self, function: FunctionType) -> None:
        space = function.__globals__
        place = space.get("__name__") or "__main__"
        closed = [part for part in held(function) if type(part) is ModuleType]
        for code in _codes(function.__code__):
            modules: list[ModuleType | None] = [*closed]
            if _worth_reading(code, space):
                reads = _read(code)
                # Sorted, so that the first of two names is the same in each process.
                for chain in sorted(reads.loads):
                    self._follow(chain, space, place)
                for chain in sorted(reads.stores):
                    self._follow(chain, space, place, stored=True)
                modules += [_imported(level, name, space) for level, name in sorted(reads.imports)]
            for each in modules:
                self._follow_names(each, code.co_names)

    def _follow_names(self, module: ModuleType | None, names: Iterable[str]) -> None:
        """Assume that code uses each of the `names` of a module that it holds in a local variable."""
        if module is None or not is_users_module(module.__name__):
            return
        for name in names:
            value = vars(module).get(name)
            if type(value) is ModuleType and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._follow_names(value, names)
            else:
                self._follow((name,), vars(module), module.__name__)

    def _follow(
        self,
        chain: tuple[str, ...],
        holder: Any,
        place: str,
        *,
        stored: bool = False,
    ) -> None:
        """Follow names from a module to the object that they stand for: `helpers.Factory.generator`."""
        for k, name in enumerate(chain, 1):
            value: Any = namespace(holder).get(name)
            kind = type(value)
            if stored and k == len(chain):
                self._report(place, name, value, holder, rebound=True)
            elif issubclass(kind, ModuleType):
                place, holder = value.__name__, vars(value)
                if not is_users_module(place):
                    return
            elif issubclass(kind, type) and k < len(chain):
                self._push(value)
                owner = next((c for c in value.__mro__ if chain[k] in vars(c)), value)
                place, holder = f"{owner.__module__}.{owner.__qualname__}", owner
                if not is_users_module(owner.__module__):
                    return
            else:
                self._report(place, name, value, holder)
                self._push(value, stays=True)
                if kind is not FunctionType:
                    return
                place, holder = f"{value.__module__}.{value.__qualname__}", vars(value)

    def _report(
        self,
        module: str,
        name: str,
        value: Any,
        holder: Any,
        *,
        rebound: bool = False,
    ) -> None:
        cached = cached_in(value)
        value = value if cached is None else cached
        found = ModuleObject(module, name, value, rebound, holder)
        if rebound:
            self.found.pop(id(value), None)
            self.found[module, name] = found
        elif (module, name) not in self.found and not is_stateless(value):
            # Under the first of its names. A cached function has a router at each of them.
            self.found.setdefault(id(value) if cached is None else (id(holder), name), found)


_LEAVES = {
    *(types.NoneType, bool, int, float, complex, str, bytes, ModuleType, np.ndarray, torch.Tensor),
}


def _imported(level: int, name: str, space: Mapping[str, Any]) -> ModuleType | None:
    try:
        return sys.modules.get(resolve_name("." * level + name, space.get("__package__")))
    except ImportError:  # a relative import in a script
        return None


# ---- reading code ----


@dataclass(frozen=True, slots=True)
class _Reads:
    """The names in a piece of code: `("helpers", "transform")` for `helpers.transform`."""

    loads: frozenset[tuple[str, ...]]
    stores: frozenset[tuple[str, ...]]
    imports: frozenset[tuple[int, str]]
    cells: frozenset[str]
    """Variables of closures that the code rebinds."""


_read_already: weakref.WeakKeyDictionary[CodeType, _Reads] = weakref.WeakKeyDictionary()


def _read(code: CodeType) -> _Reads:
    """Return the names in a piece of code. The first call for it takes some 100 us."""
    known = _read_already.get(code)
    if known is not None:
        return known
    loads, stores = set[tuple[str, ...]](), set[tuple[str, ...]]()
    imports, cells = set[tuple[int, str]](), set[str]()
    chain: tuple[str, ...] = ()
    twice: tuple[str, ...] = ()  # of `Class.count += 1`, the chain for the store
    constants: list[Any] = [0, 0]
    for step in dis.get_instructions(code):
        operation, name = step.opname, step.argval
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = (name,)
            loads.add(chain)
        elif operation in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain = (*chain, name)
            loads.add(chain)
        elif operation == "COPY":
            twice = chain
        elif operation not in ("EXTENDED_ARG", "NOP", "PRECALL"):
            if operation == "STORE_GLOBAL":
                stores.add((name,))
            elif operation == "STORE_ATTR" and (chain or twice):
                stores.add((*(chain or twice), name))
                twice = ()
            elif operation == "STORE_DEREF":
                cells.add(name)
            elif operation == "IMPORT_NAME":
                imports.add((constants[-2], name))
            elif operation.startswith(("LOAD_CONST", "LOAD_SMALL_INT")):
                constants = [constants[-1], name]
            chain = ()
    reads = _Reads(frozenset(loads), frozenset(stores), frozenset(imports), frozenset(cells))
    _read_already[code] = reads
    return reads


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


_ASSIGNING = {dis.opmap["STORE_GLOBAL"], dis.opmap["IMPORT_NAME"]}


def _worth_reading(code: CodeType, space: Mapping[str, Any]) -> bool:
    """Return whether code may name an object or code of the user. Most code names only libraries."""
    if not _ASSIGNING.isdisjoint(code.co_code[::2]):
        return True
    for name in code.co_names:
        value: Any = space.get(name)
        kind = type(value)
        if issubclass(kind, ModuleType | type):
            module = value.__name__ if issubclass(kind, ModuleType) else value.__module__
            if is_users_module(module):
                return True
        elif kind is FunctionType or not is_stateless(value):
            return True
    return False
