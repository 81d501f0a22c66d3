"""How worker processes start: as the program chose, such as by spawn, or by a fork if that is safe.

Else the fork server starts them. If it cannot, they are forked all the same, with a warning.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.popen_fork  # a new module would let a child search again
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, SimpleNamespace
from typing import Any

from fastload._kit.user_errors import shown
from fastload.errors import DatasetCopyError
from fastload.processes.child import Child
from fastload.processes.jobs import Job, Sealed
from fastload.processes.open_files import inherited
from fastload.processes.pausing import PAUSE_SECONDS, busy
from fastload.processes.preload import ORIGINAL
from fastload.processes.segments import Segments
from fastload.processes.worker_main import ask
from fastload.random import python_random, torch_random
from fastload.reading.modes import modes_of_thread
from fastload.reading.notices import Notices
from fastload.safety.graph import kind_of
from fastload.safety.libraries import LIBRARIES
from fastload.settings import Settings

_THREADED = {name: tuple(entry.pool.split()) for name, entry in LIBRARIES.items() if entry.pool}
"""Libraries that start threads when they are used, and how the names of the threads begin. A fork loses them."""

_LAUNCHER = ("PMI_", "PMIX_", "OMPI_", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", "HYDI_CONTROL_FD")
"""The variables by which an MPI launcher tells a process that it is a rank. A worker must not join as one."""

_SERVER: Any = getattr(multiprocessing.forkserver, "_forkserver", SimpleNamespace())
"""Multiprocessing's fork server, one for a process. Nothing public tells what the program had it import.

A Python without it gets an object that has no effect: then the server imports what the program told it to.
"""


def start_children(
    settings: Settings,
    processes: int,
    seed: int,
    segments: Segments,
    notices: Notices,
) -> list[Child]:
    """Start the worker processes of a loader, over which its workers are spread. Wait until all are set up.

    Raises the error of a start, of unpickling or of `worker_init_fn`, and `DatasetCopyError` if something must be
    pickled and cannot be. Then no process is left.
    """
    # No sampler, generator or callback: a worker does not use them, and they may not be picklable.
    theirs = replace(
        settings,
        sampler=None,
        generator=None,
        on_stats=None,
        multiprocessing_context=None,
        on_error=ask if callable(settings.on_error) else settings.on_error,
    )
    sealed = Sealed(theirs)
    # Search and register before the fork. Workers then share the tables of torch's operators (16 MiB), and do not touch
    # the memory of every module, which would copy it. Draws in this process stay as they are.
    torch_random.install()
    python_random.search()
    children: list[Child] = []
    try:
        with _context_of(settings) as (context, reason):
            method = context.get_start_method()
            if method == "fork":
                graph = settings.survey.graph
                sealed.generators = settings.survey.generators()
                if processes < settings.num_workers:
                    sealed.survey = settings.survey
                for kind, said in {"inherited": inherited(graph), "fork": reason}.items():
                    if said:
                        notices.warn(kind, said)
                notices.tell(stacklevel=7)
            workers = range(settings.num_workers)
            for k in range(processes):  # batch i is worker i's: so processes take turns
                job = Job(tuple(workers[k::processes]), seed, modes_of_thread())
                children.append(Child(job, settings, segments, notices))
                try:
                    _start(children[-1], context, sealed)
                except Exception as exc:
                    nested = "bootstrapping phase" in str(exc)  # a script without a main guard
                    if method == "fork" or isinstance(exc, OSError | EOFError) or nested:
                        raise
                    raise _cannot_be_pickled(settings, method, reason, exc) from exc
        for one in children:
            one.wait_until_ready()
    except BaseException:
        for one in children:
            one.kill()
        for one in children:
            one.end(1.0)
        raise
    return children


def _start(child: Child, context: BaseContext, sealed: Sealed) -> None:
    """Start a worker's process."""
    forks = context.get_start_method() == "fork"
    with _ctrl_c_waits(), nullcontext() if forks else _as_server_starts(_to_preload()):
        child.start(context, sealed)


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Handle SIGINT after the block. Python swallows what a handler raises in a callback of a fork."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    struck: list[Any] = []
    try:
        signal.signal(signal.SIGINT, lambda *what: struck.append(what))
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if struck:
            handler(*struck.pop())


