"""Random generators that modules and classes of the user hold."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from fastload.isolation.rules import GENERATORS, is_global_generator
from fastload.isolation.users import is_users_module


def generators_of_modules() -> list[tuple[str, Any]]:
    """Return the generators in the user's modules and their classes, each with the first path, in order of paths."""
    found: dict[int, tuple[str, Any]] = {}
    users = {top: is_users_module(top) for top in {name.partition(".")[0] for name in sys.modules}}
    theirs = sorted(name for name in sys.modules if users[name.partition(".")[0]])
    for name in theirs:
        module = sys.modules.get(name)
        if type(module) is ModuleType and is_users_module(name):
            for path, x in _held(name, module):
                if isinstance(x, GENERATORS) and not is_global_generator(x):
                    found.setdefault(id(x), (path, x))
    return list(found.values())


def _held(name: str, module: ModuleType) -> Iterator[tuple[str, Any]]:
    for key, value in sorted(vars(module).items()):
        yield f"{name}.{key}", value
        if isinstance(value, type) and value.__module__ == name:
            for attribute, held in sorted(vars(value).items()):
                yield f"{name}.{value.__qualname__}.{attribute}", held
