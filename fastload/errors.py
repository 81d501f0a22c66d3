"""fastload's own exceptions, one per fact. Each is a `FastloadError`, and the built-in type that a caller would expect.

A wrong argument of a constructor is a plain ValueError or TypeError, as in torch.

Each can be made of one text alone, in which all is said: so torch brings an error out of its worker processes, and
what cannot be made so arrives as a RuntimeError.
"""

from __future__ import annotations

import errno


class FastloadError(Exception):
    """Base of fastload's own exceptions."""


class UsageError(FastloadError, ValueError):
    """An option or an argument cannot be used as given; the message names it and what to do."""


class LoaderClosedError(FastloadError, RuntimeError):
    """A batch was asked of an iterator whose loader was closed, or that lives in another process."""


class LoaderTimeoutError(FastloadError, RuntimeError):
    """No batch came within `timeout` seconds. Nothing is lost: `next()` may be called again."""


class WorkerCrashError(FastloadError, RuntimeError):
    """A loader thread ended by a fault of fastload itself, not of user code; `__cause__` is the fault."""


class TooManyErrorsError(FastloadError, RuntimeError):
    """More samples failed in one epoch than `max_errors` allows; `__cause__` is the last failure."""


class EmptyBatchError(FastloadError, RuntimeError):
    """Every sample of a batch was skipped by `on_error`; `__cause__` is the last failure."""


class DatasetCopyError(FastloadError, RuntimeError):
    """A dataset holds what can neither be copied for each worker nor shared by them; the message names the place."""


class SharedStateWarning(UserWarning):
    """All workers share an object that may keep state; the message names it and says what to do."""


class ModuleStateWarning(SharedStateWarning):
    """Samples change a module-level object, which all workers share; the message names it and says what to do."""


class StateError(FastloadError, ValueError):
    """A state does not fit the loader that shall load it; the message names field, both values and remedy."""


class DecodeError(FastloadError, ValueError):
    """A file is there but is not a picture that can be decoded.

    `path` is the file, or the place in it, `reason` one clause that says what is wrong with it. Out of one of
    torch's worker processes, `path` is empty and `reason` torch's text with both.
    """

    def __init__(self, path: str, reason: str | None = None) -> None:
        super().__init__(*([path] if reason is None else [path, reason]))
        self.path, self.reason = ("", path) if reason is None else (path, reason)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.path else self.reason


class IdxError(FastloadError, ValueError):
    """An IDX file, as MNIST's are, is damaged or not what its name says; the message names it and what was expected."""


class NoDatasetError(FastloadError, FileNotFoundError, RuntimeError):
    """A dataset's files are not there and were not downloaded; the message says where to put or how to get them.

    It is a RuntimeError too, as torchvision raises.
    """


class FileListError(FastloadError, ValueError):
    """A file list, a class list or a line of one cannot be used; the message names file and line."""


class PackedDataError(FastloadError, ValueError):
    """A packed set cannot be read as what it says it is: damaged, cut off, incomplete, or of another version.

    `path` is the set's directory, `shard` the file in it, `record` the record's number in that shard, each of the
    latter two None where the fault is not theirs; `reason` is one clause that says what was found and expected. Out
    of one of torch's worker processes, `path` is empty and `reason` torch's text with all of them.
    """

    def __init__(
        self,
        path: str,
        reason: str | None = None,
        *,
        shard: str | None = None,
        record: int | None = None,
    ) -> None:
        super().__init__(*([path] if reason is None else [path, reason]))
        self.path, self.reason = ("", path) if reason is None else (path, reason)
        self.shard = shard
        self.record = record

    def __str__(self) -> str:
        if not self.path:
            return self.reason
        shard = "" if self.shard is None else f", shard {self.shard}"
        record = "" if self.record is None else f", record {self.record}"
        return f"{self.path}{shard}{record}: {self.reason}"


class StoreFullError(FastloadError, OSError):
    """A set does not fit where it is put. Nothing of it is left there.

    `filename` is the folder or file, `needed` and `free` are bytes; None out of one of torch's worker processes.
    """

    def __init__(self, path: str, needed: int | None = None, free: int | None = None) -> None:
        if needed is None:
            super().__init__(path)
        else:
            text = f"the set needs {needed:,} bytes more, and {free:,} are free: remove sets, or name another root"
            super().__init__(errno.ENOSPC, text, path)
        self.needed, self.free = needed, free

    def __reduce__(self) -> tuple[object, ...]:
        given = self.args if self.needed is None else (self.filename, self.needed, self.free)
        return type(self), given


class RankError(FastloadError, ValueError):
    """The environment does not say which rank this process is; the message names variables, values and remedy."""


class RendezvousError(FastloadError, RuntimeError):
    """The ranks of a job did not meet; the message names rank, address, the seconds waited and what to do."""


class LaunchError(FastloadError, ValueError):
    """Ranks cannot be started as asked; the message names the file or the option, what was found and what to do."""


def in_one_line(error: BaseException) -> str:
    """Return what a command prints of a user's error, in one line: without type, notes and traceback."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = str(error)
    return " ".join(line.strip() for line in text.splitlines())
