"""Which changes that code makes reach an object that threads share."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from fastload.isolation.memory import IN_SHARED_MEMORY
from fastload.isolation.plan import Plan
from fastload.isolation.rules import own_dict
from fastload.verdicts import objects, values
from fastload.verdicts.effects import defaults_of
from fastload.verdicts.findings import Finding, finding
from fastload.verdicts.libraries import library
from fastload.verdicts.objects import Function, attribute, named
from fastload.verdicts.reach import Reach
from fastload.verdicts.values import ANY, CLASS, ELEMENT, SLICE, Path

_FEW = 8
"""The elements of a container that a path to an element is followed to."""


@dataclass(frozen=True)
class _Trail:
    """An object that a path leads to. `why`: a clause that says why threads share it, or None if each has its own."""

    x: Any
    why: str | None
    name: str

    def to(self, x: Any, step: str, why: str | None = None) -> _Trail:
        return _Trail(x, self.why or why, self.name + step)


_UNKNOWN = _Trail(object(), None, "")
"""Leads to some object that cannot be known."""


class Changes:
    """Tells which changes that the functions make reach an object that threads share."""

    def __init__(self, reach: Reach, plan: Plan, *, shares_all: bool) -> None:
        self._reach, self._plan, self._shares_all = reach, plan, shares_all
        self._trails: dict[tuple[Function, Path], list[_Trail]] = {}

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each change of an object that threads share."""
        for function in self._reach.functions:
            for (path, how), line in function.effects.changes.items():
                if found := self._of_change(function, path, how, function.at(line)):
                    yield found
        if any(issubclass(type(x), torch.Tensor) for x in self._exposed):
            for name in (p for p in self._reach.in_place if "._modules[" not in p):
                yield finding("works in place", path=name)

    def _of_change(self, function: Function, path: Path, how: str, user: str) -> Finding | None:
        if how in ("=", "=constant"):
            if path[0] != "global" and not function.stays:
                return None
            name = function.dotted(path[1:2], path[0])
            return finding("variable assigned", user=user, name=name, proven=how == "=")
        passed = path[0] == values.PASSED
        is_name = len(path) - passed == 2 and path[passed] != "self"  # of a variable or a default
        if path[-1] == "__dict__" and not is_name:
            path, how = path[:-1], ".="
        for trail in self._follow(function, path[passed:]):
            computed = how == "op=" and type(attribute(trail.x, path[-1])) is property
            if trail is _UNKNOWN or computed:  # `n = image.size; n += 1`
                if any(_fits(x, how) and _has(x, how) for x in self._exposed):
                    return finding("something changed", user=user, how=how)
                return None
            if path[-1] == SLICE and issubclass(type(trail.x), _CONTAINERS):
                continue  # a new container
            if trail.why is not None and _fits(trail.x, how):
                return finding(
                    "changed",
                    path=trail.name,
                    kind=kind_of(trail.x),
                    why=trail.why,
                    may_be="may be" if passed else "is",
                    user=user,
                    proven=not passed and trail.why != _OWN_COPY,
                )
        return None

    @cached_property
    def _exposed(self) -> list[Any]:
        """One object of each kind of data that threads share, if samples could change it or what it holds."""
        shared = [self._plan.nodes[i].x for i in self._plan.shared]
        shared += [x.x for many in self._reach.instances.values() for x in many if x.stays]
        found = [each for x in shared for each in _below(x)]
        for x in {id(x): x for x in self._escaped()}.values():
            held = own_dict(x).values() if _is_users(x) else ()
            found += [
                x,
                *_below(x),
                *(each for each in held if issubclass(type(each), _CONTAINERS)),
            ]
        return [*{type(each): each for each in reversed(found)}.values()]

    def _escaped(self) -> Iterator[Any]:
        """Yield shared objects that code returns, stores, or passes to code of the user, as by `map` and `partial`."""
        for found in self._reach.at_top:
            if type(found.x) is partial:
                yield from (*found.x.args, *found.x.keywords.values())
        for function in self._reach.functions:
            for called, paths in function.effects.escapes.items():
                theirs = self._follow(function, called) if called else []
                trails = [trail for path in paths for trail in self._follow(function, path)]
                passed = [trail for trail in trails if type(trail.x) is FunctionType]
                if not theirs or not all(_is_foreign(trail.x) for trail in theirs + passed):
                    yield from (trail.x for trail in trails if trail.why is not None)

    @cached_property
    def _kept(self) -> set[str]:
        """The attributes that samples fill with an object from elsewhere."""
        return set().union(*(function.effects.kept for function in self._reach.functions))

    # ---- following a path to objects ----

    def _follow(self, function: Function, path: Path) -> list[_Trail]:
        """Return the trails of a path."""
        key = function, path
        if key not in self._trails:
            if path[0] == values.CALL:
                self._trails[key] = [*self._returned(function, path[1:])]
            else:
                self._trails[key] = self._steps(*self._heads(function, path))
        return self._trails[key]

    def _steps(self, trails: list[_Trail], steps: Path) -> list[_Trail]:
        for step in steps:
            trails = [after for trail in trails for after in self._step(trail, step)]
        return trails

    def _heads(self, function: Function, path: Path) -> tuple[list[_Trail], Path]:
        head = path[0]
        if path == ANY:
            return [_UNKNOWN], ()
        if head == "self":
            return self._instances(function), path[1:]
        if head == "default":
            stays = "an argument's default" if function.stays else None
            value = defaults_of(function.function).get(path[1])
            return [_Trail(value, stays, f"{function}.{path[1]}")], path[2:]
        # The longest beginning of the path that leads through modules and classes.
        x, k = named(function, path[:2]), 2
        if x is None or x is objects.MISSING:
            return [], ()
        while k < len(path) and type(x) is ModuleType:
            x, k = attribute(x, path[k]), k + 1
        held, place = head != "free" or function.stays, function.dotted(path[1:k], head)
        return [_Trail(x, self._why(x, held), place)], path[k:]

    def _instances(self, function: Function) -> list[_Trail]:
        owner = function.owner
        creates = function.function.__code__.co_name in objects.CREATING
        found = [] if creates or owner is None else self._reach.instances.get(owner, [])
        trails = [_Trail(each.x, self._why(each.x, each.stays), each.path) for each in found]
        return trails or [_Trail(_New(owner), None, getattr(owner, "__qualname__", "?"))]

    def _why(self, x: Any, stays: bool = False) -> str | None:
        """Return a clause that says why threads share an object, or None. `stays`: a module holds it."""
        if stays:
            return "at module level"
        if self._shares_all:
            return "which copy_dataset=False lets threads share"
        if id(x) in self._plan.weights:
            return "whose memory threads share"
        users = (k for k in type(x).__mro__ if library(k.__module__) is None)
        if any(not _COPIES.isdisjoint(vars(k)) for k in users):
            return _OWN_COPY
        shared = self._plan.shared.get(id(x), IN_SHARED_MEMORY)  # that, processes share as well
        return None if shared == IN_SHARED_MEMORY else "which threads share"

    def _step(self, trail: _Trail, step: str) -> Iterator[_Trail]:
        x = trail.x
        if trail is _UNKNOWN or step in (SLICE, "__dict__"):
            yield trail
        elif step in (values.COPY, values.ARRAY):
            if issubclass(type(x), _ARRAYS) is (step == values.ARRAY):
                yield trail
        elif step == CLASS:
            cls = x.cls if type(x) is _New else type(x)
            yield _Trail(cls, "a class", f"{cls.__module__}.{cls.__qualname__}")
        elif step == ELEMENT:
            yield from self._elements(trail)
        elif issubclass(type(x), _ARRAYS):
            yield trail  # `x.T` and `x.data` are views
        elif type(x) is _New:
            value = attribute(x.cls, step)
            if value is None and step in self._kept:
                yield _UNKNOWN
            elif value is not None and not hasattr(type(value), "__get__"):
                yield trail.to(value, f".{step}", "an attribute of the class")
        else:
            value = attribute(x, step)
            computed = step in self._kept or hasattr(type(x), "__getattr__")
            if type(value) is property or (value is None and computed):
                yield trail if library(type(x).__module__) is not None else _UNKNOWN
            elif value is not None:
                of_class = not isinstance(x, type | ModuleType) and step not in own_dict(x)
                held = of_class and not hasattr(type(value), "__get__")
                why = "an attribute of the class" if held else self._why(value)
                yield trail.to(value, f".{step}", why)

    def _elements(self, trail: _Trail) -> Iterator[_Trail]:
        x = trail.x
        if issubclass(type(x), _ARRAYS):
            yield trail  # a view
        elif issubclass(type(x), _CONTAINERS):
            for value in _members(x):
                if type(value) not in objects.LEAVES:
                    yield trail.to(value, "[...]", self._why(value))
        elif library(type(x).__module__) is None:
            yield _UNKNOWN
        elif type(x).__module__.startswith("torch.utils.data."):  # as a Subset or TensorDataset
            for value in own_dict(x).values():
                yield from self._elements(trail.to(value, "[...]", self._why(value)))

    def _returned(self, function: Function, called: Path) -> Iterator[_Trail]:
        """Yield what a call may return, apart from its arguments, which are paths of their own."""
        for k in range(2, len(called) if called[0] != values.CALL else 0):
            for trail in self._follow(function, called[:k]):
                # An attribute of a new instance may be one of its class.
                if issubclass(type(trail.x), type) and not _is_foreign(trail.x):
                    yield from self._steps([_Trail(_New(trail.x), None, trail.name)], called[k:])
        for trail in self._follow(function, called):
            x = trail.x
            if x is logging.getLogger:
                yield _Trail(logging.root, "which all threads share", "logging.getLogger()")
            # A class returns a new object.
            if type(x) is objects.CACHED or not (_is_foreign(x) or issubclass(type(x), type)):
                yield _UNKNOWN
                return
        if called[-1] in values.RETURN_NEW | values.SHALLOW:
            return
        if called[0] != values.CALL and len(called) > 2:
            # A method: its result may be a part of its object.
            for trail in self._follow(function, called[:-1]):
                if called[-1] in _OF_WEIGHTS:
                    weights = [self._plan.nodes[i].x for i in self._plan.weights]
                    yield from (trail.to(x, f".{called[-1]}()", self._why(x)) for x in weights)
                elif issubclass(type(trail.x), _ARRAYS):
                    yield trail
                elif issubclass(type(trail.x), _CONTAINERS):
                    yield from self._elements(trail)


