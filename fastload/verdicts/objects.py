"""Objects, functions and names, looked at without running any code of theirs."""

from __future__ import annotations

import builtins
import copyreg
import functools
import re
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import resolve_name
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from fastload._kit.annotations import annotation_of_result
from fastload.isolation.attributes import filled, slots_of
from fastload.isolation.rules import PER_WORKER, own_dict, shared_class
from fastload.isolation.users import is_importable
from fastload.verdicts import values
from fastload.verdicts.effects import effects_of
from fastload.verdicts.libraries import library
from fastload.verdicts.values import CLASS, Effects, Path

ELEMENTS = 64
"""The search looks at no more elements of a container."""

CACHED = type(functools.lru_cache(print))


@dataclass(frozen=True, eq=False)
class Instance:
    """An object that the search found. `stays`: no worker gets a copy, for a module or a class holds it."""

    x: Any
    path: str
    stays: bool


@dataclass(frozen=True, eq=False)
class Function:
    """A function that samples may call, as a method of `owner` if that is given."""

    function: FunctionType
    owner: type | None
    first: str | None
    held: bool
    """A module or a class holds it, or what it is a method of."""

    @property
    def stays(self) -> bool:
        """Whether no worker gets a copy of it."""
        return self.held or is_importable(self.function)

    def __str__(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def at(self, line: int) -> str:
        """Return the function's name and a line in its file."""
        file = self.function.__code__.co_filename.rpartition("/")[2]
        return f"`{self}` ({file}, line {line})"

    def dotted(self, names: Path, head: str) -> str:
        """Return the full name of what a path of this function leads to."""
        module = "" if head == "import" else f"{self.function.__module__}."
        return module + ".".join(names)

    @property
    def effects(self) -> Effects:
        """What the function does."""
        return effects_of(self.function, self.first)


def hides_state(x: Any) -> bool:
    """Return whether an object of a listed library, in C, can neither be pickled nor be looked into.

    So is a network's BatchNorm in train mode: each call changes it.
    """
    kind, own = type(x), own_dict(x)
    if own.get("training") and "num_batches_tracked" in own.get("_buffers", ()):
        return True
    found, plain = ((of.__reduce_ex__, of.__reduce__) for of in (kind, object))
    if found != plain or kind.__dictoffset__ or hasattr(kind, "__setstate__") or shared_class(kind):
        return False
    known = kind in copyreg.dispatch_table or kind.__module__ in values.WITHOUT_STATE
    return not known and kind.__basicsize__ > 24 and library(kind.__module__) is not None


def is_empty(x: dict[str, Any]) -> bool:
    """Return whether the values of a dict are plain and empty."""
    return not any(type(v) not in LEAVES | {list, dict, set, tuple} or v for v in x.values())


_PLAIN: Any = None, False, 0, 0.0, 0j, "", b"", range(0), slice(0), ..., np.dtype("u1"), torch.uint8
LEAVES = {np.dtype, *map(type, _PLAIN)}

NO_OBJECT: Any = ModuleType | type | types.NoneType  # `cv2.resize` and `torch.add` have these

AT_IMPORT = {"__init_subclass__", "__set_name__", "__annotate_func__"}
"""Methods that run when a class is defined, or when its annotations are asked for."""

OF_A_CLASS = {"__new__", "__class_getitem__"}
"""Methods whose first argument is a class, without a decorator."""

CREATING = values.NAMES["creating"]


def parts_of(x: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, with paths. No code of its class runs."""
    kind = type(x)
    if kind is FunctionType:
        held = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *vars(x).values()]
        if library(x.__globals__.get("__name__")) is not None:  # its code is not read
            held += [cell.cell_contents for cell in x.__closure__ or () if cell != _EMPTY]
        yield from ((path, value) for value in held)
        return
    if issubclass(kind, type | ModuleType | torch.Tensor | np.ndarray):
        return
    if kind.__module__.partition(".")[0] in values.COMPILERS:
        yield from ((path, v) for k, v in list(own_dict(x).items()) if k == "py_func")
        return
    declared = () if shared_class(kind) else vars(kind).get(PER_WORKER)
    if declared is not None:
        yield from ((f"{path}.{k}", v) for k, v in list(own_dict(x).items()) if k in declared)
        return
    if issubclass(kind, dict):
        items = list(dict.items(x))
        for key, value in _sample(items, [type(value) for _, value in items]):
            yield f"{path}[{key!r:.20}]" if type(key) in LEAVES else path, value
            if type(key) not in LEAVES:
                yield f"{path}[...]", key
    else:
        base = next((b for b in (list, tuple, set, frozenset, deque) if issubclass(kind, b)), None)
        if base is not None:
            items = list(base.__iter__(x))
            yield from ((f"{path}[...]", value) for value in _sample(items, map(type, items)))
    for name in _HELD.get(kind, ()):
        yield path, getattr(x, name)
    for name, value in list(own_dict(x).items()):
        yield f"{path}.{name}", value
    for name, _, value in filled(slots_of(kind), x):
        yield f"{path}.{name}", value


_EMPTY = types.CellType()

_HELD: dict[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    types.MethodType: ("__self__",),
    types.BuiltinFunctionType: ("__self__",),
    CACHED: ("__wrapped__",),
}


def _sample(items: list[Any], kinds: Iterable[type]) -> list[Any]:
    """Return some elements, spread evenly, and one at least of each type. Of plain values, none."""
    if len(items) <= ELEMENTS:
        return items
    first: dict[type, int] = {}
    for k, kind in enumerate(kinds):
        if kind not in first:
            first[kind] = k
    if LEAVES.issuperset(first):
        return []
    return [
        items[k] for k in sorted({*first.values(), *range(0, len(items), len(items) // ELEMENTS)})
    ]


METHODS = {FunctionType, classmethod, staticmethod, functools.cached_property}
"""Types of a class's attributes that are functions, and have no state of their own."""


def functions_of(member: Any) -> Iterator[tuple[FunctionType, str | None]]:
    """Yield the functions in a class's attribute, and what their first argument is."""
    first: str | None = "self"
    if type(member) in (staticmethod, classmethod):
        first, member = (None if type(member) is staticmethod else CLASS), member.__func__
    if issubclass(type(member), property):
        first = "self" if type(member) is property else CLASS  # often a property of the class
        functions = [member.fget, member.fset, member.fdel]
        yield from ((f, first) for f in functions if type(f) is FunctionType)
        return
    if type(member) is not FunctionType:  # a decorator's object
        for value in own_dict(member).values():
            yield from functions_of(value) if type(value) is FunctionType else ()
    while type(member) is FunctionType:
        yield member, first
        member = vars(member).get("__wrapped__")


def is_immutable(function: Any) -> bool:
    """Return whether a function's annotation names a result that cannot change."""
    result = annotation_of_result(function)
    return _IMMUTABLE.issuperset(re.findall(r"\w+", f"{getattr(result, '__name__', '')} {result}"))


_IMMUTABLE = {"class", "int", "float", "str", "bool", "bytes", "complex", "None", "NoneType"}
_IMMUTABLE |= {"tuple", "frozenset", "Tuple", "Optional"}


def is_in_c(kind: type) -> bool:
    """Return whether a class is written in C, or Rust: a module of Python may hold it."""
    own = vars(kind).values()
    return any(type(v) in _IN_C and v.__objclass__ is kind for v in own)


_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType)


def is_compiled(module: str) -> bool:
    """Return whether a module is an extension in machine code."""
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None) or ""
    return (
        file.endswith((".so", ".pyd"))
        or type(getattr(loaded, "__loader__", None)).__name__ == "ExtensionFileLoader"
    )


