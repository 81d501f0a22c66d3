"""Kinds of objects: which parts each has, and how a worker's copy of it is created.

Instances of Python classes are copied without running their code, as a fork would: no `__init__`, `__setattr__` or
`__getattr__`. Only a class that defines how it is copied runs code: its `__deepcopy__`, `__reduce__`, `__getstate__`,
`__setstate__`, or its function in `copyreg`.
"""

from __future__ import annotations

import copyreg
import ctypes
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from fastload.isolation import finalizers
from fastload.isolation.attributes import SCALARS, Attributes, Copier, Part, class_state
from fastload.isolation.memory import MEMORY
from fastload.isolation.rules import GENERATORS, own_dict


class Kind:
    """How objects of one kind are copied. By default, they have no parts and are never copied."""

    shared: str | None = None  # why workers share all objects of this kind
    generator = False  # whether it generates random numbers
    memory = False  # whether it is an array, a tensor or a buffer
    copies_itself = False  # whether a method of its class copies all below it
    plain: Kind | None = None  # how it can be copied without its protocol

    def parts(self, x: Any) -> Iterable[Part]:
        """Yield what belongs to `x` and may be state."""
        return ()

    def copy(self, x: Any, copier: Copier) -> Any:
        """Return a copy built from copies of the parts, or `x` itself if it cannot change and no part was copied."""
        return x


ATOM = Kind()


class Shared(Kind):
    """An object that all workers share."""

    def __init__(self, why: str) -> None:
        self.shared = why


# ---- containers ----


class Container(Kind):
    """A list, tuple, dict, set or deque, or an instance of a subclass of one."""

    def __init__(self, cls: type, base: type) -> None:
        self._cls, self._base = cls, base
        self.attributes = None if cls is base else Attributes(cls)

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
            for k, value in enumerate(self._base.__iter__(x)):  # type: ignore[attr-defined]
                if type(value) not in SCALARS:
                    yield f"[{k}]", value

    def attribute_parts(self, x: Any) -> Iterator[Part]:
        """Yield only the attributes, and the factory of a defaultdict."""
        if self.attributes is not None:
            for name, value in self.attributes.items(x):
                yield f".{name}", value
        if self._base is defaultdict:
            yield ".default_factory", x.default_factory

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        base: Any = self._base
        if self.attributes is None and base is not defaultdict and _is_flat(x, base):
            return x if base in (tuple, frozenset) else x.copy()
        one = _itself if copier.is_shallow(x) else copier.copy
        if base in (tuple, frozenset):
            elements = [e if type(e) in SCALARS else one(e) for e in base.__iter__(x)]
            y = copier.memo.get(id(x))  # an element may hold `x`
            if y is None:
                changed = any(a is not b for a, b in zip(base.__iter__(x), elements, strict=True))
                if not changed and not (self.attributes and self.attributes.any):
                    return x
                y = copier.memo[id(x)] = base.__new__(self._cls, elements)
        elif base is set:
            y = copier.memo[id(x)] = base.__new__(self._cls)
            set.update(y, [e if type(e) in SCALARS else one(e) for e in set.__iter__(x)])
        elif issubclass(base, dict):
            y = copier.memo[id(x)] = base.__new__(self._cls)
            if base is defaultdict:
                y.default_factory = copier.copy(x.default_factory)
            put = base.__setitem__
            for key, value in base.items(x):
                key = key if type(key) in SCALARS else one(key)
                put(y, key, value if type(value) in SCALARS else one(value))
        else:
            y = copier.memo[id(x)] = base.__new__(self._cls)
            if base is deque:
                deque.__init__(y, (), x.maxlen)
            base.extend(y, [e if type(e) in SCALARS else one(e) for e in base.__iter__(x)])
        if self.attributes is not None:
            finalizers.silence(y)
            if getattr(x, "__dict__", None) is x:  # a dict whose keys are its attributes
                y.__dict__ = y
            else:
                self.attributes.fill(x, y, copier)
        return y


def _itself(x: Any) -> Any:
    return x


def _is_flat(x: Any, base: Any) -> bool:
    """Return whether a container holds only plain values. This runs at C speed, because most do."""
    if not SCALARS.issuperset(map(type, base.__iter__(x))):
        return False
    return not issubclass(base, dict) or SCALARS.issuperset(map(type, base.values(x)))


# ---- instances ----


class Instance(Kind):
    """An instance of a Python class."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self.attributes = Attributes(cls)

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        return ((f".{name}", value) for name, value in self.attributes.items(x))

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        y: Any = object.__new__(self._cls)
        copier.memo[id(x)] = y
        finalizers.silence(y)
        self.attributes.fill(x, y, copier)
        return y


class Declared(Kind):
    """An instance of a class that names the attributes of which each worker needs its own copy."""

    def __init__(self, cls: type, names: tuple[str, ...]) -> None:
        self._cls = cls
        self._names = names
        self._attributes = Attributes(cls)
        if not names:
            self.shared = "its class is thread-safe"

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        own = dict(self._attributes.items(x))
        return ((f".{name}", own[name]) for name in self._names if name in own)

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`. Share the instance if none of those attributes is copied."""
        y: Any = object.__new__(self._cls)
        copier.memo[id(x)] = y
        mine = {part[1:]: copier.copy(value) for part, value in self.parts(x)}
        if all(mine[part[1:]] is value for part, value in self.parts(x)):
            copier.memo[id(x)] = y = x
        else:
            self._attributes.put(y, {**dict(self._attributes.items(x)), **mine})
        return y