class _New:
    """Stands for the instances of a class that samples create."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls


_ARRAYS: Any = np.ndarray | torch.Tensor
_CONTAINERS: Any = list | dict | set | deque | tuple
VALUES: Any = _ARRAYS | tuple | frozenset | FunctionType | MethodType


_COPIES = {"__deepcopy__", "__reduce__", "__reduce_ex__"}
_OWN_COPY = "whose own methods copy it, and may share it"

_OF_WEIGHTS = {"parameters", "named_parameters", "get_parameter", "state_dict"}
"""Methods of a model that return its weights."""


def _members(x: Any) -> list[Any]:
    base: Any = next(b for b in (list, dict, set, deque, tuple) if issubclass(type(x), b))
    some = list(itertools.islice(dict.values(x) if base is dict else base.__iter__(x), _FEW))
    if type(x) is defaultdict and x.default_factory in (list, dict, set, deque):
        some.append(x.default_factory())  # what it will hold, though it is empty yet
    if base in (list, tuple) and base.__len__(x) > _FEW:
        some += base.__getitem__(x, slice(_FEW, None, max(1, base.__len__(x) // _FEW)))
    return some


def _below(x: Any, depth: int = 3) -> Iterator[Any]:
    """Yield an array or an instance, and what it or a container holds, some levels deep."""
    held = issubclass(type(x), _CONTAINERS)
    if issubclass(type(x), _ARRAYS) or _is_users(x):
        yield x
    for each in (_members(x) if held else own_dict(x).values()) if depth else ():
        if held and issubclass(type(each), _CONTAINERS):
            yield each
        yield from _below(each, depth - 1)


def _is_foreign(x: Any) -> bool:
    """Return whether what is called is code of a library."""
    owner = x if isinstance(x, type) else type(x)
    module = x.__globals__.get("__name__") if type(x) is FunctionType else owner.__module__
    return x is not _UNKNOWN.x and library(module) is not None


def _is_users(x: Any) -> bool:
    """Return whether an object is an instance of a class of the user, whose attributes can be assigned."""
    kind = type(x)
    return not issubclass(kind, ModuleType | type) and library(kind.__module__) is None


def _has(x: Any, how: str) -> bool:
    """Return whether an object has the attribute that the code assigns, if it assigns one."""
    name = how[1:-1] if how.startswith(".") and how.endswith("=") else ""
    return not name or name in own_dict(x) or any(name in vars(k) for k in type(x).__mro__)


def _fits(x: Any, how: str) -> bool:
    """Return whether what the code does can change an object."""
    kind = type(x)
    if how == "['']=":
        how = "[]=" if issubclass(kind, dict) or not issubclass(kind, _ARRAYS | _CONTAINERS) else ""
    in_place = how in ("op=", "[]=", "out=", "inplace=") or (how.endswith("_") and how[:1] != "_")
    of_one = issubclass(kind, threading.local) or kind.__module__.startswith("multiprocessing.")
    if of_one or kind is _New or kind in objects.LEAVES:
        return False
    if how.startswith(".") and how.endswith("="):
        return True  # an attribute is assigned
    if values.SETTER.match(how) and how not in values.CHANGING:
        owner = next((k.__module__ for k in kind.__mro__ if how in vars(k)), "")
        return library(owner) is not None and owner.partition(".")[0] not in values.TABLES
    if issubclass(kind, torch.Tensor):
        return in_place
    if issubclass(kind, np.ndarray):
        return x.flags.writeable and (
            in_place or how in ("fill", "sort", "put", "itemset", "partition", "shuffle")
        )
    if issubclass(kind, tuple | frozenset | str | ModuleType | type | FunctionType):
        return False
    if issubclass(kind, _CONTAINERS):
        return how in ("op=", "[]=") if in_place else attribute(kind, how) is not None
    return how in ("op=", "[]=", "inplace=", "out=") or hasattr(kind, how)


def kind_of(x: Any) -> str:
    """Return what an object is, for a message."""
    if isinstance(x, type):
        return "class"
    return "module" if type(x) is ModuleType else type(x).__qualname__
