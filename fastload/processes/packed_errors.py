"""Messages with errors in them: an error pickles with all that it came of, and its traceback becomes a note."""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fastload._kit.user_errors import shown

_MOST = 64
"""Errors of a message, with their causes, contexts and members."""


def dumps(message: Any, who: str) -> bytes:
    """Return the pickle of a message in which errors may be. `who` names this worker.

    At the other end an error has its type, arguments and attributes, its cause, its context and the members of a group,
    and a note: its traceback. An argument that cannot be pickled becomes a string. Such an attribute is left out, and a
    note names it. If a class cannot be rebuilt there, its nearest base that can be takes its place, else RuntimeError.
    """
    file = io.BytesIO()
    _Pickler(file, who).dump(message)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, who: str) -> None:
        super().__init__(file, 5)
        self._who = who
        self._left = _MOST

    def reducer_override(self, x: Any) -> Any:
        """Return how an error is made again. The pickler remembers it, so errors may refer to one another."""
        if not isinstance(x, BaseException):
            return NotImplemented
        if not self._left:
            said = f"left out: a worker hands over {_MOST} linked errors at most"
            return RuntimeError, (said,)
        self._left -= 1
        lines = "".join(traceback.format_tb(x.__traceback__))
        notes = [f"raised in {self._who}:\n{lines.rstrip()}"] if lines else []
        members = [*x.exceptions] if isinstance(x, BaseExceptionGroup) else []
        fields = {name: getattr(x, name) for name in _LINKS}
        return _made, (_pickled(x, notes), members), fields, None, None, _set_links


_LINKS = "__cause__", "__context__", "__suppress_context__"


def _pickled(error: BaseException, notes: list[str]) -> bytes:
    """Return the pickle of an error without what it came of, and of its further notes."""
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
    with suppress(TypeError):  # it sets what Python keeps in C: `start` of UnicodeDecodeError
        base.__init__(error, *args)
    BaseException.__setattr__(error, "args", args)
    vars(error).update(attributes)
    return error


# ---- at the other end ----


def _made(data: bytes, members: list[Any]) -> Any:
    """Return the error that `_pickled` packed, with the members of a group."""
    try:
        error, notes = pickle.loads(data)
        if members and isinstance(error, BaseExceptionGroup):
            error = _rebuild(type(error), (error.message, members), dict(vars(error)))
    except BaseException as exc:
        said = f"{type(exc).__name__}: {shown(exc, str)}"
        return RuntimeError(f"an error of a worker cannot be rebuilt: {said}")
    with suppress(Exception):
        # tblib makes frames for it, which hold those of this thread.
        BaseException.with_traceback(error, None)
        notes = [*getattr(error, "__notes__", ()), *notes]
        BaseException.__setattr__(error, "__notes__", notes)
    return error


def _set_links(error: BaseException, links: dict[str, Any]) -> None:
    for name, value in links.items():
        BaseException.__setattr__(error, name, value)  # a frozen dataclass refuses its own
