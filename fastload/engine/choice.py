"""The kind of workers: processes, unless the code is plainly safe in threads and threads, or the loop, read faster."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from fastload.engine.trial import Trial
from fastload.errors import SharedStateWarning
from fastload.processes.starting import mpi_is_used
from fastload.settings import Settings
from fastload.verdicts import Verdict, verdict

_log = logging.getLogger("fastload")

_told: set[tuple[str, str]] = set()
"""What was logged: each kind and reason once per process."""

_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


class Chosen(NamedTuple):
    """Who reads a loader's samples."""

    kind: str
    """ "thread", "process", "none" for the loop itself, or "torch"."""
    number: int
    """The number of workers: 0 for the loop itself."""
    reason: str
    """Why "auto" chose it, or ""."""


def who_reads(settings: Settings) -> Chosen:
    """Return who reads under these settings, whose kind of workers is chosen."""
    method = "process" if settings.in_processes else settings.worker_method
    if not settings.num_workers or method == "none":
        return Chosen("none", 0, settings.worker_reason or "num_workers is 0")
    return Chosen(method, settings.num_workers, settings.worker_reason)


def choose(settings: Settings, *, stacklevel: int) -> Settings:
    """Return settings with a kind of workers in place of "auto", and the reason for it.

    Code that is not plainly safe is read by processes, as in torch. Plainly safe code is read by threads if its dataset
    fills rows, which hardly holds the GIL; by the loop if that costs less than handing a batch over; else by processes.
    If "thread" was asked for, warn of what threads are known to share and samples change.
    """
    with _no_collection():
        found = verdict(
            settings.dataset,
            settings.collate_fn,
            settings.worker_init_fn,
            random_modules=settings.random_modules,
            whole=settings.worker_method == "thread",
        )
    if settings.worker_method == "thread":
        all_shared = settings.copy_dataset is False
        for fault in (x for x in found.findings if x.shared or (all_shared and x.changes)):
            remedy = f" {fault.remedy.capitalize()}." if fault.remedy else ""
            warnings.warn(
                f"fastload: in threads, samples can be wrong: {fault.what}.{remedy}",
                SharedStateWarning,
                stacklevel=stacklevel + 1,
            )
            break
        return settings
    method, reason = _kind(settings, found, stacklevel + 1)
    _tell(method, reason)
    return replace(settings, worker_method=method, worker_reason=reason)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector off in the block. It would count syntax trees, and look at all of torch: 180 ms."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _kind(settings: Settings, found: Verdict, stacklevel: int) -> tuple[str, str]:
    """Return "thread", "process" or "none", and why."""
    if found.plain:
        trial = Trial(settings)
        if trial.is_light or (not trial.fills_rows and trial.costs_little()):
            why = "and the loop reads a batch faster than it is handed over"
            return "none", f"{found.reason}, {why}"
        if trial.fills_rows:
            return "thread", f"{found.reason}, and reading hardly holds the GIL"
        return "process", f"{found.reason}, but reading holds the GIL"
    cuda = "the dataset holds CUDA tensors" if found.cuda else ""
    why = "MPI is in use" if mpi_is_used() else cuda
    if not why:
        return "process", found.reason
    warnings.warn(
        f"fastload: threads read what is not plainly safe in threads: {found.reason}. Worker processes are no choice: "
        f'{why}. worker_method="thread" silences this.',
        SharedStateWarning,
        stacklevel=stacklevel + 1,
    )
    return "thread", f"{why}, although {found.reason}"


def _tell(method: str, reason: str) -> None:
    if (method, reason) in _told or any(os.environ.get(name, "0") != "0" for name in _LOCAL_RANK):
        return
    _told.add((method, reason))
    kind = {"thread": "threads", "process": "processes", "none": "none: the loop reads"}[method]
    _log.info("fastload: workers are %s: %s", kind, reason)
