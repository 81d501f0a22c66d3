"""Checks of the arguments of a graph and its tasks. Each returns the value, or raises an error with its name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
AnyPath = str | os.PathLike[str]


def checked_name(of: str, value: object) -> str:
    """Return the name. Raise ValueError if a file cannot have it."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(
            f"{of} name must have 1 to 64 letters, digits and _.-, and must not begin with . or -, got {value!r}"
        )
    return value


def path_of(what: str, value: object) -> str:
    """Return the path as a string. Raise TypeError if it is not a path."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{what} must be a path, got {value!r}")
    return os.fspath(value)


def paths_of(what: str, value: AnyPath | Iterable[AnyPath]) -> list[str]:
    """Return one path or several as a list of strings. Raise TypeError if one is not a path."""
    if isinstance(value, str | os.PathLike):
        return [os.fspath(value)]
    return [path_of(what, one) for one in several(what, value)]


def several(what: str, value: Iterable[object]) -> list[object]:
    """Return the items as a list. Raise TypeError for a string, whose characters would be the items."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f'{what} must be a list, such as ["--epochs", "3"], got {value!r}')
    return list(value)


def variables(what: str, value: Mapping[str, object] | None) -> dict[str, str]:
    """Return the environment variables as strings. Raise TypeError if the value is not a mapping."""
    if not isinstance(value or {}, Mapping):
        raise TypeError(f'{what} must be a table, such as {{WORD = "yes"}}, got {value!r}')
    return {str(name): str(text) for name, text in (value or {}).items()}
