"""Errors as bytes, with all that they came of, and as errors again in another process."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from fastload._kit.user_errors import shown

_MOST_LINKED = 64
"""Causes, contexts and members of groups that an error brings along."""


class PackedLink(NamedTuple):
    """An error on its way between processes, and the places of those that it refers to."""

    pickle: bytes
    cause: int | None
    context: int | None
    suppressed: bool
    members: list[int]
    """Of an ExceptionGroup. -1 is one that was left out."""


class PackedError(NamedTuple):
    """An error, and after it all that it came of."""

    links: list[PackedLink]


def pack_error(error: BaseException, who: str) -> PackedError:
    """Return an error as bytes. At the other end it has its type, arguments and attributes, and a note: its traceback.

    So have its cause, its context and the members of a group. An argument that cannot be pickled becomes a string. Such
    an attribute is left out, and a note names it. If a class cannot be rebuilt there, its nearest base that can be
    takes its place, else RuntimeError. `who` names this worker.
    """
    links, chain, places = [], [error], {id(error): 0}
    for one in chain:  # it grows
        inner = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        for other in (one.__cause__, one.__context__, *inner):
            if other is not None and id(other) not in places and len(chain) < _MOST_LINKED:
                places[id(other)] = len(chain)
                chain.append(other)
        lines = "".join(traceback.format_tb(one.__traceback__))
        notes = [f"raised in {who}:\n{lines.rstrip()}"] if lines else []
        cause, context = (places.get(id(other)) for other in (one.__cause__, one.__context__))
        members = [places.get(id(member), -1) for member in inner]
        links.append(
            PackedLink(_pickled(one, notes), cause, context, one.__suppress_context__, members)
        )
    return PackedError(links)


def _pickled(error: BaseException, notes: list[str]) -> bytes:
    kind, said = type(error), shown(error, str)
    other = (
        f"{kind.__module__}.{kind.__qualname__}: {said} (the class of this error cannot be pickled, so the worker "
        "process could not hand it over)"
    )
    with suppress(BaseException):  # whatever a user's class raises
        for form, text, more in _forms(error, said, other):
            with suppress(BaseException):
                data = pickle.dumps((form, notes + more))
                again, _ = pickle.loads(data)
                if (type(form) is _Rebuilt or type(again) is kind) and text in shown(again, str):
                    return data
    return pickle.dumps((RuntimeError(other), notes))


def _forms(error: Any, said: str, other: str) -> Iterator[tuple[Any, str, list[str]]]:
    """Yield forms of an error, what each must say, and its further notes, from the whole error to a RuntimeError."""
    kind, args, attributes = type(error), error.args, dict(vars(error))
    members: tuple[Any, ...] = ()
    if isinstance(error, BaseExceptionGroup):  # its members travel by themselves
        member = Exception() if isinstance(error, Exception) else BaseException()
        members = ([member] * len(error.exceptions),)
        args = (error.message, *members)
    else:
        yield error, said, []
    kept = {name: value for name, value in attributes.items() if _can_be_pickled(value)}
    more = [f"left out, as it cannot be pickled: {name}" for name in attributes if name not in kept]
    args = tuple(arg if _can_be_pickled(arg) else shown(arg) for arg in args)
    for base in kind.__mro__:
        if issubclass(base, BaseException) and base not in (Exception, BaseException):
            yield _Rebuilt((base, args, kept)), said, more if base is kind else [*more, other]
            text = said if base is kind else other
            yield _Rebuilt((base, (text, *members), kept)), text, more
    yield _Rebuilt((RuntimeError, (other,), kept)), other, more


def _can_be_pickled(x: Any) -> bool:
    with suppress(BaseException):
        pickle.loads(pickle.dumps(x))
        return True
    return False


class _Rebuilt(tuple[Any, ...]):
    """Pickles as an error whose `__init__` may take other arguments than it stores: class, arguments, attributes."""

    def __reduce__(self) -> Any:
        return _rebuild, tuple(self)


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    base: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    error = base.__new__(kind, *args)
    with suppress(TypeError):
        base.__init__(
            error, *args
        )  # it sets what Python's own errors keep in C: `start` of UnicodeDecodeError
    BaseException.__setattr__(error, "args", args)
    vars(error).update(attributes)
    return error


def unpack_error(packed: PackedError) -> Exception:
    """Return the error that `pack_error` packed."""
    links = packed.links
    left_out = RuntimeError(f"left out: a worker hands over {_MOST_LINKED} linked errors at most")
    errors: dict[int | None, Any] = {None: None, -1: left_out}
    for k, link in enumerate(links):
        error = _complete(k, links, errors)
        set_field = partial(BaseException.__setattr__, error)  # a frozen dataclass refuses its own
        set_field("__cause__", _complete(link.cause, links, errors))
        set_field("__context__", _complete(link.context, links, errors))
        set_field("__suppress_context__", link.suppressed)
    found: Exception = errors[0]
    return found


def _complete(k: Any, links: list[PackedLink], errors: dict[int | None, Any]) -> Any:
    """Return error `k` of `errors`, with its members. Make what is not there yet."""
    if k not in errors:
        errors[k] = _unpickled(links[k])
        if isinstance(group := errors[k], BaseExceptionGroup):
            members = [_complete(member, links, errors) for member in links[k].members]
            errors[k] = _rebuild(type(group), (group.message, members), dict(vars(group)))
    return errors[k]


def _unpickled(link: PackedLink) -> Any:
    try:
        error, notes = pickle.loads(link.pickle)
    except BaseException as exc:
        return RuntimeError(
            f"an error of a worker cannot be rebuilt: {type(exc).__name__}: {shown(exc, str)}"
        )
    with suppress(Exception):
        notes = [*getattr(error, "__notes__", ()), *notes]
        BaseException.__setattr__(error, "__notes__", notes)
    return error