@contextmanager
def _context_of(settings: Settings) -> Iterator[tuple[BaseContext, str]]:
    """Yield the multiprocessing context in which a loader's workers start, and why a fork is not safe, or "".

    For a fork, the threads of loaders stop. If one still reads after a second, a fork is not safe.
    """
    context, reason = _chosen(settings)
    late = f"another loader reads a sample that takes longer than {PAUSE_SECONDS:g} s"
    if context.get_start_method() == "fork":
        with busy.stopped() as alone, warnings.catch_warnings():
            # Python and JAX warn of any thread, polars of its import.
            warnings.filterwarnings(
                "ignore", r"This process \(pid|Using fork\(\) can|os\.fork\(\) was"
            )
            if not (alone or reason or settings.multiprocessing_context is not None):
                context, reason = _fallback(settings, late)
            if context.get_start_method() == "fork":
                yield context, reason
                return
    # Threads do not wait for a fork server, whose processes may take seconds to start.
    yield context, reason


def _chosen(settings: Settings) -> tuple[BaseContext, str]:
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "this process is a daemon of multiprocessing, and a daemon may not start processes. Start it with "
            'daemon=False, or use worker_method="thread" here'
        )
    given = settings.multiprocessing_context
    if isinstance(given, str):
        return multiprocessing.get_context(given), ""
    if given is not None:
        return given, ""
    method = multiprocessing.get_start_method(allow_none=True)
    # If it is not the first of all, which is the default, the program chose it.
    if method not in (None, "fork", multiprocessing.get_all_start_methods()[0]):
        return multiprocessing.get_context(method), ""
    if reason := _hazard_of_fork():
        return _fallback(settings, reason)
    return multiprocessing.get_context("fork"), ""


def _fallback(settings: Settings, reason: str) -> tuple[BaseContext, str]:
    """Return how workers start if a fork is not safe, and why: by the fork server, or as in torch if it cannot."""
    path = "" if mpi_is_used() else _unpicklable(settings)
    unfit = path and f"{path} cannot be pickled"
    # A new process imports the script. If that has no guard and is running now, it would start its loaders again.
    main, frame = vars(sys.modules["__main__"]), sys._getframe()
    while "__file__" in main and (frame := frame.f_back):  # type: ignore[assignment]
        runs = frame.f_globals is main and frame.f_code.co_name == "<module>"
        if runs and "__main__" not in frame.f_code.co_consts and not mpi_is_used():
            unfit = 'the script has no `if __name__ == "__main__":`'
    if not unfit:
        return multiprocessing.get_context("forkserver"), reason
    said = f"{reason}, so a fork is not safe. The fork server cannot start workers: {unfit}. So they are forked"
    return multiprocessing.get_context("fork"), f"{said}, and samples may hang"


def _unpicklable(settings: Settings) -> str:
    """Return the path of what cannot be sent to a new process, or ""."""
    names = ("dataset", "collate_fn", "worker_init_fn")
    return next(filter(None, (_path_of(getattr(settings, x), x, set()) for x in names)), "")


