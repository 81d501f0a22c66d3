"""The calls that clients may make on a server, and the kind of each argument. What does not fit changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fastload.errors import ParametersError

_MOST = 2**62  # a version that is newer than any


def is_number(value: object) -> bool:
    """Return True for a version, a position or the number of a push; -1 says that there is none."""
    return type(value) is int and -1 <= value <= _MOST


def _is_push(value: Any) -> bool:
    """Return True for a worker with the number of its push."""
    of_two = isinstance(value, list | tuple) and len(value) == 2
    return of_two and isinstance(value[0], str) and is_number(value[1])


_FITS: dict[str, Callable[[Any], bool]] = {
    "a string": lambda value: isinstance(value, str),
    "true or false": lambda value: isinstance(value, bool),
    "a whole number": is_number,
    "a whole number or null": lambda value: value is None or is_number(value),
    "a list of pushes": lambda value: isinstance(value, list | tuple) and all(map(_is_push, value)),
    "a tensor": lambda value: isinstance(value, Tensor),
    "tensors by name": lambda value: (
        isinstance(value, Mapping) and all(isinstance(each, Tensor) for each in value.values())
    ),
    "gradients": lambda value: isinstance(value, Mapping),
    "a list of tables": lambda value: (
        isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value)
    ),
}

_PUSH = "worker: a string, sequence: a whole number, gradients: gradients"
_BOTH = {
    "hello": "worker: a string",
    "initialise": "values: tensors by name, version: a whole number",
    "add_tables": "infos: a list of tables",
    "pull": "version: a whole number",
    "rows": "table: a string, ids: a tensor",
    "set_rows": "table: a string, ids: a tensor, values: a tensor",
}
_ASYNCHRONOUS = {"push": f"{_PUSH}, fresh: true or false", "checkpoint": "version: a whole number"}
_SYNCHRONOUS = {
    "stage": _PUSH,
    "decide": "worker: a string, sequence: a whole number, version: a whole number, since: a whole number",
    "decisions": "since: a whole number",
    "mark": "since: a whole number",
    "commit": (
        "worker: a string, start: a whole number, entries: a list of pushes, discarded: a whole number or null"
    ),
}


def expect_call(method: Any, arguments: Mapping[str, Any], *, synchronous: bool) -> None:
    """Raise ParametersError if servers have no such method, and TypeError if it takes other arguments."""
    calls = _BOTH | (_SYNCHRONOUS if synchronous else _ASYNCHRONOUS)
    if not isinstance(method, str) or method not in calls:
        mode = "synchronous" if synchronous else "asynchronous"
        raise ParametersError(
            f"{mode} servers have no method {method!r}. Use the same version of fastload on workers and servers"
        )
    kinds = dict(argument.split(": ") for argument in calls[method].split(", "))
    if arguments.keys() != kinds.keys() or not all(
        _FITS[kind](arguments[name]) for name, kind in kinds.items()
    ):
        found = ", ".join(f"{name}: {type(value).__name__}" for name, value in arguments.items())
        raise TypeError(f"{method} takes ({calls[method]}), but got ({found})")