# ---- names ----

MISSING = object()
"""What a name stands for whose module is not imported yet."""


def named(found: Function, path: Path) -> Any:
    """Return what a global, closed-over or imported name stands for, or None if only running code would tell."""
    head, *names = path
    function = found.function
    value: Any = None
    if head == "global":
        value = function.__globals__.get(names[0], getattr(builtins, names[0], None))
    elif head == "free":
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        with suppress(KeyError, ValueError):  # of a function within; or not bound yet
            value = cells[names[0]].cell_contents
    elif names:  # neither an argument nor the instance
        with suppress(ImportError):
            name = resolve_name(names[0], function.__globals__.get("__package__"))
            value = sys.modules.get(name, MISSING)
    for name in names[1:]:
        above = value
        if value is MISSING or (value := attribute(value, name)) is None:
            return MISSING if _loads_late(above, name) else value
    return value


def _loads_late(module: Any, name: str) -> bool:
    """Return whether a module finds what `name` stands for at its first use."""
    kind = type(module)
    if not issubclass(kind, ModuleType) or name in own_dict(module):
        return False
    own = kind.__getattribute__ is not ModuleType.__getattribute__ or hasattr(kind, "__getattr__")
    return own or "__getattr__" in own_dict(module)


def attribute(x: Any, name: str) -> Any:
    """Return an attribute without running code, or None."""
    if type(x) is ModuleType:
        return vars(x).get(name, sys.modules.get(f"{x.__name__}.{name}"))
    if isinstance(x, type):
        kinds = *x.__mro__, *type.mro(type(x))[:-2]  # its metaclass has methods of it, too
        return next((vars(k)[name] for k in kinds if name in vars(k)), None)
    own = own_dict(x)
    held = ("_parameters", "_buffers", "_modules") if issubclass(type(x), torch.nn.Module) else ()
    for each in (own, *(own.get(kind, {}) for kind in held)):
        if name in each:
            return each[name]
    member = next((vars(k)[name] for k in type(x).__mro__ if name in vars(k)), None)
    if type(member) is types.MemberDescriptorType:
        return getattr(x, name, None)
    return member
