"""The kind of each class, which says how its instances are copied."""

from __future__ import annotations

import enum
import io
import re
import struct
import tarfile
import types
from pathlib import PurePath

import numpy as np
import torch

from fastload.isolation import kinds, rules
from fastload.isolation.callables import EXACT
from fastload.isolation.memory import MEMORY

_ATOMS = (
    *(int, float, complex, str, bytes, range, slice, type, enum.Enum, PurePath, re.Pattern),
    *(property, staticmethod, classmethod, struct.Struct, np.generic, np.dtype, np.ufunc),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(torch.finfo, torch.iinfo, torch.jit.ScriptFunction, types.CodeType, types.EllipsisType),
    *(types.GenericAlias, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.MethodDescriptorType, types.ModuleType, types.NoneType, types.NotImplementedType),
    *(types.UnionType, types.WrapperDescriptorType),
)


def kind_of(cls: type) -> kinds.Kind:
    """Return the kind of a class."""
    if cls in EXACT:
        return EXACT[cls]
    if (names := rules.per_worker(cls)) is not None:
        return kinds.Declared(cls, names)
    if cls is object or issubclass(cls, _ATOMS):  # `object()` is a sentinel
        return kinds.ATOM
    if rules.refused_class(cls):
        return kinds.Refused()
    if issubclass(cls, MEMORY):  # multiprocessing makes some of these classes
        return kinds.Memory()
    if (why := rules.shared_class(cls)) is not None:
        return kinds.Kind(why)
    if issubclass(cls, rules.GENERATORS):
        return kinds.Generator(cls)
    in_memory = issubclass(cls, io.BytesIO | io.StringIO)
    if issubclass(cls, io.IOBase | tarfile.TarFile) and not in_memory:
        return kinds.File()
    base = kinds.solid_base(cls)
    if base in kinds.BASES:
        return kinds.Container(cls, base)
    in_c = rules.is_one_of(cls, rules.REDUCED_CLASSES) or not kinds.is_plain(cls)
    return kinds.InC(cls) if in_c else kinds.Instance(cls)
