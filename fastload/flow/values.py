"""Checks of what a graph and its tasks are given: each returns the value, or raises with its name."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
AnyPath = str | os.PathLike[str]


def checked_name(of: str, value: object) -> str:
    """Return a name that may be that of a file. Raises ValueError."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(
            f"{of} name has 1 to 64 letters, digits and _.-, and does not begin with . or -, got {value!r}"
        )
    return value


def path_of(what: str, value: object) -> str:
    """Return a path as a text. Raises TypeError."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{what} must be a path, got {value!r}")
    return os.fspath(value)


def paths_of(what: str, value: AnyPath | Iterable[AnyPath]) -> list[str]:
    """Return paths as texts; one alone is a list of one. Raises TypeError."""
    if isinstance(value, str | os.PathLike):
        return [os.fspath(value)]
    return [path_of(what, one) for one in several(what, value)]


def several(what: str, value: Iterable[object]) -> list[object]:
    """Return a list. Raises TypeError for a text, whose letters would be its items."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f'{what} must be a list, such as ["--epochs", "3"], got {value!r}')
    return list(value)


def variables(what: str, value: Mapping[str, object] | None) -> dict[str, str]:
    """Return variables of a process. Raises TypeError."""
    if not isinstance(value or {}, Mapping):
        raise TypeError(f'{what} must be a table, such as {{WORD = "yes"}}, got {value!r}')
    return {str(name): str(text) for name, text in (value or {}).items()}


def whole(what: str, value: int, least: int) -> int:
    """Return a whole number of at least this. Raises TypeError, ValueError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{what} must be {least} or more, got {value}")
    return value


def seconds(what: str, value: float | None) -> float | None:
    """Return a time, or None for no limit. Raises TypeError, ValueError."""
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{what} must be a number of seconds, got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{what} must be positive and finite, got {value}")
    return value
