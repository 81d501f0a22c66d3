"""fastload's exceptions, one for each fact. Each is a `FastloadError` and the built-in type that a caller expects.

For a wrong argument of a constructor, fastload raises a plain ValueError or TypeError, as torch does.

Each can be created from its message alone. Torch rebuilds an error of a worker process in this way, and raises
RuntimeError if it cannot.
"""

from __future__ import annotations

import errno
import sys

if not hasattr(sys.modules["fastload"], "__distribution__"):
    raise ImportError(
        f"the package `fastload` in {sys.modules['fastload'].__path__} is not that of torch-fastload: the project "
        f"`fastload` of PyPI replaced it. Run pip uninstall fastload torch-fastload, and install fastload again"
    )


class FastloadError(Exception):
    """Base of fastload's own exceptions.

    Examples:
        >>> try:
        ...     loader.load_state_dict({"version": 0})
        ... except fastload.errors.FastloadError as error:
        ...     print(type(error).__name__)
        StateError
    """


class UsageError(FastloadError, ValueError):
    """An option or an argument cannot be used. The message names it and says what to do."""


class LoaderClosedError(FastloadError, RuntimeError):
    """`next()` was called on an iterator whose loader was closed, or that belongs to another process."""


class LoaderTimeoutError(FastloadError, RuntimeError):
    """No batch, or no worker process, came within `timeout` seconds. No batch is lost. Call next() or iter() again."""


class WorkerCrashError(FastloadError, RuntimeError):
    """A fault of fastload itself, not of user code, ended a loader thread; `__cause__` is the fault."""


class WorkerDiedError(FastloadError, RuntimeError):
    """A worker process ended while it read a batch. The message names worker, signal or exit code, and the indices."""


class TooManyErrorsError(FastloadError, RuntimeError):
    """More samples failed in one epoch than `max_errors` allows; `__cause__` is the last failure."""


class EmptyBatchError(FastloadError, RuntimeError):
    """`on_error` skipped every sample of a batch; `__cause__` is the last failure."""


class DatasetCopyError(FastloadError, RuntimeError):
    """A dataset holds an object that workers can neither copy nor share, nor unpickle. The message says where."""


class SharedStateWarning(UserWarning):
    """All workers share an object that may keep state. The message names it and says what to do."""


class StateError(FastloadError, ValueError):
    """A loader cannot load a state. The message names the field, both values and what to do."""


class PredictError(FastloadError, RuntimeError):
    """A message of a stream has no answer. The message names its key; `__cause__` is the error."""


class StreamError(FastloadError, RuntimeError):
    """A stream of messages cannot be read or written. The message names it and says what to check."""


class LeaseLostError(FastloadError, RuntimeError):
    """Another worker has leased a shard that this worker trained on. This worker gave no sign of life in time."""


class ShardError(FastloadError, RuntimeError):
    """A leased shard failed too often. The message names its epoch and its positions."""


class StoreLostError(FastloadError, ConnectionError):
    """The store of the leases does not answer. The epoch has not ended."""


class DecodeError(FastloadError, ValueError):
    """A file exists but is not an image that can be decoded.

    `path` is the file, or the position in it. `reason` is a clause that says what is wrong. If the error comes from
    one of torch's worker processes, `path` is empty, and `reason` is torch's message with both.
    """

    def __init__(self, path: str, reason: str | None = None) -> None:
        super().__init__(*([path] if reason is None else [path, reason]))
        self.path, self.reason = ("", path) if reason is None else (path, reason)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.path else self.reason


class IdxError(FastloadError, ValueError):
    """An IDX file, such as MNIST's, is damaged or not what its name says. The message says what was expected."""


class NoDatasetError(FastloadError, FileNotFoundError, RuntimeError):
    """A dataset's files are missing and were not downloaded. The message says how to get them, or where to put them.

    It is a RuntimeError too, because torchvision raises that.
    """


class FileListError(FastloadError, ValueError):
    """A file list or a class list, or a line of one, cannot be used. The message names file and line."""


class ParquetError(FastloadError, ValueError):
    """A Parquet file is not what the dataset expects. The message names file, row group and expectation."""


class SequenceError(FastloadError, ValueError):
    """A file of tokens, or a sample, is not as long as expected. The message names it, and both lengths."""


class PackedDataError(FastloadError, ValueError):
    """A packed set cannot be read: it is damaged, truncated, incomplete, or of another version.

    `path` is the set's directory, `shard` the file in it, and `record` the record's number in that shard. `shard` and
    `record` are None if the fault lies elsewhere. `reason` is a clause that says what was found and what was expected.
    If the error comes from one of torch's worker processes, `path` is empty, and `reason` is torch's message with all.
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
    """The file system has no room for a set. No part of the set is left.

    `filename` is the folder or file, `needed` and `free` are bytes. If the error comes from one of torch's worker
    processes, all are None.
    """

    def __init__(self, path: str, needed: int | None = None, free: int | None = None) -> None:
        if needed is None:
            super().__init__(path)
        else:
            text = f"the set needs {needed:,} more bytes, but only {free:,} are free. Remove sets, or name another root"
            super().__init__(errno.ENOSPC, text, path)
        self.needed, self.free = needed, free

    def __reduce__(self) -> tuple[object, ...]:
        given = self.args if self.needed is None else (self.filename, self.needed, self.free)
        return type(self), given


class RemoteError(FastloadError, OSError):
    """An object of a store cannot be read. The message names its URL, the range, the attempts and the cause."""


class PrepareError(FastloadError, RuntimeError):
    """A part of a set could not be prepared; the message names its source."""


class NotInstalledError(FastloadError, ModuleNotFoundError):
    """An optional library is missing. The message names it, and says how to install it."""


class RankError(FastloadError, ValueError):
    """The environment does not say which rank this process is. The message names variables, values and what to do."""


class RendezvousError(FastloadError, RuntimeError):
    """The ranks of a job did not meet. The message names rank, address, the seconds waited and what to do."""


class LaunchError(FastloadError, ValueError):
    """Ranks cannot be started. The message names the file or the option, what was found and what to do."""


class FlowError(FastloadError, RuntimeError):
    """A graph cannot run, or a task of it failed. The message names the task, the reason and the log."""


class ParametersError(FastloadError, RuntimeError):
    """A parameter server refused a call, or cannot be reached. The message names the server and says what to do."""


class ParametersLostError(ParametersError):
    """A server restarted, or a step lacks a push of a worker that ended. The message says how to resume all."""


def in_one_line(error: BaseException) -> str:
    """Return a user's error as one line for a command to print, without type, notes and traceback."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = str(error)
    return " ".join(line.strip() for line in text.splitlines())


def needs(what: str, package: str, extra: str, error: ModuleNotFoundError) -> NotInstalledError:
    """Return the error for an optional library that is missing. It says how to install the library."""
    return NotInstalledError(
        f"{what} needs {package}, which is not installed. Run pip install 'torch-fastload[{extra}]'",
        name=error.name,
    )