class Protocolled(Kind):
    """An instance of a class that defines how it is copied, or of one written in C."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        base = solid_base(cls)
        self._held = Container(cls, base) if base in BASES else Instance(cls)
        self.plain = Instance(cls) if is_plain(cls) else None
        self.generator = issubclass(cls, GENERATORS)
        self.memory = issubclass(cls, MEMORY)
        self.copies_itself = hasattr(cls, "__deepcopy__")

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`. Yield the objects that the class's copy protocol returns, or those that `__deepcopy__` copies."""
        if self.copies_itself:
            yield from self._held.parts(x)
            return
        try:
            reduced = _reduced(x)
        except Exception:  # it cannot be copied: copying tells
            if self.plain is not None:
                yield from self.plain.parts(x)
            return
        if isinstance(reduced, str):
            return
        _, args, state, items, pairs, _ = reduced
        yield from (("", a) for a in (*args, *items, *(v for pair in pairs for v in pair)))
        states = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for each in states:
            if type(each) is dict:
                yield from ((f".{name}", value) for name, value in each.items())
            else:
                yield "", each

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`. If the protocol of a Python class raises, copy the instance without it, as a fork would."""
        try:
            if self.copies_itself:
                y = x.__deepcopy__(copier.memo)
                if y is not x:
                    copier.memo[id(x)] = y
            else:
                reduced = _reduced(x)
                y = x if isinstance(reduced, str) else self._rebuilt(x, reduced, copier)
        except RecursionError:
            raise
        except Exception:
            if self.plain is None:
                raise
            return self.plain.copy(x, copier)
        if y is not x:
            finalizers.silence(y)
        return y

    def _rebuilt(self, x: Any, reduced: Reduced, copier: Copier) -> Any:
        make, args, state, items, pairs, setter = reduced
        y = copier.memo[id(x)] = make(*[copier.copy(a) for a in args])
        if state is not None:
            self._set_state(y, _copied_state(state, copier), setter)
        for item in items:
            y.append(copier.copy(item))
        for key, value in pairs:
            y[copier.copy(key)] = copier.copy(value)
        if own_dict(y):
            for name, value in class_state(self._cls).items():
                own_dict(y).setdefault(name, copier.copy(value))
        return y

    def _set_state(self, y: Any, state: Any, setter: Any) -> None:
        if setter is not None:
            setter(y, state)
        elif hasattr(type(y), "__setstate__"):
            y.__setstate__(state)
        else:
            own, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
            own_dict(y).update(own or {})
            for name, value in (slots or {}).items():
                object.__setattr__(y, name, value)


class OwnGenerator(Instance):
    """A random generator of a user's class. The protocol of its base would forget that class."""

    generator = True

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        yield from super().parts(x)
        if isinstance(x, np.random.Generator):
            yield ".bit_generator", x.bit_generator
        elif isinstance(x, np.random.RandomState):
            yield "._bit_generator", x._bit_generator

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        base: Any = next(k for k in GENERATORS if isinstance(x, k))
        y = copier.memo[id(x)] = base.__new__(self._cls)
        if base is np.random.Generator:
            base.__init__(y, copier.copy(x.bit_generator))
        elif base is np.random.RandomState:
            base.__init__(y, copier.copy(x._bit_generator))
            base.set_state(y, base.get_state(x, legacy=False))
        else:
            base.setstate(y, base.getstate(x))
        self.attributes.fill(x, y, copier)
        return y


Reduced = tuple[Any, Any, Any, Any, Any, Any]


def _reduced(x: Any) -> str | Reduced:
    cls: Any = type(x)  # a weak proxy would answer for what it refers to
    reducer = copyreg.dispatch_table.get(cls)
    if cls.__module__ == "itertools":  # it warns from Python 3.12 on
        with warnings.catch_warnings():  # not for every object: all threads have the same filters
            warnings.simplefilter("ignore", DeprecationWarning)
            reduced: Any = cls.__reduce_ex__(x, 4)
    else:
        reduced = reducer(x) if reducer else cls.__reduce_ex__(x, 4)
    if isinstance(reduced, str):
        return reduced
    make, args, state, items, pairs, setter = (*reduced, None, None, None, None)[:6]
    return make, args, state, list(items or ()), list(pairs or ()), setter


def _copied_state(state: Any, copier: Copier) -> Any:
    """Return a copy of the state from an object's protocol. It bypasses the memo: the state may be temporary."""
    if type(state) is dict:
        return {key: copier.copy(value) for key, value in state.items()}
    if type(state) is tuple:
        return tuple(_copied_state(part, copier) for part in state)
    return copier.copy(state)


BASES = (OrderedDict, defaultdict, deque, list, tuple, dict, set, frozenset)


def solid_base(cls: type) -> type:
    """Return the built-in base class that defines the instances' memory layout."""
    kind: type | None = cls
    while kind is not None and kind not in BASES and kind is not object:
        kind = kind.__base__
    return kind or object


def is_plain(cls: type) -> bool:
    """Return whether instances consist only of attributes: no class among the bases holds C data."""
    if solid_base(cls) is not object:
        return False
    slots = Attributes(cls).slots
    pointers = len(slots) + (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    return cls.__basicsize__ <= object.__basicsize__ + pointers * ctypes.sizeof(ctypes.c_void_p)
