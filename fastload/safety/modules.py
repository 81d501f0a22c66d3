"""Tells the user's code from that of libraries, and finds random generators that the user's modules hold.

The user's code is neither in the standard library, nor installed, nor fastload's own.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fastload.safety.objects import GENERATORS, is_global_generator

_LIBRARIES = {"fastload", "numpy", "torch", "torchvision"}  # wherever they are installed


def is_users_module(name: str | None) -> bool:
    """Return whether the module of this name is the user's."""
    top = (name or "__main__").partition(".")[0]
    if top in _LIBRARIES or top == "__main__":
        return top == "__main__"
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    return top not in sys.stdlib_module_names if file is None else _is_users_file(file)


def is_importable(function: Any) -> bool:
    """Return whether a function can be imported: its module holds it under its name."""
    found: Any = sys.modules.get(function.__module__ or "")
    for part in function.__qualname__.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return getattr(found, "__func__", found) is function  # of a static method, too


def generators_of_modules() -> list[tuple[str, Any]]:
    """Return the generators in the user's modules and their classes, each with the first path, in order of paths."""
    found: dict[int, tuple[str, Any]] = {}
    loaded = sorted(sys.modules.copy())  # other threads may import
    users = {top: is_users_module(top) for top in {name.partition(".")[0] for name in loaded}}
    for name in loaded:
        module = sys.modules.get(name) if users[name.partition(".")[0]] else None
        if type(module) is ModuleType and is_users_module(name):
            for path, x in _held(name, module):
                # Not `isinstance`, which asks a proxy of the user's for its class.
                if issubclass(type(x), GENERATORS) and not is_global_generator(x):
                    found.setdefault(id(x), (path, x))
    return list(found.values())


def _held(name: str, module: ModuleType) -> Iterator[tuple[str, Any]]:
    for key, value in sorted(vars(module).items()):
        yield f"{name}.{key}", value
        if issubclass(type(value), type) and vars(value).get("__module__") == name:
            for attribute, held in sorted(vars(value).items()):
                yield f"{name}.{value.__qualname__}.{attribute}", held


@functools.lru_cache(4096)
def _is_users_file(path: str) -> bool:
    installed = "/site-packages/" in path or "/dist-packages/" in path
    return not (installed or path.startswith(_NOT_USERS))


_PLACES = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), Path(__file__).parents[1]
_NOT_USERS = tuple(os.path.join(place, "") for place in _PLACES)