def mpi_is_used() -> bool:
    """Return whether MPI is initialised. Then forks may be unsafe."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized()


def _hazard_of_fork() -> str:
    """Return why a fork of this process may hang or fail, or ""."""
    if mpi_is_used():
        return "MPI is in use"
    running = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:  # it may end
            running.append(file.read())
    for name in sys.modules.keys() & _THREADED.keys():
        if any(thread.startswith(_THREADED[name]) for thread in running):
            return f"{name} runs threads, which do not survive a fork"
    return ""


def _to_preload() -> list[str]:
    """Return what a fork server is to import: what the program told it to, torch, fastload, and libraries in use here.

    They are those that survive a fork. A server has no code of the user's: what that opens or starts is unknown.
    """
    if not all(isinstance(path, str) for path in sys.path):
        return []  # multiprocessing writes the paths into the server's program, which would not be Python
    theirs = [*getattr(_SERVER, "_preload_modules", [])]
    if theirs == ["__main__"] and (_hazard_of_fork() or "mpi4py.MPI" in sys.modules):
        theirs = []  # multiprocessing's default: the script would import the hazard, and MPI would start there
    # In the order in which this process imported them, as some libraries fail in another.
    safe = [name for name in sys.modules if name in LIBRARIES and LIBRARIES[name].fork == "yes"]
    return [*theirs, *safe, "fastload.processes.preload"]


@contextmanager
def _as_server_starts(preload: list[str]) -> Iterator[None]:
    """Let a fork server that starts in the block import modules. Hide an MPI launcher's variables, so it is no rank.

    Up to Python 3.13 a server searches its working directory first, and not what was added to `sys.path`. It would
    import other modules than this process did, and its workers would keep them. `preload` restores the variables.

    Several threads may be in such a block. A process has one server, and none leaves the block before it runs.
    """
    theirs = getattr(_SERVER, "_preload_modules", [])
    variables = dict.fromkeys(name for name in os.environ if name.startswith(_LAUNCHER))
    if preload:
        searched = [path for path in sys.path if isinstance(path, str)]  # Python skips others
        paths = {"PYTHONPATH": os.pathsep.join(searched), "PYTHONSAFEPATH": "1"}
        variables |= {**paths, ORIGINAL: json.dumps({name: os.environ.get(name) for name in paths})}
    _put(variables)
    _SERVER._preload_modules = preload
    try:
        yield
    finally:
        _SERVER._preload_modules = theirs
        _put({name: os.environ.get(name) for name in variables})


def _put(variables: Mapping[str, str | None]) -> None:
    """Set variables for new processes alone, not in `os.environ`. None deletes one."""
    for name, value in variables.items():
        if value is None:
            os.unsetenv(name)
        else:
            os.putenv(name, value)


def _cannot_be_pickled(settings: Settings, method: str, reason: str, error: Exception) -> Exception:
    """Return the error that says which part of a loader's arguments cannot be sent to a new process."""
    why = f", because {reason}" if reason else ""
    return DatasetCopyError(
        f"{_unpicklable(settings) or 'an argument'} cannot be pickled: {shown(error, str)}. "
        f"Worker processes start by {method}{why}, so they need dataset, collate_fn and worker_init_fn as pickles. "
        "Create such objects at the first sample, use functions of modules in place of lambdas and local functions, or "
        + ('pass multiprocessing_context="fork"' if not reason else 'use worker_method="thread"')
    )


def _path_of(x: Any, path: str, seen: set[int]) -> str:
    """Return the path of the innermost part of `x` that cannot be pickled, or "" if it can be."""
    if id(x) in seen or len(seen) > 10_000:
        return ""
    seen.add(id(x))
    if _can_be_sent(x):
        return ""
    for way, part in () if isinstance(x, FunctionType) else kind_of(type(x)).parts(x):
        if found := _path_of(part, path + way, seen):
            return found
    return f"{path} ({type(x).__module__}.{type(x).__qualname__})"


def _can_be_sent(x: Any) -> bool:
    try:
        sent = ForkingPickler.dumps(x)
    except RuntimeError as exc:
        # A lock or queue of multiprocessing: only while a process starts.
        return "inheritance" in str(exc)
    except Exception:
        return False
    # A new process finds nothing that was typed at a prompt or in a notebook.
    return hasattr(sys.modules["__main__"], "__file__") or b"__main__" not in bytes(sent)
