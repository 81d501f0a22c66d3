"""What a name in a function stands for, found without running any code."""

from __future__ import annotations

import builtins
import sys
from contextlib import suppress
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch

from fastload.safety.rules import own_dict

Path = tuple[str, ...]
"""("global", name), ("free", name) of a closure, or ("self",), and names of attributes after it."""

MISSING = object()
"""What a name stands for that only running code would tell."""


def named(function: FunctionType, path: Path) -> Any:
    """Return what a path of a function leads to, or MISSING."""
    head, *names = path or ("",)
    value: Any = MISSING
    if head == "global":
        value = function.__globals__.get(names[0], getattr(builtins, names[0], MISSING))
    elif head == "free":
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        with suppress(KeyError, ValueError):  # not bound yet
            value = cells[names[0]].cell_contents
    for name in names[1:]:
        if value is MISSING:
            break
        value = attribute(value, name)
    return value


def attribute(x: Any, name: str) -> Any:
    """Return an attribute as it is held, or MISSING."""
    if type(x) is ModuleType:
        return vars(x).get(name, sys.modules.get(f"{x.__name__}.{name}", MISSING))
    if isinstance(x, type):
        kinds = *x.__mro__, *type.mro(type(x))[:-2]  # its metaclass has methods of it, too
        return next((vars(k)[name] for k in kinds if name in vars(k)), MISSING)
    for held in held_by(x):
        if name in held:
            return held[name]
    member = next((vars(k)[name] for k in type(x).__mro__ if name in vars(k)), MISSING)
    return getattr(x, name, MISSING) if type(member) is MemberDescriptorType else member


def held_by(x: Any) -> list[dict[str, Any]]:
    """Return the dicts with what an instance holds by name: its attributes, and the parts of a module of torch."""
    kinds = ("_parameters", "_buffers", "_modules") if issubclass(type(x), torch.nn.Module) else ()
    own = own_dict(x)
    return [own, *(own.get(kind, {}) for kind in kinds)]
