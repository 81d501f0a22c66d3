"""Tells the user's code from that of libraries.

The user's code is neither in the standard library, nor installed, nor fastload's own.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

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


@functools.lru_cache(4096)
def _is_users_file(path: str) -> bool:
    installed = "/site-packages/" in path or "/dist-packages/" in path
    return not (installed or path.startswith(_NOT_USERS))


_PLACES = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), Path(__file__).parents[1]
_NOT_USERS = tuple(os.path.join(place, "") for place in _PLACES)
