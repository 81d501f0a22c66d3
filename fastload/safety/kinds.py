"""Kinds of objects: which parts each has, and how a worker's copy of it is created.

Instances of Python classes are copied without running their code, as a fork would: no `__init__`, `__setattr__`,
`__deepcopy__` or `__reduce__`. What holds data in C is copied by its own protocol, `__deepcopy__` or `__reduce_ex__`.
"""

from __future__ import annotations

import functools
import io
import itertools
import random
import sys
import types
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch

from fastload.random.numpy_random import bit_generator_of
from fastload.safety.modules import is_importable, is_users_module
from fastload.safety.objects import (
    GENERATORS,
    LEAVES,
    REDUCED,
    attributes,
    filled,
    is_one_of,
    is_open,
    own_dict,
    slots_of,
)

Part = tuple[str, Any]
"""The expression that reaches a part of an object (`.name`, `[3]`), and the part."""


class Copier(Protocol):
    """Makes one worker's copy of a graph."""

    memo: dict[int, Any]
    """Copies and shared objects, by the id of the original. It can be passed to `copy.deepcopy`."""

    def copy(self, x: Any) -> Any:
        """Return the worker's own `x`, which is `x` itself if that is shared."""

    def memory(self, x: Any) -> Any:
        """Return `x` over the worker's copy of its memory. If it has none, return what its own protocol copies."""


class Kind:
    """How objects of one kind are copied. By default, they have no parts and are never copied."""

    def __init__(self, shared: str | None = None) -> None:
        self.shared = shared  # why workers share all objects of this kind

    def parts(self, x: Any) -> Iterable[Part]:
        """Yield what belongs to `x` and may be state."""
        return ()

    def copy(self, x: Any, copier: Copier) -> Any:
        """Return a copy built from copies of the parts, or `x` itself if it cannot change and no part was copied."""
        return x


class NoCopy(Exception):
    """An object has no copy. The message is the reason, as one clause."""


ATOM = Kind()


class Refused(Kind):
    """A handle that can neither be copied nor be used by several threads while it is open."""


# ---- attributes ----


def _class_generators(cls: type) -> dict[str, Any]:
    """Return the class attributes that are random generators: each copy of an instance gets its own."""
    nearest = {name: value for k in reversed(cls.__mro__) for name, value in vars(k).items()}
    return {name: x for name, x in nearest.items() if issubclass(type(x), GENERATORS)}


# ---- instances of Python classes, and containers ----


class Instance(Kind):
    """An instance of a Python class. If its class declares `names`, all else in it is shared."""

    def __init__(self, cls: type, names: tuple[str, ...] | None = None) -> None:
        super().__init__("its class is thread-safe" if names == () else None)
        self._cls, self._names = cls, names
        self._slots = slots_of(cls)
        self._of_class = _class_generators(cls) if cls.__dictoffset__ else {}
        self.any = bool(cls.__dictoffset__ or self._slots)
        # If it is empty: a sentinel, compared by identity.
        self.is_constant = cls.__module__.partition(".")[0] in sys.stdlib_module_names

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        held = dict(attributes(x, self._slots))
        for name, value in {**held, **self._of_class, **held}.items():
            if self._is_own(name):
                yield f".{name}", value

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        return self._filled(object.__new__(self._cls), x, copier)

    def _filled(self, y: Any, x: Any, copier: Copier) -> Any:
        """Give `y` copies of the attributes of `x`, and return it."""
        copier.memo[id(x)] = y
        if self.any:
            before, own = own_dict(x), own_dict(y)
            own.update({**before, **self._of_class, **before})  # `__hash__` may need plain values
            for name, value in [*own.items()]:
                own[name] = copier.copy(value) if self._is_own(name) else value
            for name, member, value in filled(self._slots, x):
                member.__set__(y, copier.copy(value) if self._is_own(name) else value)
        return y

    def _is_own(self, name: str) -> bool:
        return self._names is None or name in self._names


class Finalized(Instance):
    """An instance with a finalizer, which its copies would run, too."""

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        raise NoCopy("a copy would run its `__del__`, too")


