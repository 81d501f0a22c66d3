"""Functions and other callables: which parts they have, and how a worker's copy of them is created."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fastload.safety.kinds import Copier, Kind, Part
from fastload.safety.modules import is_importable
from fastload.safety.objects import LEAVES


class Function(Kind):
    """A function. Only one with a closure, default values or attributes can change."""

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        if is_importable(x):
            return
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            yield f" ({name})", cell
        for value in (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()):
            yield " (a default)", value
        yield from ((f".{name}", value) for name, value in vars(x).items())

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        if all(type(part) in LEAVES for _, part in self.parts(x)):
            return x
        cells = tuple(copier.copy(cell) for cell in x.__closure__ or ()) or None
        if id(x) in copier.memo:  # a function may refer to itself through its closure
            return copier.memo[id(x)]
        y = types.FunctionType(x.__code__, x.__globals__, x.__name__, None, cells)
        copier.memo[id(x)] = y
        y.__defaults__ = x.__defaults__ and tuple(map(copier.copy, x.__defaults__))
        own = x.__kwdefaults__
        y.__kwdefaults__ = own and {name: copier.copy(value) for name, value in own.items()}
        # Not the annotations, if a function computes them: that may need names which only type checkers have.
        lazy = getattr(x, "__annotate__", None) is not None
        of_types = "__annotate__" if lazy else "__annotations__", "__type_params__"
        for name in ("__qualname__", "__module__", "__doc__", *of_types):
            if hasattr(x, name):
                setattr(y, name, getattr(x, name))
        vars(y).update((name, copier.copy(value)) for name, value in vars(x).items())
        return y


class Cell(Kind):
    """The variable of a closure."""

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        with suppress(ValueError):  # empty
            yield "", x.cell_contents

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        y = copier.memo[id(x)] = types.CellType()
        for _, contents in self.parts(x):
            y.cell_contents = copier.copy(contents)
        return y


class Bound(Kind):
    """A bound method, a `functools.partial`, or a function under `functools.lru_cache`."""

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        if type(x) is functools.partial:
            yield ".func", x.func
            yield from ((f".args[{k}]", a) for k, a in enumerate(x.args))
            yield from ((f".keywords[{k!r}]", a) for k, a in x.keywords.items())
            yield from ((f".{name}", value) for name, value in vars(x).items())
        elif type(x) is CACHED:
            yield ".__wrapped__", x.__wrapped__
        elif not isinstance(x.__self__, types.ModuleType | type | None):
            yield ".__self__", x.__self__
            if type(x) is types.MethodType:
                yield ".__func__", x.__func__

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`. Each worker begins with an empty cache: cached values may be state."""
        own = copier.copy
        if type(x) is CACHED:
            return functools.lru_cache(**x.cache_parameters())(own(x.__wrapped__))
        if all(own(part) is part for _, part in self.parts(x)):
            return x
        if type(x) is types.MethodType:
            return types.MethodType(own(x.__func__), own(x.__self__))
        if (
            type(x) is not functools.partial
        ):  # of an object in C: `generator.uniform`, `list.append`
            return getattr(own(x.__self__), x.__name__)
        words = {name: own(value) for name, value in x.keywords.items()}
        y = functools.partial(own(x.func), *map(own, x.args), **words)
        vars(y).update((name, own(value)) for name, value in vars(x).items())
        return y


CACHED = type(functools.lru_cache(print))
METHODS = types.MethodType, types.BuiltinMethodType, types.MethodWrapperType
EXACT: dict[type, Kind] = {
    types.FunctionType: Function(),
    types.CellType: Cell(),
    **dict.fromkeys((*METHODS, functools.partial, CACHED), Bound()),
}
