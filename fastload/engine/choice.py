"""The kind of workers: processes, or what was measured to read plainly safe code better."""

from __future__ import annotations

import gc
import logging
import warnings
from dataclasses import replace
from typing import NamedTuple

from fastload._kit.cores import cores_of_rank
from fastload.engine.choices import is_local_rank_0, known
from fastload.errors import SharedStateWarning
from fastload.memory.slots import SlotPool
from fastload.processes.starting import mpi_is_used
from fastload.reading.fetch import Fetcher
from fastload.reading.notices import Notices
from fastload.safety import CodeSafety
from fastload.settings import Settings
from fastload.telemetry.prediction import Kind

_log = logging.getLogger("fastload")

UNMEASURED = "nothing is measured yet"

_told: set[tuple[str, str]] = set()
"""What was logged: each kind and reason once per process."""


class Chosen(NamedTuple):
    """Who reads a loader's samples."""

    kind: str
    """ "thread", "process", "none" for the loop itself, or "torch"."""
    number: int
    """The number of workers: 0 for the loop itself."""
    reason: str
    """Why "auto" chose it, or ""."""
    processes: int = 0
    """Over how many processes the workers are spread; 0 if none is started."""
    adapts: bool = False
    """Whether a later epoch may be read by another kind, if that was measured to be better."""


def who_reads(settings: Settings) -> Chosen:
    """Return who reads under these settings, whose kind of workers is chosen."""
    method = "process" if settings.processes else settings.worker_method
    n, reason, adapts = settings.num_workers, settings.worker_reason, settings.worker_adapts
    if not n or method == "none":
        return Chosen("none", 0, reason or "num_workers is 0", adapts=adapts)
    return Chosen(method, n, reason, settings.processes, adapts)


def choose(settings: Settings, *, stacklevel: int, before: Chosen | None = None) -> Settings:
    """Return settings with a kind of workers in place of "auto", and the reason for it.

    Code that is not plainly safe is read by processes, as in torch. Plainly safe code is read by what was measured to
    be best for such a loader. If nothing was, it is read by threads if that only copies memory, else by processes.
    What was chosen `before`, at an earlier `iter()`, stays unless the code has changed or another kind is better.
    If "thread" was asked for, warn of what threads are known to share and samples change.
    """
    settings.check_loadable()
    if settings.worker_method != "auto":  # threads, of this process or of several
        if before is None:
            _warn_of_shared(settings, _read_code(settings, whole=True), stacklevel + 1)
        return settings
    best = known(settings)
    if before is not None and best is not None:
        stays = best[:2] == (before.kind, before.processes)
        before = before if stays and not before.reason.endswith(UNMEASURED) else None
    # Code that has become unsafe is safe in processes with one worker each, and in no others.
    if before is None or before.processes != settings.num_workers:
        found = _read_code(settings, whole=False)
        if before is None or not found.plain:
            before = _choose(settings, found, stacklevel + 1, before, best)
            _tell(before)
    return replace(
        settings,
        worker_method=before.kind,
        worker_reason=before.reason,
        worker_processes=before.processes or None,
        worker_adapts=before.adapts,
    )


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
        said = f"fastload: in threads, samples can be wrong: {fault.what}.{remedy}"
        warnings.warn(said, SharedStateWarning, stacklevel=stacklevel + 1)


def _choose(
    settings: Settings,
    found: CodeSafety,
    stacklevel: int,
    before: Chosen | None,
    best: Kind | None,
) -> Chosen:
    """Return who reads code that was found to be plainly safe or not. `best` is what was measured, if anything was."""
    n = settings.num_workers
    cuda = "the dataset holds CUDA tensors" if found.cuda else ""
    why = "MPI is in use" if mpi_is_used() else cuda
    if found.plain and why:
        return Chosen("thread", n, f"{found.reason}, and {why}")
    if found.plain:
        kind, processes, reason = best or _unmeasured(settings)
        number = 0 if kind == "none" else n
        adapts = best is not None or kind == "process"
        return Chosen(kind, number, f"{found.reason}, and {reason}", min(n, processes), adapts)
    if not why:
        return Chosen("process", n, found.reason, n)
    if before is not None and before.reason.startswith(why):
        return before
    warnings.warn(
        f"fastload: threads read what is not plainly safe in threads: {found.reason}. Worker processes are no choice: "
        f'{why}. worker_method="thread" silences this.',
        SharedStateWarning,
        stacklevel=stacklevel + 1,
    )
    return Chosen("thread", n, f"{why}, although {found.reason}")


def _unmeasured(settings: Settings) -> Kind:
    """Return who reads plainly safe code of which nothing was measured."""
    source = Fetcher(settings, SlotPool(channels_last=False), Notices(set())).source
    if source.is_light(settings.samples_per_batch) and not settings.pin_memory:
        return Kind("none", 0, "the loop copies a batch faster than it is handed over")
    if source.copies:
        return Kind("thread", 0, "reading only copies memory")
    processes = min(settings.num_workers, cores_of_rank())
    return Kind("process", processes, UNMEASURED)


def _tell(chosen: Chosen) -> None:
    kind, _, reason, *_ = chosen
    if (kind, reason) in _told or not is_local_rank_0():
        return
    _told.add((kind, reason))
    names = {"thread": "threads", "process": "processes", "none": "none: the loop reads"}
    _log.info("fastload: workers are %s: %s", names[kind], reason)
