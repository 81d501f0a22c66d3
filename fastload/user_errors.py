"""What user code raises, and what is said of it: which of it may end the loop, and a note of where it happened."""

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


def contained(exc: BaseException) -> Exception:
    """Return the error to deliver in the place of what raised `exc`.

    That is `exc` itself, or a RuntimeError caused by it if `exc` would end a thread or the epoch: StopIteration and
    whatever is no Exception.

    Raise KeyboardInterrupt and SystemExit on in the main thread. There Python runs signal handlers, and there the loop
    runs the sampler and, without workers, the samples.
    """
    if isinstance(exc, Exception) and not isinstance(exc, StopIteration):
        return exc
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and isinstance(exc, KeyboardInterrupt | SystemExit):
        raise exc
    error = RuntimeError(f"user code raised {type(exc).__name__}: {shown(exc, str)}")
    error.__cause__ = exc
    return error


def transient_errno(exc: BaseException) -> int | None:
    """Return the number of an error of the operating system that may be gone the next time, as on a network file
    system, or None for any other."""
    number = exc.errno if isinstance(exc, OSError) else None
    return number if isinstance(number, int) and number in _TRANSIENT else None


def annotate(error: BaseException, *said: str) -> None:
    """Add notes that say where and why `error` happened, in place of those before: some code raises one object again.

    Empty texts are skipped.
    """
    with suppress(Exception):  # the error counts more than our note
        others = [n for n in getattr(error, "__notes__", []) if not n.startswith("fastload: ")]
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
    clause = shared or "its text mentions threads"
    return (
        f"this error may come of sharing: {clause}. If num_workers=0 does not raise it, sharing is the cause. Then "
        "copy_dataset=True copies more for each worker, and `fastload check` shows what is shared"
    )


def shown(value: Any, form: Callable[[Any], str] = repr) -> str:
    """Return a user's object as text; name its type if showing it raises, so that no message hides the first error."""
    try:
        return form(value)
    except Exception as exc:
        return f"<{type(value).__name__} whose {form.__name__}() raises {type(exc).__name__}>"


def shown_indices(indices: Any) -> str:
    """The indices of a batch as text, cut off behind the eighth; as they are if they are no sequence."""
    if not isinstance(indices, Sequence):
        return shown(indices)
    more = f", ... {len(indices)} in all" if len(indices) > 8 else ""
    return f"[{', '.join(map(shown, indices[:8]))}{more}]"


def file_note(dataset: Any, index: Any, exc: BaseException) -> str:
    """Return `; file: ...` with the file named by the error or by the dataset, or an empty text.

    The name in an OSError may be that of a program or a host: so it is used only if such a file exists.
    """
    named = exc.path if isinstance(exc, DecodeError) else ""
    if isinstance(exc, OSError):
        named = _existing(exc.filename)
    named = named or file_of(dataset, index)
    return f"; file: {named}" if named else ""


def file_of(dataset: Any, index: Any) -> str:
    """The file of a sample, from the dataset's `locate` or torchvision's `samples`; empty if it has none."""
    try:
        while type(dataset) is Subset:
            dataset, index = dataset.dataset, dataset.indices[index]
        locate = getattr(dataset, "locate", None)
        if locate:
            name = locate(index)
        else:
            entry = dataset.samples[index]
            # A defaultdict would grow. Of other datasets, the samples begin with a word or a sentence.
            name = _existing(entry[0]) if isinstance(entry, tuple | list) else None
        return os.fspath(name) if isinstance(name, str | os.PathLike) else ""
    except Exception:
        return ""  # a dataset without files, an index that it does not have, or code that fails


def _existing(name: Any) -> str:
    """Return the name of a file that is there; an empty text for anything else."""
    path = os.fspath(name) if isinstance(name, str | os.PathLike) else ""
    return path if isinstance(path, str) and os.path.isfile(path) else ""
