"""One lmdb environment for all worker threads that open it: it can be open only once in a process.

A dataset that opens its environment at the first sample does so in each worker's copy. Each worker process of torch has
its own. Of several threads, lmdb refuses all but the first. After `install`, a worker may open an open environment
again, read-only and with the same arguments: it gets a handle on that one. The environment closes with its last handle.
All other calls reach lmdb unchanged.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

# Process, device and inode of a data file: a forked child shares nothing with its parent.
_File = tuple[int, int, int]
# `map_size`, `subdir`, and all arguments that follow `readonly`.
_Settings = tuple[int, bool, tuple[Any, ...], dict[str, Any]]

# Owns `_by_file` and the counts in it, and is held while an environment or a named database opens or closes. It is
# reentrant because garbage collection, which can come at any time, may close a handle.
_lock = threading.RLock()
_by_file: dict[_File, _Opened] = {}  # the environment that was opened last

_lmdb: Any = None
_real: Any = None  # lmdb's own Environment, which is also its `open`
_is_worker: Callable[[], bool]

# If another thread held the lock during a fork, the child could never take it.
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


class _Opened:
    """An environment, its arguments (None if unknown), and how many users have not closed it yet."""

    def __init__(self, env: Any, settings: _Settings | None) -> None:
        self.env = weakref.ref(env)
        self.settings = settings
        self.by_worker = False
        self.unclosed = 1

    def flags(self) -> dict[str, bool] | None:
        """Return the flags of the environment, or None if it is closed or gone."""
        env = self.env()
        try:
            return None if env is None else env.flags()
        except _lmdb.Error:
            return None

    def is_like(self, settings: _Settings) -> bool:
        """Return whether the environment is open and was opened with these settings."""
        flags = self.flags()
        if self.settings is not None or flags is None:
            return flags is not None and self.settings == settings
        _, subdir, positional, named = settings
        named = {**named, "subdir": subdir}
        return not positional and all(flags.get(name, v) == v for name, v in named.items())

    def shared(self, settings: _Settings) -> Any:
        """Return the environment and count one more user if it is open with these settings. Otherwise return None."""
        env = self.env()
        self.unclosed += 1  # before the check, during which garbage collection may close handles
        if self.is_like(settings):
            return env
        self.unclosed -= 1
        return None


class _LikeReal(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _real)


class Environment(metaclass=_LikeReal):
    """Stands for `lmdb.Environment` and `lmdb.open`. Its instances are the handles that workers get.

    `isinstance(handle, lmdb.Environment)` holds. A handle keeps the environment open until it is closed or dropped, and
    so does each transaction that began in it.
    """

    __slots__ = ("__weakref__", "_env", "_opened")
    __class__ = property(lambda self: _real)
    fastload_per_worker: ClassVar[tuple[str, ...]] = ()
    _env: Any
    _opened: Any

    def __new__(  # noqa: D102
        cls,
        path: Any,
        map_size: int = 10485760,
        subdir: bool = True,
        readonly: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        open_real = partial(_real, path, map_size, subdir, readonly, *args, **kwargs)
        if not readonly:
            return open_real()
        settings = (map_size, subdir, args, kwargs)
        with _lock:
            worker, file = _is_worker(), _file(path, subdir)
            opened = _by_file.get(file) if file else None
            # The main thread may open what a worker opened, as it could beside a worker process.
            env = opened.shared(settings) if opened and (worker or opened.by_worker) else None
            shared = env is not None
            if not shared:
                env = _opened_after(opened, open_real)
                opened = _remember(env, file, settings)
                opened.by_worker = worker
            if not (worker or shared):
                return env
            handle = object.__new__(cls)
            handle._env, handle._opened = env, opened
            return handle

    def __getattr__(self, name: str) -> Any:
        if self._env is None:
            raise _lmdb.Error("Attempt to operate on closed/deleted/dropped object.")
        return getattr(self._env, name)

    def __enter__(self) -> Environment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'Environment' object")

    def close(self) -> None:
        """Close this handle. The last handle to be closed closes the environment."""
        with _lock:
            env, self._env = self._env, None
            if env is not None:
                self._opened.unclosed -= 1
                if not self._opened.unclosed:
                    env.close()

    def open_db(self, key: Any = None, txn: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Open a named database. Only one thread does so at a time: otherwise two names could get one number."""
        if key is not None and txn is not None:
            raise _lmdb.Error(
                "Workers share this environment, so none can open a named database inside a transaction. "
                f"open_db({key!r}, txn=...) was called. Call open_db({key!r}) before the transaction begins."
            )
        with _lock:
            return self.__getattr__("open_db")(key, txn, *args, **kwargs)


def install(is_worker: Callable[[], bool]) -> None:
    """Replace lmdb's own environment class by `Environment`, in every module that holds it by any name.

    `is_worker` says whether the calling thread is a worker; a second call replaces only it. lmdb is imported, so that
    code that imports it later finds the stand-in. Without lmdb, nothing happens.
    """
    global _lmdb, _real, _is_worker
    known = "lmdb" in sys.modules  # otherwise no other module can hold it
    try:
        lmdb: Any = importlib.import_module("lmdb")
    except ImportError:
        return
    with _lock:
        _is_worker = is_worker
        if lmdb.Environment is Environment:
            return
        _lmdb, _real = lmdb, lmdb.Environment
        for name, module in list(sys.modules.items()):
            # Not `isinstance`: cffi's libraries claim to be modules, but have no `__dict__`.
            if issubclass(type(module), ModuleType) and (known or name.startswith("lmdb")):
                held = object.__getattribute__(module, "__dict__")  # does not load a lazy module
                for variable, value in list(held.items()):
                    if value is _real and held is not globals():
                        held[variable] = Environment


def adopt(env: Any) -> None:
    """Let workers share a read-only environment that was opened before `install`, perhaps by a dataset's `__init__`.

    Its arguments are unknown, so a worker's arguments are compared with its flags. Ignore anything else.
    """
    if type(env) is not _real:
        return
    with _lock:
        flags = _Opened(env, None).flags()
        if flags and flags["readonly"]:
            file = _file(env.path(), flags["subdir"])
            if file and (file not in _by_file or _by_file[file].env() is not env):
                _remember(env, file, None)


def _file(path: Any, subdir: bool) -> _File | None:
    """Return the identity of an environment's data file, or None if the file does not exist."""
    path = os.fsdecode(path)
    try:
        found = os.stat(os.path.join(path, "data.mdb") if subdir else path)
    except OSError:
        return None
    return os.getpid(), found.st_dev, found.st_ino


def _remember(env: Any, file: _File | None, settings: _Settings | None) -> _Opened:
    opened = _Opened(env, settings)
    if file:
        _by_file[file] = opened
    return opened


def _opened_after(last: _Opened | None, open_real: Callable[[], Any]) -> Any:
    """Open an environment. If the last one of its file is closed, wait until lmdb has finished closing it.

    It closes without the GIL, in the thread that drops the last reference, and does not say when it is done.
    """
    if last is not None and last.flags() is None:
        for pause in (0.001, 0.01, 0.1, 1.0):
            try:
                return open_real()
            except _lmdb.Error:
                threading.Event().wait(pause)
    return open_real()
