"""The signatures of users' functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

try:
    from annotationlib import Format  # type: ignore[import-not-found]
except ImportError:  # before Python 3.14
    _AS_TEXT: dict[str, Any] = {}
else:
    _AS_TEXT = {"annotation_format": Format.STRING}


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Do as `inspect.signature`, but evaluate no annotation: it may name what only a type checker imports."""
    return inspect.signature(function, **_AS_TEXT)
