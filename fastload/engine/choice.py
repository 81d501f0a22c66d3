"""Who reads: what the user asked for. By "auto", processes, or for plainly safe code what was measured to be best.

What was measured is remembered for the next epoch, the next loader of the same kind, and the next run, by what is read:
the classes of the dataset and of what it holds, numbers in them, `collate_fn`, `num_workers`. A file that
FASTLOAD_CHOICES names keeps it for the next run.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from fastload._kit.cores import cores_of_rank
from fastload._kit.disk import write_file
from fastload.engine.pinning import pins
from fastload.errors import SharedStateWarning
from fastload.processes.starting import mpi_is_used
from fastload.reading.fetch import Fetcher
from fastload.safety import CodeSafety
from fastload.safety.objects import own_dict
from fastload.settings import PROCESSES, Settings
from fastload.telemetry import Stats
from fastload.telemetry.prediction import Kind, best_kind


class Chosen(NamedTuple):
    """Who reads a loader's samples."""

    kind: str
    """ "thread", "process", "none" for the loop itself, or "torch"."""
    number: int
    """The number of workers: 0 for the loop itself."""
    reason: str = ""
    """Why fastload chose it, or "" if you did."""
    processes: int = 0
    """Over how many processes the workers are spread; 0 if none is started."""
    adapts: bool = False
    """Whether a later epoch may be read by another kind, if that was measured to be better."""
    measured: Kind | None = None
    """What was measured to be best before the choice, if anything was."""


ENVIRONMENT = "FASTLOAD_CHOICES"

_KINDS = "thread", "process", "none"

_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")

_known: dict[str, Kind] = {}
"""By what is read. Each value is replaced, never changed, so threads need no lock."""

_read: set[str] = set()
"""The files of choices that were read."""


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
    light = what.is_light and not pins(settings)
    if settings.worker_method != "auto":
        if light:
            return Chosen("none", 0, _LIGHT)
        asks = settings.worker_method in PROCESSES
        processes = min(n, settings.worker_processes or n) if asks else 0
        if processes < n and before is None:  # threads, of this process or of several
            _warn_of_shared(settings, _read_code(settings, whole=True), stacklevel + 1)
        return Chosen("process" if asks else "thread", n, processes=processes)
    best = known(settings)
    # Code that has become unsafe is safe in processes with one worker each, and in no others.
    if before is not None and before.number == before.processes == n and before.measured == best:
        return before
    found = _read_code(settings, whole=False)
    cuda = "the dataset holds CUDA tensors" if found.cuda else ""
    why = "MPI is in use" if mpi_is_used() else cuda
    if why:
        reason = f"{found.reason}, and {why}" if found.plain else f"{why}, although {found.reason}"
        chosen = Chosen("thread", n, reason)
        if chosen != before and not found.plain:
            _warn_of_threads(found.reason, why, stacklevel + 1)
    elif not found.plain:
        chosen = Chosen("process", n, found.reason, n, measured=best)
    else:
        if best is not None:
            kind, processes, reason = best
        elif light:
            kind, processes, reason = "none", 0, _LIGHT
        elif what.source.copies:
            kind, processes, reason = "thread", 0, "reading only copies memory"
        else:
            kind, processes, reason = "process", cores_of_rank(), "nothing is measured yet"
        number, adapts = 0 if kind == "none" else n, best is not None or kind == "process"
        reason = f"{found.reason}, and {reason}"
        chosen = Chosen(kind, number, reason, min(n, processes), adapts, best)
    if chosen != before:
        _tell(chosen)
    return chosen


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


# ---- what was measured ----


def known(settings: Settings) -> Kind | None:
    """Return the kind of workers that was measured to be best for such a loader, in this process or an earlier run.

    Raises ValueError if the file of choices cannot be understood.
    """
    path = os.environ.get(ENVIRONMENT)
    if path and path not in _read:
        _known.update(_choices_of(Path(path)))
        _read.add(path)
    found = _known.get(_what_is_read(settings))
    in_time = found is None or found.kind != "none" or not settings.timeout
    return found if in_time else None  # the loop cannot interrupt a sample