class Container(Instance):
    """A list, tuple, dict, set or deque, or an instance of a subclass of one."""

    def __init__(self, cls: type, base: Any) -> None:
        super().__init__(cls)
        self._base, self.size = base, base.__len__  # a subclass may have a `len()` of its own

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        yield from super().parts(x) if self.any else ()
        if self._base is defaultdict:
            yield ".default_factory", x.default_factory
        if is_flat(x, self._base):
            return
        if issubclass(self._base, dict):
            for key, value in self._base.items(x):
                if type(value) not in LEAVES:
                    yield f"[{key!r:.40}]" if type(key) in LEAVES else "[...]", value
                if type(key) not in LEAVES:
                    yield ".keys()", key
        else:
            yield from ((f"[{k}]", value) for k, value in enumerate(self._base.__iter__(x)))

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        base = self._base
        frozen = base in (tuple, frozenset)
        if self._cls is base and base is not defaultdict and is_flat(x, base):
            return x if frozen else x.copy()
        own = copier.copy
        if frozen:
            elements = [own(e) for e in base.__iter__(x)]
            if id(x) in copier.memo:  # an element holds `x`
                return copier.memo[id(x)]
            same = all(a is b for a, b in zip(base.__iter__(x), elements, strict=True))
            if same and not self.any:
                return x
            return self._filled(base.__new__(self._cls, elements), x, copier)
        y = copier.memo[id(x)] = base.__new__(self._cls)
        if base is deque:
            deque.__init__(y, (), x.maxlen)
        if base is defaultdict:
            y.default_factory = copier.copy(x.default_factory)
        if issubclass(base, dict):
            for key, value in base.items(x):
                base.__setitem__(y, own(key), own(value))
        else:
            (set.update if base is set else base.extend)(y, [own(e) for e in base.__iter__(x)])
        if self._cls.__dictoffset__ and object.__getattribute__(x, "__dict__") is x:
            y.__dict__ = y  # the keys of the dict are its attributes
        return self._filled(y, x, copier)


def elements(x: Any, base: Any) -> Iterable[Any]:
    """Return the elements of a container, or keys and values. No code of a subclass of `base` runs."""
    if issubclass(base, dict):
        return itertools.chain(base.keys(x), base.values(x))
    return base.__iter__(x)  # type: ignore[no-any-return]


def is_flat(x: Any, base: Any) -> bool:
    """Return whether a container holds only plain values. This runs at C speed, because most do."""
    return LEAVES.issuperset(map(type, elements(x, base)))


# ---- functions and other callables ----


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
    """A bound method or a `functools.partial`."""

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        if type(x) is functools.partial:
            yield ".func", x.func
            yield from ((f".args[{k}]", a) for k, a in enumerate(x.args))
            yield from ((f".keywords[{k!r}]", a) for k, a in x.keywords.items())
            yield from ((f".{name}", value) for name, value in vars(x).items())
        elif not isinstance(x.__self__, types.ModuleType | type | None):
            yield ".__self__", x.__self__
            if type(x) is types.MethodType:
                yield ".__func__", x.__func__

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        own = copier.copy
        if all(own(part) is part for _, part in self.parts(x)):
            return x
        if type(x) is types.MethodType:
            return types.MethodType(own(x.__func__), own(x.__self__))
        if type(x) is functools.partial:
            words = {name: own(value) for name, value in x.keywords.items()}
            y = functools.partial(own(x.func), *map(own, x.args), **words)
            vars(y).update((name, own(value)) for name, value in vars(x).items())
            return y
        return getattr(own(x.__self__), x.__name__)  # in C: `generator.uniform`, `list.append`


METHODS = types.MethodType, types.BuiltinMethodType, types.MethodWrapperType
EXACT: dict[type, Kind] = {
    types.FunctionType: Function(),
    types.CellType: Cell(),
    **dict.fromkeys((*METHODS, functools.partial), Bound()),
}


# ---- data in C ----


class Generator(Instance):
    """A random generator, of a library's class or the user's."""

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        yield from super().parts(x)
        if (bits := bit_generator_of(x)) is not x:
            yield "" if type(x) in GENERATORS else ".bit_generator", bits

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        base: Any = next(k for k in GENERATORS if isinstance(x, k))
        if base is torch.Generator:
            return base(x.device).set_state(x.get_state())
        if base is np.random.BitGenerator:
            return copier.memory(x)
        y = base.__new__(self._cls)
        if base is random.Random:
            base.setstate(y, base.getstate(x))
        else:
            base.__init__(y, copier.copy(bit_generator_of(x)))
        if base is np.random.RandomState:
            base.set_state(y, base.get_state(x, legacy=False))
        return self._filled(y, x, copier)


class InC(Kind):
    """An instance with data in C, which its own protocol copies."""

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        cls = type(x)
        users = is_users_module(cls.__module__) and not is_one_of(cls, REDUCED)
        if users or cls is types.SimpleNamespace:  # a library may copy less than its attributes
            yield from ((f".{name}", value) for name, value in attributes(x, slots_of(cls)))

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        if hasattr(type(x), "__next__") and not issubclass(type(x), io.IOBase):
            raise NoCopy("an iterator has one position")
        for _, part in self.parts(x):
            mine = copier.memo.setdefault(id(part), copier.copy(part))
            if type(part) is types.FunctionType and mine is not part:  # it would be shared
                raise NoCopy("it holds a function that has state")
        return copier.memory(x)


class Memory(InC):
    """An array or a tensor."""

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        yield from ((f".{name}", value) for name, value in own_dict(x).items())
        if type(x) is np.ndarray and x.dtype == object:
            yield from ((f"[{k}]", value) for k, value in enumerate(x.flat))


class File(Kind):
    """A file or tar archive. While one worker seeks in it, another reads."""

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        if is_open(x):
            raise NoCopy("an open file has one position")
        return x


class Uncopied(Kind):
    """An object that `copy.deepcopy` would share in silence, or take out of memory that it shares."""

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        raise NoCopy("workers cannot have their own")
