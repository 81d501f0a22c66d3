"""Annotations of users' functions, which are lazy from Python 3.14 on. They may name what no program imports."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

try:
    from annotationlib import Format  # type: ignore[import-not-found]
except ImportError:  # before Python 3.14
    _FORMAT: dict[str, Any] = {}
else:
    _FORMAT = {"format": Format.STRING}


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Do as `inspect.signature`, but compute no annotation."""
    return inspect.signature(function, **{f"annotation_{k}": v for k, v in _FORMAT.items()})
