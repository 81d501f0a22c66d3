"""What user code raises, and what is said of it: which of it may end the loop, and a note of where it happened.

Anything can come out of user code, from an exception that lies about its class to one that raises as
it is shown. Nothing here lets that take the place of the fault itself; only what comes out of a signal
handler passes through everything.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from inspect import CO_NEWLOCALS, CO_VARARGS
from itertools import pairwise
from types import FrameType
from typing import Any

from torch.utils.data import Subset

from fastload.errors import DecodeError

_TRANSIENT = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EAGAIN,
    errno.EINTR,
    errno.EREMOTEIO,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
}


def pass_signals(exc: BaseException) -> None:
    """Raise `exc` on if it is no fault of a sample but comes out of a signal handler: Ctrl-C, or a SIGTERM that exits.

    Python runs the handlers of signals in the main thread alone: a loop's, with its sampler, and with its samples
    where there are no workers.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    frames = (frame for frame, _ in traceback.walk_tb(exc.__traceback__))
    if issubclass(type(exc), KeyboardInterrupt) or any(map(_is_handler, frames)):
        raise exc


def _is_handler(frame: FrameType) -> bool:
    """Return whether a frame is that of a signal handler, by its arguments: a signal's number and a frame.

    Not by `signal.getsignal`: a handler may have put another in its place.
    """
    code = frame.f_code
    if not code.co_flags & CO_NEWLOCALS:  # of a module or a class
        return False
    values = frame.f_locals
    given = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & CO_VARARGS:
        rest = values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        given += rest if type(rest) is tuple else ()
    if isinstance(values, dict):
        values.clear()  # before Python 3.13 the frame keeps this copy, and what is in it
    signals = signal.valid_signals()
    return any(
        type(number) is int and number in signals and type(at) is FrameType
        for number, at in pairwise(given)
    )


def contained(exc: BaseException) -> Exception:
    """`exc`, or a RuntimeError caused by it where raising it in the loop would end more than a batch.

    That is so of StopIteration, SystemExit and whatever else is no error.
    """
    # By type: an exception can lie about its `__class__`, or raise where it is asked for it.
    if issubclass(type(exc), Exception) and not issubclass(type(exc), StopIteration):
        return exc  # type: ignore[return-value]
    error = RuntimeError(f"user code raised {type(exc).__name__}: {shown(exc, str)}")
    error.__cause__ = exc
    return error


def transient_errno(exc: BaseException) -> int | None:
    """The number of an error of the operating system that may be gone the next time, as on a network file
    system; None of any other."""
    try:
        number = getattr(exc, "errno", None) if issubclass(type(exc), OSError) else None
    except BaseException as raised:
        pass_signals(raised)
        return None
    return number if type(number) is int and number in _TRANSIENT else None


def annotate(error: BaseException, *said: str) -> None:
    """Add notes that say where and why `error` happened, in place of those before: some code raises one object again.

    Empty texts are skipped.
    """
    with suppress(Exception):  # the error counts more than our note
        notes = getattr(error, "__notes__", None) or []
        others = [n for n in notes if not str(n).startswith("fastload: ")]
        # Past a __setattr__ that refuses: an exception may be a frozen dataclass.
        ours = [f"fastload: {text}" for text in said if text]
        BaseException.__setattr__(error, "__notes__", [*others, *ours])


def sharing_note(shared: str | None, exc: BaseException) -> str:
    """Return the note on an error that may come of sharing, or an empty text.

    It may if the workers share something that may keep a state, which the clause `shared` names, or if the error
    itself mentions threads. `shared` is None without workers.
    """
    if shared is None or not (shared or "thread" in shown(exc, str).lower()):
        return ""
    clause = shared or "it speaks of threads"
    return (
        f"this error may come of sharing: {clause}. If num_workers=0 does not raise it, sharing is the cause. Then "
        "copy_dataset=True copies more for each worker, and `fastload check` shows what is shared"
    )


def shown(value: Any, form: Callable[[Any], str] = repr) -> str:
    """`value` as text; user code, which may raise, decides which."""
    try:
        return form(value)
    except BaseException as exc:
        pass_signals(exc)
        return f"<{type(value).__name__} whose {form.__name__}() raises {type(exc).__name__}>"


def shown_indices(indices: Any) -> str:
    """The indices of a batch as text, cut off behind the eighth; as they are if they are no sequence."""
    if not isinstance(indices, Sequence):
        return shown(indices)
    more = f", ... {len(indices)} in all" if len(indices) > 8 else ""
    return f"[{', '.join(map(shown, indices[:8]))}{more}]"


def file_note(dataset: Any, index: Any, exc: BaseException) -> str:
    """`; file: ...` where it is known: from the error, or from the data set.

    The name in an error may be that of a program or a host: so it is used only if such a file exists.
    """
    try:
        named = exc.path if isinstance(exc, DecodeError) else ""
        if issubclass(type(exc), OSError):
            named = _existing(getattr(exc, "filename", None))
    except BaseException as raised:
        pass_signals(raised)
        named = ""
    named = named or file_of(dataset, index)
    return f"; file: {named}" if named else ""


def file_of(dataset: Any, index: Any) -> str:
    """The file of a sample, from the data set's `locate` or torchvision's `samples`; empty if it has none."""
    try:
        while type(dataset) is Subset:
            dataset, index = dataset.dataset, dataset.indices[index]
        locate = getattr(dataset, "locate", None)
        if locate:
            name = locate(index)
        else:
            entry = dataset.samples[index]
            # A defaultdict would grow. Of other data sets, the samples begin with a word or a sentence.
            name = _existing(entry[0]) if isinstance(entry, tuple | list) else None
        return os.fspath(name) if isinstance(name, str | os.PathLike) else ""
    except BaseException as raised:
        pass_signals(raised)
        return ""  # a data set without files, an index that it does not have, or code that fails


def _existing(name: Any) -> str:
    """Return the name of a file that is there; an empty text for anything else."""
    path = os.fspath(name) if isinstance(name, str | os.PathLike) else ""
    return path if isinstance(path, str) and os.path.isfile(path) else ""
