"""Functions and other callables: which parts they have, and how a worker's copy of them is created."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from fastload.isolation.attributes import SCALARS, Copier, Part
from fastload.isolation.kinds import Kind
from fastload.isolation.users import is_importable


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
        for name, value in vars(x).items():
            yield f".{name}", value

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        if all(type(part) in SCALARS for _, part in self.parts(x)):
            return x
        cells = tuple(copier.copy(cell) for cell in x.__closure__ or ()) or None
        y = copier.memo.get(id(x))  # a function may refer to itself through its closure
        if y is not None:
            return y
        y = copier.memo[id(x)] = types.FunctionType(
            x.__code__, x.__globals__, x.__name__, None, cells
        )
        y.__defaults__ = None if x.__defaults__ is None else tuple(map(copier.copy, x.__defaults__))
        if x.__kwdefaults__ is not None:
            y.__kwdefaults__ = {name: copier.copy(v) for name, v in x.__kwdefaults__.items()}
        # Not the annotations, if a function computes them: that may need names which only type checkers have.
        lazy = getattr(x, "__annotate__", None) is not None
        of_types = "__annotate__" if lazy else "__annotations__", "__type_params__"
        for name in ("__qualname__", "__module__", "__doc__", *of_types):
            if hasattr(x, name):
                setattr(y, name, getattr(x, name))
        for name, value in vars(x).items():
            vars(y)[name] = copier.copy(value)
        return y


class Cell(Kind):
    """The variable of a closure."""

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        try:
            yield "", x.cell_contents
        except ValueError:  # empty
            return

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        y = copier.memo[id(x)] = types.CellType()
        for _, contents in self.parts(x):
            y.cell_contents = copier.copy(contents)
        return y


class Method(Kind):
    """A bound method, including one of an object written in C (`generator.uniform`, `list.append`)."""

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        if not isinstance(x.__self__, types.ModuleType | type | None):
            yield ".__self__", x.__self__
        if type(x) is types.MethodType:
            yield ".__func__", x.__func__

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        copies = [copier.copy(part) for _, part in self.parts(x)]
        if all(a is b for a, (_, b) in zip(copies, self.parts(x), strict=True)):
            return x
        if type(x) is types.MethodType:
            return types.MethodType(copies[-1], copier.copy(x.__self__))
        return getattr(copies[0], x.__name__)


class Partial(Kind):
    """A `functools.partial`."""

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        yield ".func", x.func
        yield from ((f".args[{k}]", a) for k, a in enumerate(x.args))
        yield from ((f".keywords[{k!r}]", a) for k, a in x.keywords.items())
        yield from ((f".{name}", value) for name, value in vars(x).items())

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        copies: list[Any] = [copier.copy(part) for _, part in self.parts(x)]
        if all(a is b for a, (_, b) in zip(copies, self.parts(x), strict=True)):
            return x
        func, *args = copies[: 1 + len(x.args)]
        keywords = zip(x.keywords, copies[1 + len(x.args) :], strict=False)
        y = functools.partial(func, *args, **dict(keywords))
        vars(y).update((name, copier.copy(value)) for name, value in vars(x).items())
        return y


class Cached(Kind):
    """A function under `functools.lru_cache`. Each worker begins with an empty cache: cached values may be state."""

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        yield ".__wrapped__", x.__wrapped__

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        return functools.lru_cache(**x.cache_parameters())(copier.copy(x.__wrapped__))
