"""The kind of workers: threads if they are known to be right, otherwise processes."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from dataclasses import replace

from fastload.errors import SharedStateError, SharedStateWarning
from fastload.processes.starting import mpi_is_used, obstacle
from fastload.settings import Settings
from fastload.verdicts import Verdict, verdict

_log = logging.getLogger("fastload")

_told: set[tuple[str, str]] = set()
"""What was logged: each kind and reason once per process."""

_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def choose(settings: Settings, *, stacklevel: int) -> Settings:
    """Return settings with a kind of workers in place of "auto", and the reason for it.

    It is decided from the code that samples can reach, so that all ranks and epochs decide alike. If processes cannot
    start, threads read what is merely unknown, with a warning. If "thread" was asked for, only faults are told.

    Raises `SharedStateError` if threads are known to share what samples change and were asked for, or if threads are
    known to be wrong and processes cannot start.
    """
    read = settings.dataset, settings.collate_fn, settings.worker_init_fn
    # Syntax trees are many objects without cycles. The collector would count them, and look at all objects of torch:
    # 180 ms, within the first samples.
    collects = gc.isenabled()
    gc.disable()
    try:
        found = verdict(
            *read, copy_dataset=settings.copy_dataset, random_modules=settings.random_modules
        )
    finally:
        if collects:
            gc.enable()
    if settings.worker_method == "thread":
        _warn_of_faults(settings, found, stacklevel + 1)
        return settings
    chosen = _chosen(settings, found, stacklevel + 1)
    _tell(chosen, found)
    return chosen


def _warn_of_faults(settings: Settings, found: Verdict, stacklevel: int) -> None:
    """Tell the faults of threads that were asked for. `copy_dataset=False` asks for sharing, too."""
    for fault in found.findings:
        if fault.refused:
            return  # the copies raise
        remedy = fault.remedy or "leave it out of samples"
        sentence = (
            f'{fault.what}. {remedy[0].upper()}{remedy[1:]}, or leave worker_method at "auto"'
        )
        if fault.proven and fault.state and settings.copy_dataset is not False:
            raise SharedStateError(f"threads would read wrong samples: {sentence}")
        if fault.proven or fault.state:
            warnings.warn(
                f"fastload: in threads, samples can be wrong: {sentence}.",
                SharedStateWarning,
                stacklevel=stacklevel + 1,
            )
            return


def _chosen(settings: Settings, found: Verdict, stacklevel: int) -> Settings:
    reason = found.reason
    if found.kind == "thread":
        return replace(settings, worker_method="thread", worker_reason=reason)
    quiet = ""
    if not found.proven:
        cuda = "the dataset holds CUDA tensors" if found.cuda else ""
        quiet = "MPI is in use" if mpi_is_used() else cuda
    why = quiet or obstacle(settings)
    if not why:
        return replace(settings, worker_method="process", worker_reason=reason)
    if found.proven:
        remedy = found.findings[0].remedy.capitalize() or "Change that"
        raise SharedStateError(
            f"threads would read wrong samples: {reason}. Worker processes would not, but {why}. "
            f"{remedy}, or pass num_workers=0"
        )
    if not quiet:
        warnings.warn(
            f"fastload: threads read what is not known to be right in threads: {reason}. Worker processes cannot "
            f'start: {why}. worker_method="thread" silences this.',
            SharedStateWarning,
            stacklevel=stacklevel + 1,
        )
    return replace(settings, worker_method="thread", worker_reason=f"{why}, although {reason}")


def _tell(chosen: Settings, found: Verdict) -> None:
    told = chosen.worker_method, chosen.worker_reason
    if told in _told or any(os.environ.get(name, "0") != "0" for name in _LOCAL_RANK):
        return
    _told.add(told)
    remedy = found.findings[0].remedy if found.findings else ""
    _log.info(
        "fastload: workers are %s: %s%s",
        "threads" if told[0] == "thread" else "processes",
        told[1],
        f". To read with threads: {remedy}" if remedy and told[0] == "process" else "",
    )
