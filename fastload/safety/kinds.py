"""Kinds of objects: which parts each has, and how a worker's copy of it is created.

Instances of Python classes are copied without running their code, as a fork would: no `__init__`, `__setattr__`,
`__deepcopy__` or `__reduce__`. What holds data in C is copied by its own protocol, `__deepcopy__` or `__reduce_ex__`.
"""

from __future__ import annotations

import copy
import copyreg
import ctypes
import itertools
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from fastload.safety import finalizers
from fastload.safety.files import reopened
from fastload.safety.objects import (
    GENERATORS,
    LEAVES,
    attributes,
    filled,
    is_in_c,
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
        """Return an array, tensor or buffer like `x`, over the worker's copy of its memory."""


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
            if self._names is None or name in self._names:
                yield f".{name}", value

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        y = self._filled(object.__new__(self._cls), x, copier)
        if self._names and all(copier.copy(value) is value for _, value in self.parts(x)):
            copier.memo[id(x)] = y = x
        return y

    def _filled(self, y: Any, x: Any, copier: Copier) -> Any:
        """Give `y` copies of the attributes of `x`, and return it."""

        def mine(name: str, value: Any) -> Any:
            return copier.copy(value) if self._names is None or name in self._names else value

        copier.memo[id(x)] = y
        if not self.any:
            return y
        finalizers.silence(y)
        before, own = own_dict(x), own_dict(y)
        # Plain values first: `__hash__` may need them if the next attribute is a set that holds `x`.
        own.update((name, value) for name, value in before.items() if type(value) in LEAVES)
        for name, value in (*before.items(), *self._of_class.items()):
            if name not in own:
                own[name] = mine(name, value)
        for name in before:
            own[name] = own.pop(name)  # in the order of the original
        for name, member, value in filled(self._slots, x):
            member.__set__(y, mine(name, value))
        return y


class Container(Instance):
    """A list, tuple, dict, set or deque, or an instance of a subclass of one."""

    def __init__(self, cls: type, base: type) -> None:
        super().__init__(cls)
        self._base: Any = base

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
        if getattr(x, "__dict__", None) is x:  # a dict whose keys are its attributes
            y.__dict__ = y
        return self._filled(y, x, copier)


def elements(x: Any, base: Any) -> Iterable[Any]:
    """Return the elements of a container, or keys and values. No code of a subclass of `base` runs."""
    return (
        itertools.chain(base.keys(x), base.values(x))
        if issubclass(base, dict)
        else base.__iter__(x)
    )


def is_flat(x: Any, base: Any) -> bool:
    """Return whether a container holds only plain values. This runs at C speed, because most do."""
    return LEAVES.issuperset(map(type, elements(x, base)))


BASES = (OrderedDict, defaultdict, deque, list, tuple, dict, set, frozenset)


def solid_base(cls: type) -> type:
    """Return the built-in base class that defines the instances' memory layout."""
    kind: type | None = cls
    while kind is not None and kind not in BASES and kind is not object:
        kind = kind.__base__
    return kind or object


def is_plain(cls: type) -> bool:
    """Return whether instances consist only of attributes: no class among the bases holds C data."""
    if any(map(is_in_c, cls.__mro__[:-1])):
        return False
    pointers = len(slots_of(cls)) + (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    return cls.__basicsize__ <= object.__basicsize__ + pointers * ctypes.sizeof(ctypes.c_void_p)


# ---- data in C ----


class Generator(Instance):
    """A random generator, of a library's class or the user's."""

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        yield from super().parts(x)
        if isinstance(x, np.random.Generator | np.random.RandomState):
            bits: Any = x._bit_generator  # type: ignore[union-attr]
            yield "" if type(x) in GENERATORS else ".bit_generator", bits

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        base: Any = next(k for k in GENERATORS if isinstance(x, k))
        if base is torch.Generator:
            return base(x.device).set_state(x.get_state())
        if base is np.random.BitGenerator:
            return copy.deepcopy(x, copier.memo)
        y = base.__new__(self._cls)
        if base is random.Random:
            base.setstate(y, base.getstate(x))
        else:
            base.__init__(y, copier.copy(x._bit_generator))
        if base is np.random.RandomState:
            base.set_state(y, base.get_state(x, legacy=False))
        return self._filled(y, x, copier)


class Memory(Kind):
    """An array, a tensor or a buffer."""

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        yield from ((f".{name}", value) for name, value in own_dict(x).items())
        if type(x) is np.ndarray and x.dtype == object:
            yield from ((f"[{k}]", value) for k, value in enumerate(x.flat))

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        if type(x) is np.ndarray and x.dtype == object:
            y = copier.memo[id(x)] = np.empty_like(x)
            for index in np.ndindex(x.shape):
                y[index] = copier.copy(x[index])
            return y
        for _, part in self.parts(x):
            copier.copy(part)
        return copier.memory(x)


class File(Kind):
    """An open file or tar archive."""

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        return reopened(x)


class InC(Kind):
    """An instance with data in C, which its own protocol copies. `__reduce_ex__` is asked once for all workers."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self._deep = hasattr(cls, "__deepcopy__")
        self._reduced: dict[int, Any] = {}  # by the ids of objects, which the graph keeps alive

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        if self._deep:
            return
        cls: Any = type(x)  # a weak proxy would answer for what it refers to
        reduce: Any = copyreg.dispatch_table.get(cls)
        try:
            reduced = reduce(x) if reduce else cls.__reduce_ex__(x, 4)
            if isinstance(reduced, tuple):
                make, args, state, items, pairs = (*reduced, None, None, None)[:5]
                reduced = make, args, state, [*(items or ())], [*(pairs or ())]
            yield from _parts_of(reduced)
        except Exception as error:
            reduced = error
        self._reduced[id(x)] = reduced

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`. `copy.deepcopy` finds the copies of all parts in the memo, so it runs no code of theirs."""
        if self._deep:
            return copy.deepcopy(x, copier.memo)
        reduced = self._reduced[id(x)]
        if isinstance(reduced, Exception):
            raise reduced
        if isinstance(reduced, str):
            return x
        copier.memo.update((id(part), copier.copy(part)) for _, part in _parts_of(reduced))
        y = copy.deepcopy(types.SimpleNamespace(__reduce_ex__=lambda _: reduced), copier.memo)
        finalizers.silence(y)
        return y


def _parts_of(reduced: Any) -> Iterator[Part]:
    """Yield the parts of what `__reduce_ex__` returned."""
    if isinstance(reduced, tuple):
        _, args, state, items, pairs = reduced
        named = state if type(state) is dict else {}
        held = [*args, *items, *itertools.chain(*pairs), None if named else state]
        yield from (("", part) for part in held)
        yield from ((f".{name}", value) for name, value in named.items())
