"""What objects are, found without running their code: their attributes, and whether they are state, data or handles.

The rule: every object that code can change is copied for each worker. Data is shared:

- arrays and tensors of more than 16 MiB, those in memory that processes share, and tables;
- containers with more than 1,000 elements;
- containers with 16 elements or more, and with more than 4 MiB below them. Each object counts as 2 KiB.

A container that holds datasets, transforms, functions or generators is never data.
"""

from __future__ import annotations

import array
import ctypes
import enum
import io
import itertools
import random
import re
import tomllib
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path, PurePath
from types import FunctionType, MethodDescriptorType, MethodType, WrapperDescriptorType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fastload.random import numpy_random, python_random

MEMORY_BYTES = 16 * 2**20
"""An array or tensor of more bytes is data. At 1 MiB, a float buffer for one 1024 x 1024 image would be shared."""

ELEMENTS = 1_000
"""A container of more elements is data."""

FEW = 16
"""A container with fewer elements is not data, whatever is below it: a pair of 3 MiB buffers is not."""

BELOW_BYTES, OBJECT_BYTES = 4 * 2**20, 2 * 2**10
"""A container is data if more is below it. Each object counts, beside the bytes of an array or container."""

PER_WORKER = "fastload_per_worker"
"""The class attribute that makes a class thread-safe: names of the attributes of which each worker gets its own copy.

All else in an instance is shared; with no names, the instance itself. It is read from the class's own `__dict__`, so
a subclass, which may add state, does not inherit it.
"""

LEAVES = frozenset({
    *(types.NoneType, bool, int, float, complex, str, bytes, range, slice, types.EllipsisType),
    *(np.dtype, torch.dtype, torch.device, torch.Size, torch.memory_format, object),
})  # fmt: skip
"""The classes of plain values: they have no parts, and cannot change. `object()` is a sentinel."""

CONSTANTS = enum.Enum, PurePath, re.Pattern, np.generic, np.dtype
"""Classes of values that cannot change either, with those derived from them."""

GENERATORS = (
    *(np.random.Generator, np.random.RandomState, np.random.BitGenerator),
    *(random.Random, torch.Generator),
)

UNCOPIED: Any = (
    *(bytearray, array.array, memoryview),
    *(ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union, torch.UntypedStorage),
    *(weakref.ref, *weakref.ProxyTypes, partial, type(lru_cache(print))),
)
"""Classes whose instances `copy.deepcopy` shares in silence, or takes out of memory that others share."""


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_NAMES = {table: frozenset(entry["names"].split()) for table, entry in _TABLE.items()}
REFUSED, REDUCED = _NAMES["refused"], _NAMES["reduced"]
"""Names of classes. Open instances of REFUSED ones are neither copied nor shared; REDUCED ones copy themselves."""


def names(kind: type) -> list[str]:
    """Return the dotted names of a class and its bases."""
    return [f"{k.__module__}.{k.__qualname__}" for k in kind.__mro__[:-1]]


def shared_class(kind: type) -> str | None:
    """Return why all instances of a class are shared, or None. What has a position is no data."""
    found = names(kind)
    for module in (name.partition(".")[0] for name in found):
        if module in _NAMES["modules"]:
            return f"an object of {module}"
    positioned = hasattr(kind, "__next__") or is_one_of(kind, _NAMES["positioned"])
    return "data" if is_one_of(kind, _NAMES["shared"]) and not positioned else None


def is_one_of(kind: type, classes: Set[str]) -> bool:
    """Return whether a class or a base of it is named in `classes`."""
    return not classes.isdisjoint(names(kind))


def is_atom(kind: type) -> bool:
    """Return whether instances cannot change, or are code that all share."""
    if kind in LEAVES or issubclass(kind, CONSTANTS):
        return True
    return is_one_of(kind, _NAMES["atoms"])


def is_open(handle: Any) -> bool:
    """Return whether a handle of a refused class is open. One that does not say counts as open."""
    if hasattr(handle, "isOpened"):
        return bool(handle.isOpened())
    return getattr(handle, "closed", False) is not True


def per_worker(kind: type) -> tuple[str, ...] | None:
    """Return the attributes to copy of a class that declares itself thread-safe, or None for any other class."""
    return () if kind is TensorDataset else vars(kind).get(PER_WORKER)


