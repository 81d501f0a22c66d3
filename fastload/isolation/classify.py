"""The kind of each class, which says how its instances are copied."""

from __future__ import annotations

import array
import copyreg
import enum
import functools
import io
import random
import re
import struct
import sys
import tarfile
import types
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from fastload.isolation.attributes import Copier, Part
from fastload.isolation.callables import Cached, Cell, Function, Method, Partial
from fastload.isolation.files import reopened
from fastload.isolation.kinds import (
    ATOM,
    BASES,
    Container,
    Declared,
    Instance,
    Kind,
    OwnGenerator,
    Protocolled,
    Shared,
    is_plain,
    solid_base,
)
from fastload.isolation.memory import CTYPES
from fastload.isolation.rules import per_worker, refused_class, shared_class


class File(Kind):
    """An open file or tar archive."""

    @staticmethod
    def is_standard(x: Any) -> bool:
        """Return whether `x` is a standard stream of the process."""
        return x in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        return reopened(x)


class Memory(Kind):
    """An array, a tensor or a buffer."""

    memory = True

    def parts(self, x: Any) -> Iterator[Part]:
        """See `Kind`."""
        if type(x) is np.ndarray and x.dtype == object:
            yield from ((f"[{k}]", value) for k, value in enumerate(x.flat))

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        if type(x) is np.ndarray and x.dtype == object:
            y = copier.memo[id(x)] = np.empty_like(x)
            for index in np.ndindex(x.shape):
                y[index] = copier.copy(x[index])
            return y
        return copier.memory(x)


class Refused(Kind):
    """A handle that can neither be copied nor be used by several threads while it is open."""

    shared = "closed"


class TorchGenerator(Kind):
    """A generator of torch's, which has no other protocol in all versions."""

    generator = True

    def copy(self, x: Any, copier: Copier) -> Any:
        """See `Kind`."""
        return torch.Generator(x.device).set_state(x.get_state())


_EXACT: dict[type, Kind] = {
    types.FunctionType: Function(),
    types.CellType: Cell(),
    **dict.fromkeys((types.MethodType, types.BuiltinMethodType, types.MethodWrapperType), Method()),
    functools.partial: Partial(),
    type(functools.lru_cache(print)): Cached(),
    torch.Generator: TorchGenerator(),
    **dict.fromkeys((np.ndarray, torch.Tensor, torch.nn.Parameter), Memory()),
    **dict.fromkeys((torch.UntypedStorage, bytearray, array.array), Memory()),
}

_ATOMS = (
    *(int, float, complex, str, bytes, range, slice, type, enum.Enum, PurePath, re.Pattern),
    *(property, staticmethod, classmethod, struct.Struct, np.generic, np.dtype, np.ufunc),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(torch.finfo, torch.iinfo, torch.jit.ScriptFunction, types.CodeType, types.EllipsisType),
    *(types.GenericAlias, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.MethodDescriptorType, types.ModuleType, types.NoneType, types.NotImplementedType),
    *(types.UnionType, types.WrapperDescriptorType),
)


def kind_of(cls: type) -> Kind:
    """Return the kind of a class."""
    if cls in _EXACT:
        return _EXACT[cls]
    if cls is object:  # a sentinel
        return ATOM
    if (names := per_worker(cls)) is not None:
        return Declared(cls, names)
    if issubclass(cls, _ATOMS):
        return ATOM
    if refused_class(cls):
        return Refused()
    if issubclass(cls, CTYPES):  # multiprocessing makes some of these classes
        return Memory()
    if (why := shared_class(cls)) is not None:
        return Shared(why)
    if issubclass(cls, io.IOBase | tarfile.TarFile) and not issubclass(
        cls, io.BytesIO | io.StringIO
    ):
        return File()
    if cls in BASES:
        return Container(cls, cls)
    if issubclass(cls, _SUBCLASSED) and cls not in _SUBCLASSED:
        own = cls.__mro__[: next(k for k, c in enumerate(cls.__mro__) if c in _SUBCLASSED)]
        return Protocolled(cls) if _has_protocol(cls, own) else OwnGenerator(cls)
    if not _has_protocol(cls, cls.__mro__[:-1]):
        base = solid_base(cls)
        if base in BASES:
            return Container(cls, base)
        if is_plain(cls):
            return Instance(cls)
    return Protocolled(cls)


_SUBCLASSED = (np.random.Generator, np.random.RandomState, random.Random)


def _has_protocol(cls: type, classes: tuple[type, ...]) -> bool:
    """Return whether a Python class, or a base of it among `classes`, defines how it is copied."""
    own = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
    return cls in copyreg.dispatch_table or any(
        name in vars(k) for k in classes if k not in BASES for name in own
    )