def learn(settings: Settings, stats: Stats) -> None:
    """Remember what an epoch of a loader shows."""
    best = best_kind(replace(stats, cores=min(stats.cores, cores_of_rank())))
    what = _what_is_read(settings)
    before = _known.get(what)
    if best is None or not what or (before is not None and before[:2] == best[:2]):
        return
    _known[what] = best
    path = os.environ.get(ENVIRONMENT)
    if path and is_local_rank_0():
        _write(Path(path), what, best)


def forget() -> None:
    """Forget what was measured in this process, and what files said."""
    _known.clear()
    _read.clear()


def is_local_rank_0() -> bool:
    """Return whether this process is no rank, or the first of its node."""
    return not any(os.environ.get(name, "0") != "0" for name in _LOCAL_RANK)


# ---- the file ----


def _choices_of(path: Path) -> dict[str, Kind]:
    """Return the choices of a file, by what is read. Keys of a later version are left out."""
    try:
        choices = json.loads(path.read_text())
        return {
            what: _choice_of(**{k: one[k] for k in Kind._fields}) for what, one in choices.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise ValueError(
            f'{ENVIRONMENT}={path}: expected JSON such as {{"what is read": {{"kind": "process", "processes": 2, '
            '"reason": ""}}. The kind may also be "thread" or "none", with 0 processes. Mend or delete the file. '
            f"({type(exc).__name__}: {exc})"
        ) from None


def _choice_of(kind: str, processes: int, reason: str) -> Kind:
    some = processes > 0 if kind == "process" else processes == 0
    if kind in _KINDS and type(processes) is int and some:
        return Kind(kind, processes, reason)
    raise ValueError(f"got {processes!r} processes of the kind {kind!r}")


def _write(path: Path, what: str, best: Kind) -> None:
    """Put a choice into the file. If two processes write at once, one choice may be lost, but the file is whole."""
    try:
        choices = {**_choices_of(path), what: best}
        text = json.dumps({k: v._asdict() for k, v in choices.items()}, indent=2) + "\n"
        write_file(path, text.encode(), durable=False)
    except (OSError, ValueError) as exc:
        warnings.warn(f"fastload: {ENVIRONMENT}: the choice is not kept: {exc}", stacklevel=2)


# ---- what is read ----


def _what_is_read(settings: Settings) -> str:
    """Return the key under which a choice is kept: equal for loaders of such samples, also in the next run.

    Return "" if that cannot be known. Then no choice is kept.
    """
    read = settings.dataset, settings.collate_fn, settings.batch_size
    try:
        digest = blake2b(_shape(read, iter(range(200))).encode(), digest_size=4).hexdigest()
        return f"{_name(type(settings.dataset))}, num_workers={settings.num_workers} ({digest})"
    except Exception:  # a class may lack a name, and the user's threads may change a dict meanwhile
        return ""


def _shape(x: Any, left: Iterator[int]) -> str:
    """Return the classes and numbers of which an object consists, up to as many parts as are `left`.

    This runs no user code. Long containers and texts count by their class: two sets of files are read alike.
    """
    kind = type(x)
    if x is None or kind in (bool, int, float):
        return repr(x)
    if kind is FunctionType or issubclass(kind, type):
        return _name(x)
    inner: Any = ()
    if kind in (list, tuple):
        inner = x
    elif kind is dict:
        inner = x.values()
    else:
        inner = own_dict(x).values()
    few = zip(inner if len(inner) <= 32 else (), left, strict=False)
    return f"{_name(kind)}({', '.join(_shape(part, left) for part, _ in few)})"


def _name(x: Any) -> str:
    return f"{x.__module__}.{x.__qualname__}"
