"""Random generators that modules and classes of the user hold."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from fastload.safety.rules import GENERATORS, is_global_generator
from fastload.safety.users import is_users_module


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
