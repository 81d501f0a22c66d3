"""The calls that clients may make on a server, and the kind of each argument. What does not fit changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fastload.errors import ParametersError

_MOST = 2**62  # a version that is newer than any


def is_number(value: object) -> bool:
    """Return True for a version, a position or the number of a push; -1 says that there is none."""
    return type(value) is int and -1 <= value <= _MOST


class _Kind(NamedTuple):
    """What an argument must be, in words, and whether a value is that."""

    words: str
    fits: Callable[[Any], bool]


def _are_entries(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(each, list | tuple)
        and len(each) == 2
        and isinstance(each[0], str)
        and is_number(each[1])
        for each in value
    )


_TEXT = _Kind("a string", lambda value: isinstance(value, str))
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_NUMBER = _Kind(f"a whole number from -1 to {_MOST}", is_number)
_PERHAPS = _Kind(f"null or {_NUMBER.words}", lambda value: value is None or is_number(value))
_ORDER = _Kind("a list of workers with the numbers of their pushes", _are_entries)
_TENSOR = _Kind("a tensor", lambda value: isinstance(value, Tensor))
_OBJECT = _Kind("an object", lambda value: isinstance(value, Mapping))
_TENSORS = _Kind(
    "an object of tensors",
    lambda value: (
        isinstance(value, Mapping) and all(isinstance(each, Tensor) for each in value.values())
    ),
)
_OBJECTS = _Kind(
    "a list of objects",
    lambda value: (
        isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value)
    ),
)

_PUSH = {"worker": _TEXT, "sequence": _NUMBER, "gradients": _OBJECT}
_BOTH: dict[str, dict[str, _Kind]] = {
    "hello": {"worker": _TEXT},
    "initialise": {"values": _TENSORS, "version": _NUMBER},
    "add_tables": {"infos": _OBJECTS},
    "pull": {"version": _NUMBER},
    "rows": {"table": _TEXT, "ids": _TENSOR},
    "set_rows": {"table": _TEXT, "ids": _TENSOR, "values": _TENSOR},
}
_ASYNCHRONOUS = {"push": {**_PUSH, "fresh": _FLAG}, "checkpoint": {"version": _NUMBER}}
_SYNCHRONOUS = {
    "stage": _PUSH,
    "decide": {"worker": _TEXT, "sequence": _NUMBER, "version": _NUMBER, "since": _NUMBER},
    "decisions": {"since": _NUMBER},
    "mark": {"since": _NUMBER},
    "commit": {"worker": _TEXT, "start": _NUMBER, "entries": _ORDER, "discarded": _PERHAPS},
}


def expect_call(method: Any, arguments: Mapping[str, Any], *, synchronous: bool) -> None:
    """Raise ParametersError if servers have no such method, and TypeError if its arguments are not of the right kinds."""
    calls = _BOTH | (_SYNCHRONOUS if synchronous else _ASYNCHRONOUS)
    if method not in calls:
        mode = "synchronous" if synchronous else "asynchronous"
        raise ParametersError(
            f"{mode} servers have no method {method!r}. Use the same version of fastload on workers and servers"
        )
    kinds = calls[method]
    if arguments.keys() != kinds.keys():
        raise TypeError(
            f"{method} takes {', '.join(kinds)}, but got {', '.join(arguments) or 'nothing'}"
        )
    for name, kind in kinds.items():
        if not kind.fits(arguments[name]):
            raise TypeError(
                f"{name} of {method} must be {kind.words}, but got {type(arguments[name]).__name__}"
            )