def is_global_generator(x: Any) -> bool:
    """Return whether Python's, NumPy's or torch's global functions draw from `x`, or from what `x` draws from."""
    numpys: Any = np.random
    numpys_own = numpys.get_bit_generator(), *numpy_random.GLOBAL
    bits = numpy_random.bit_generator_of(x)
    return any(bits is g for g in (python_random.GLOBAL, torch.default_generator, *numpys_own))


HEAP = 1 << 9
"""A bit of `type.__flags__`: a class statement, or similar C code, made the class."""


def has_finalizer(kind: type) -> bool:
    """Return whether a class has a `__del__` in Python. That of some classes does no harm to what a copy shares."""
    found = (k for k in kind.__mro__ if type(vars(k).get("__del__")) is FunctionType)
    return any(names(k)[0] not in _NAMES["harmless"] for k in found)


def is_in_c(kind: type) -> bool:
    """Return whether a class is written in C, or Rust: a module of Python may hold it."""
    own = vars(kind).values()
    in_c = MethodDescriptorType, WrapperDescriptorType
    return any(type(v) in in_c and v.__objclass__ is kind for v in own)


_CODE = (Dataset, nn.Module, FunctionType, MethodType, partial, io.IOBase, *GENERATORS)


def is_code(kind: type) -> bool:
    """Return whether a container with instances of a class is never data."""
    if issubclass(kind, _CODE):
        return True
    if "torch_geometric.data.data.BaseData" in names(kind):  # it is called to iterate
        return False
    return not issubclass(kind, torch.Tensor | type) and any(
        "__call__" in vars(k) for k in kind.__mro__[:-1] if k.__flags__ & HEAP
    )


def holds_code(container: Any) -> bool:
    """Return whether a container holds code, so that it is never data.

    It looks at up to 1,000 elements, evenly spaced if possible. Of each container or instance among them it looks at 16
    parts, and at 16 parts of each of those.
    """
    level, many = [container], ELEMENTS
    for _ in range(3):
        elements = [e for x in level for e in some(x, many)]
        kinds = set(map(type, elements))
        if any(map(is_code, kinds)):
            return True
        nested = {k for k in kinds if k in _NESTED or k.__dictoffset__}
        found = (e for e in elements if type(e) in nested)
        level = [
            e if type(e) in _NESTED else own_dict(e) for e in itertools.islice(found, ELEMENTS)
        ]
        many = FEW
    return False


_NESTED = {list, tuple, dict, set, frozenset}


def own_dict(x: Any) -> dict[str, Any]:
    """Return the `__dict__` of an instance, or an empty dict. No code of its class runs."""
    try:
        own = object.__getattribute__(x, "__dict__")
    except AttributeError:  # it has none, or its class is written in C
        return {}
    return own if type(own) is dict else {}


Slots = list[tuple[str, types.MemberDescriptorType]]


def slots_of(cls: type) -> Slots:
    """Return the slots of a class's instances, by name: those of Python's classes, not of C code."""
    return [
        (name, member)
        for k in cls.__mro__
        for name, member in vars(k).items()
        if type(member) is types.MemberDescriptorType
        and member.__objclass__ is k
        and k.__flags__ & HEAP
    ]


def filled(slots: Slots, x: Any) -> Iterator[tuple[str, types.MemberDescriptorType, Any]]:
    """Yield the slots that have a value in an instance: name, member and value."""
    for name, member in slots:
        with suppress(AttributeError):
            yield name, member, member.__get__(x)


def attributes(x: Any, slots: Slots) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an instance: name and value. No code of its class runs."""
    yield from own_dict(x).copy().items()
    yield from ((name, value) for name, _, value in filled(slots, x))


def some(container: Any, count: int) -> Iterable[Any]:
    """Return about `count` elements. No code of a subclass runs."""
    kind: Any = solid_base(type(container))
    if kind in (list, tuple):
        step = max(1, kind.__len__(container) // count)
        return kind.__getitem__(container, slice(None, None, step))  # type: ignore[no-any-return]
    held = dict.values(container) if issubclass(kind, dict) else kind.__iter__(container)
    return itertools.islice(held, count)


# ---- classes ----

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
