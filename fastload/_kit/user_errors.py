"""Errors of user code: which of them may end the loop, and notes that say where they happened."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
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


passing: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit)
"""What ends the main thread's call. In a worker process it is nothing, in a process that a sample forks anything."""


def contained(exc: BaseException) -> Exception:
    """Return the error to deliver if user code raised `exc`.

    Return `exc` itself, unless it is a StopIteration or not an Exception: such an error would end the epoch or a
    thread. Then return a RuntimeError with `exc` as its cause.

    In the main thread, raise KeyboardInterrupt and SystemExit again, unless this is a worker process. Python runs
    signal handlers there, the loop runs the sampler there and, without workers, reads the samples there.
    """
    if isinstance(exc, passing) and threading.current_thread() is threading.main_thread():
        raise exc
    if isinstance(exc, Exception) and not isinstance(exc, StopIteration):
        return exc
    error = RuntimeError(f"user code raised {type(exc).__name__}: {shown(exc, str)}")
    error.__cause__ = exc
    return error


def transient_errno(exc: BaseException) -> int | None:
    """Return the errno of a transient error of the operating system, as of a network file system, or None."""
    number = exc.errno if isinstance(exc, OSError) else None
    return number if isinstance(number, int) and number in _TRANSIENT else None


def annotate(error: BaseException, *said: str) -> None:
    """Add notes that say where and why `error` happened. Skip empty strings.

    Replace our earlier notes: some code raises the same object again.
    """
    with suppress(Exception):  # the error matters more than our note
        others = [n for n in getattr(error, "__notes__", []) if not n.startswith("fastload: ")]
        # Not setattr(): an exception may be a frozen dataclass.
        ours = [f"fastload: {text}" for text in said if text]
        BaseException.__setattr__(error, "__notes__", [*others, *ours])


def shown(value: Any, form: Callable[[Any], str] = repr) -> str:
    """Return a user's object as a string, or its type's name if `form` raises: no message may hide the first error."""
    try:
        return form(value)
    except Exception as exc:
        return f"<{type(value).__name__} whose {form.__name__}() raises {type(exc).__name__}>"


def shown_indices(indices: Any) -> str:
    """Return the indices of a batch as a string: the first eight of a sequence, or the object itself."""
    if not isinstance(indices, Sequence):
        return shown(indices)
    more = f", ... {len(indices)} in all" if len(indices) > 8 else ""
    return f"[{', '.join(map(shown, indices[:8]))}{more}]"


def file_note(dataset: Any, index: Any, exc: BaseException) -> str:
    """Return `; file: ...` with the file that the error or the dataset names, or "".

    An OSError may name a program or a host, so its name counts only if such a file exists.
    """
    named = exc.path if isinstance(exc, DecodeError) else ""
    if isinstance(exc, OSError):
        named = _existing(exc.filename)
    named = named or file_of(dataset, index)
    return f"; file: {named}" if named else ""


def file_of(dataset: Any, index: Any) -> str:
    """Return the file of a sample, from the dataset's `locate` or torchvision's `samples`; "" if it has none."""
    try:
        while type(dataset) is Subset:
            dataset, index = dataset.dataset, dataset.indices[index]
        locate = getattr(dataset, "locate", None)
        if locate:
            name = locate(index)
        else:
            entry = dataset.samples[index]
            # Not of a dict: a defaultdict would grow. In other datasets, an entry may begin with a word or a sentence.
            name = _existing(entry[0]) if isinstance(entry, tuple | list) else None
        return os.fspath(name) if isinstance(name, str | os.PathLike) else ""
    except Exception:
        return ""  # the dataset has no files or no such index, or its code fails


def _existing(name: Any) -> str:
    """Return the name of a file that exists, or "" for anything else."""
    path = os.fspath(name) if isinstance(name, str | os.PathLike) else ""
    return path if isinstance(path, str) and os.path.isfile(path) else ""
