"""Kinds of objects: which parts each has, and how a worker's copy of it is created.

Instances of Python classes are copied without running their code, as a fork would: no `__init__`, `__setattr__`,
`__deepcopy__` or `__reduce__`. What holds data in C is copied by its own protocol, `__deepcopy__` or `__reduce_ex__`.
"""

from __future__ import annotations

import copy
import copyreg
import ctypes
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from fastload.isolation import finalizers
from fastload.isolation.attributes import SCALARS, Attributes, Part
from fastload.isolation.files import reopened
from fastload.isolation.rules import GENERATORS, is_in_c, own_dict


class Copier(Protocol):
    """Makes one worker's copy of a graph."""

    memo: dict[int, Any]
    """Copies and shared objects, by the id of the original. It can be passed to `copy.deepcopy`."""

    def copy(self, x: Any) -> Any:
        """Return the worker's own `x`, which is `x` itself if that is shared."""

    def is_shallow(self, x: Any) -> bool:
        """Return whether the elements of a container are data, although its attributes are copied."""

    def memory(self, x: Any) -> Any:
        """Return an array, tensor or buffer like `x`, over the worker's copy of its memory."""


class Kind:
    """How objects of one kind are copied. By default, they have no parts and are never copied."""

    generator = False  # whether it generates random numbers

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


# ---- instances of Python classes, and containers ----


class Instance(Kind):
    """An instance of a Python class."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self._cls = cls
        self.attributes = Attributes(cls)
        self.of_library = cls.__module__.partition(".")[0] in sys.stdlib_module_names

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        return self.attributes.parts(x)

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        return self._filled(object.__new__(self._cls), x, copier)

    def _filled(self, y: Any, x: Any, copier: Copier) -> Any:
        copier.memo[id(x)] = y
        if self.attributes.any:
            finalizers.silence(y)
            self.attributes.fill(x, y, copier.copy)
        return y


class Declared(Instance):
    """An instance of a class that names the attributes of which each worker needs its own copy."""

    def __init__(self, cls: type, names: tuple[str, ...]) -> None:
        super().__init__(cls)
        self._names = {f".{name}" for name in names}
        if not names:
            self.shared = "its class is thread-safe"

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        return (part for part in self.attributes.parts(x) if part[0] in self._names)

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`. Share the instance if none of those attributes is copied."""
        y: Any = object.__new__(self._cls)
        copier.memo[id(x)] = y
        mine = {id(value): copier.copy(value) for _, value in self.parts(x)}
        if all(mine[id(value)] is value for _, value in self.parts(x)):
            copier.memo[id(x)] = x
            return x
        self.attributes.fill(x, y, lambda value: mine.get(id(value), value))
        return y


class Container(Instance):
    """A list, tuple, dict, set or deque, or an instance of a subclass of one."""

    def __init__(self, cls: type, base: type) -> None:
        super().__init__(cls)
        self._base: Any = base

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        yield from self.attribute_parts(x)
        if _is_flat(x, self._base):
            return
        if issubclass(self._base, dict):
            for key, value in self._base.items(x):
                if type(value) not in SCALARS:
                    yield f"[{key!r:.40}]" if type(key) in SCALARS else "[...]", value
                if type(key) not in SCALARS:
                    yield ".keys()", key
        else:
            yield from ((f"[{k}]", value) for k, value in enumerate(self._base.__iter__(x)))

    def attribute_parts(self, x: Any) -> Iterator[Part]:
        """Yield only the attributes, and the factory of a defaultdict."""
        if self.attributes.any:
            yield from self.attributes.parts(x)
        if self._base is defaultdict:
            yield ".default_factory", x.default_factory

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        base = self._base
        frozen = base in (tuple, frozenset)
        if self._cls is base and base is not defaultdict and _is_flat(x, base):
            return x if frozen else x.copy()
        own = _itself if copier.is_shallow(x) else copier.copy
        if frozen:
            elements = [own(e) for e in base.__iter__(x)]
            if id(x) in copier.memo:  # an element holds `x`
                return copier.memo[id(x)]
            same = all(a is b for a, b in zip(base.__iter__(x), elements, strict=True))
            if same and not self.attributes.any:
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


def _itself(x: Any) -> Any:
    return x


def _is_flat(x: Any, base: Any) -> bool:
    """Return whether a container holds only plain values. This runs at C speed, because most do."""
    if not SCALARS.issuperset(map(type, base.__iter__(x))):
        return False
    return not issubclass(base, dict) or SCALARS.issuperset(map(type, base.values(x)))


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
    pointers = len(Attributes(cls).slots) + (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    return cls.__basicsize__ <= object.__basicsize__ + pointers * ctypes.sizeof(ctypes.c_void_p)


# ---- data in C ----


class Generator(Instance):
    """A random generator, of a library's class or the user's."""

    generator = True

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
        self._reduced: dict[int, Any] = {}  # by the ids of objects, which the plan keeps alive

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        if self._deep:
            return
        cls: Any = type(x)  # a weak proxy would answer for what it refers to
        try:
            reduce: Any = copyreg.dispatch_table.get(cls)
            reduced = reduce(x) if reduce else cls.__reduce_ex__(x, 4)
            if isinstance(reduced, tuple):
                make, args, state, items, pairs = (*reduced, None, None, None)[:5]
                reduced = make, args, state, [*(items or ())], [*(pairs or ())]
                held = *args, state, *reduced[3], *(each for pair in reduced[4] for each in pair)
                yield from (("", part) for part in held)
        except Exception as error:
            reduced = error
        self._reduced[id(x)] = reduced

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        if self._deep:
            return copy.deepcopy(x, copier.memo)
        reduced = self._reduced[id(x)]
        if isinstance(reduced, Exception):
            raise reduced
        if isinstance(reduced, str):
            return x
        make, args, state, items, pairs = reduced
        own = copier.copy
        mine = (
            tuple(map(own, args)),
            own(state),
            map(own, items),
            (map(own, pair) for pair in pairs),
        )
        y = copy.copy(_Reduced((make, *mine)))
        finalizers.silence(y)
        return y


class _Reduced:
    """What `copy.copy` turns into an object by the result of a protocol."""

    def __init__(self, result: tuple[Any, ...]) -> None:
        self._result = result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self._result
