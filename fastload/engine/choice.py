"""Who reads: what was asked for, else processes, or what was measured to read plainly safe code better."""

from __future__ import annotations

import gc
import logging
import warnings

from fastload._kit.cores import cores_of_rank
from fastload.engine.choices import Chosen, is_local_rank_0, known
from fastload.engine.pinning import pins
from fastload.errors import SharedStateWarning
from fastload.processes.starting import mpi_is_used
from fastload.reading.fetch import Fetcher
from fastload.safety import CodeSafety
from fastload.settings import PROCESSES, Settings
from fastload.telemetry.prediction import Kind

_log = logging.getLogger("fastload")

_told: set[tuple[str, str]] = set()
"""What was logged: each kind and reason once per process."""

_LIGHT = "the loop copies a batch faster than it is handed over"


def choose(what: Fetcher, *, stacklevel: int, before: Chosen | None = None) -> Chosen:
    """Return who is to read.

    By "auto", processes read code that is not plainly safe, as in torch. Plainly safe code is read by what was measured
    to be best for such a loader. If nothing was, it is read by threads if that only copies memory, else by processes.

    Args:
        what: what is read.
        stacklevel: of a warning of what threads are known to share and samples change; 1 is the caller.
        before: what was chosen at an earlier `iter()`. It stays unless the code has changed or another kind is better.
    """
    settings = what.settings
    n = settings.num_workers
    if not n:
        return Chosen("none", 0, "num_workers is 0")
    if settings.worker_method == "auto":
        return _automatic(what, stacklevel + 1, before)
    processes = min(n, settings.worker_processes or n) if settings.worker_method in PROCESSES else 0
    if what.is_light and not pins(what.settings):
        return Chosen("none", 0, _LIGHT)
    if processes < n and before is None:  # threads, of this process or of several
        _warn_of_shared(settings, _read_code(settings, whole=True), stacklevel + 1)
    return Chosen("process" if processes else "thread", n, processes=processes)


def _automatic(what: Fetcher, stacklevel: int, before: Chosen | None) -> Chosen:
    settings = what.settings
    n, best = settings.num_workers, known(settings)
    # Code that has become unsafe is safe in processes with one worker each, and in no others.
    if before is not None and before.number == before.processes == n and before.measured == best:
        return before
    found = _read_code(settings, whole=False)
    cuda = "the dataset holds CUDA tensors" if found.cuda else ""
    why = "MPI is in use" if mpi_is_used() else cuda
    if found.plain and why:
        chosen = Chosen("thread", n, f"{found.reason}, and {why}")
    elif found.plain:
        kind, processes, reason = best or _unmeasured(what)
        adapts = best is not None or kind == "process"
        number = 0 if kind == "none" else n
        chosen = Chosen(
            kind, number, f"{found.reason}, and {reason}", min(n, processes), adapts, best
        )
    elif why:
        chosen = Chosen("thread", n, f"{why}, although {found.reason}")
        if chosen != before:
            _warn_of_threads(found.reason, why, stacklevel + 1)
    else:
        chosen = Chosen("process", n, found.reason, n, measured=best)
    if chosen != before:
        _tell(chosen)
    return chosen


def _unmeasured(what: Fetcher) -> Kind:
    """Return who reads plainly safe code of which nothing was measured."""
    if what.is_light and not pins(what.settings):
        return Kind("none", 0, _LIGHT)
    if what.source.copies:
        return Kind("thread", 0, "reading only copies memory")
    processes = min(what.settings.num_workers, cores_of_rank())
    return Kind("process", processes, "nothing is measured yet")


def _read_code(settings: Settings, *, whole: bool) -> CodeSafety:
    """Return whether threads may run the code, by reading all of it (`whole`) or up to the first reason against it.

    The garbage collector is off meanwhile. It would count syntax trees, and look at all of torch: 180 ms.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return settings.survey.code(settings.random_modules, whole=whole)
    finally:
        if collects:
            gc.enable()


def _warn_of_shared(settings: Settings, found: CodeSafety, stacklevel: int) -> None:
    all_shared = settings.copy_dataset is False
    faults = (x for x in found.findings if x.shared or (all_shared and x.changes))
    if (fault := next(faults, None)) is not None:
        remedy = f" {fault.remedy.capitalize()}." if fault.remedy else ""
        said = f"fastload: data race, so samples can be wrong: {fault.what}.{remedy}"
        warnings.warn(said, SharedStateWarning, stacklevel=stacklevel + 1)


def _warn_of_threads(reason: str, why: str, stacklevel: int) -> None:
    warnings.warn(
        f"fastload: cannot prove that the code is thread-safe: {reason}. Worker processes cannot start: {why}. "
        'So threads read. worker_method="thread" silences this.',
        SharedStateWarning,
        stacklevel=stacklevel + 1,
    )


def _tell(chosen: Chosen) -> None:
    kind, reason = chosen.kind, chosen.reason
    if (kind, reason) in _told or not is_local_rank_0():
        return
    _told.add((kind, reason))
    names = {"thread": "threads", "process": "processes", "none": "none: the loop reads"}
    _log.info("fastload: workers are %s: %s", names[kind], reason)
