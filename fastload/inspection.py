"""Whether a data set can be read by threads: it is read serially and in threads, and compared.

fastload check my_package.data:train_set
"""

from __future__ import annotations

import copy as copies
import io
import select
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import IterableDataset

from fastload.faults import shown
from fastload.loader import DataLoader
from fastload.randomness import global_states
from fastload.stats import seconds_in

LONGEST_S = 5.0
"""What is not clear about the GIL by then will not be."""

NAP_S, LATE = 200e-6, 3
"""Long enough that whoever waits for the GIL has taken it; where it is free, a nap ends within some 100 us more."""

Level = Literal["fault", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a data set, and what to do."""

    level: Level
    """"fault": threads would give other samples than a serial loop; "note": they would not, but read this."""
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.level}: {self.what}\n       {self.advice}"


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` saw."""

    dataset: str
    samples: int
    workers: int
    serial_ms: float
    """Milliseconds a sample, read serially."""
    cpu_share: float
    """Share (0 to 1) of that in which the thread computed; the rest it waited."""
    gil_share: float
    """Estimated share (0 to 1) of reading in which the GIL is held: how often another thread that wakes
    beside one reader does not get it at once."""
    threads_ratio: float
    """Samples a second in threads over those read serially."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether threads gave what a serial loop gives."""
        return all(finding.level != "fault" for finding in self.findings)

    def __str__(self) -> str:
        head = (
            f"{self.dataset}: {self.samples} samples, {self.serial_ms:.3g} ms each, {self.cpu_share:.0%} of it "
            f"computing, {self.gil_share:.0%} of it under the GIL (estimated); {self.workers} threads: "
            f"{self.threads_ratio:.2f} x serial"
        )
        verdict = (
            "Threads gave the samples of a serial loop, bit for bit."
            if self.ok
            else "Do not read this data set with threads as it is."
        )
        return "\n".join([head, *map(str, self.findings), verdict])


def check(dataset: Any, *, samples: int = 64, workers: int = 4, seed: int = 0) -> Report:
    """Read some samples of a data set serially and in threads, compare them, and say what to do.

    Args:
        dataset: a map-style or an iterable one. It is read about five times as often as `samples` says.
        samples: how many are compared; of a map-style one, spread over its length.
        workers: threads that read at once.
        seed: of the random streams, the same for all readings.

    What it can find: samples that differ between a serial loop and threads (a shared file position, a
    buffer that is used again), or between two serial loops (draws from global random state, the
    time); open files; an iterable data set that is its own iterator, or that every worker would read
    whole; time under the GIL. A race that did not show in these readings it cannot find.
    """
    if isinstance(dataset, IterableDataset):
        findings, count, serial, threads = _check_iterable(dataset, samples, workers, seed)
    else:
        findings, count, serial, threads = _check_map(dataset, samples, workers, seed)
    indices = None if isinstance(dataset, IterableDataset) else _spread(dataset, samples)
    gil_share = _gil_share(dataset, indices, count, seed) if count else 0.0
    if gil_share > 0.5 and serial.cpu_share > 0.5:
        findings.append(
            Finding(
                "note",
                f"{gil_share:.0%} of reading is under the GIL: threads cannot share it",
                'Let it run in NumPy, torch or Pillow, pack the data ready to use, or use worker_method="process".',
            )
        )
    return Report(
        dataset=type(dataset).__name__,
        samples=count,
        workers=workers,
        serial_ms=serial.ms,
        cpu_share=serial.cpu_share,
        gil_share=gil_share,
        threads_ratio=serial.ms / threads.ms if threads.ms else 0.0,
        findings=findings,
    )


def _check_map(
    dataset: Any, samples: int, workers: int, seed: int
) -> tuple[list[Finding], int, _Reading, _Reading]:
    findings: list[Finding] = []
    indices = _spread(dataset, samples)
    before = global_states()
    buffers: list[int] = []
    expected, serial = _read(dataset, indices, 0, seed, buffers=buffers)
    if buffers:
        findings.append(
            Finding(
                "fault",
                f"a sample changes when the next one is read: {len(buffers)} of {len(indices)} did",
                "Return a copy of the buffer that is used again.",
            )
        )
    _find_global_draws(before, global_states(), findings)
    again, _ = _read(dataset, indices, 0, seed)
    if differing := _differing(indices, expected, again):
        findings.append(
            Finding(
                "fault",
                f"two serial readings differ, in {differing}",
                "It depends on something beside index and random stream: draw from fastload.sample_generator() or "
                "fastload.sample_rng(), keep nothing between samples.",
            )
        )
    else:
        _find_races(dataset, indices, expected, workers, seed, findings)
    _find_files(dataset, findings)
    _, threads = _read(dataset, indices, workers, seed)
    return findings, len(indices), serial, threads


def _spread(dataset: Any, samples: int) -> list[int]:
    """The indices of some samples, spread over the data set."""
    length = len(dataset)
    count = min(samples, length)
    return [i * length // count for i in range(count)]


@dataclass(frozen=True, slots=True)
class _Reading:
    ms: float
    cpu_share: float


def _identity(samples: Any) -> Any:
    return samples


def _open(
    dataset: Any, indices: Iterable[int] | None, workers: int, seed: int, **how: Any
) -> DataLoader[Any]:
    if indices is not None:
        how["sampler"] = [*indices]
    return DataLoader(
        dataset, batch_size=None, collate_fn=_identity, num_workers=workers, seed=seed, **how
    )


def _read(
    dataset: Any,
    indices: Iterable[int] | None,
    workers: int,
    seed: int,
    *,
    copy: bool = False,
    limit: int | None = None,
    buffers: list[int] | None = None,
) -> tuple[list[Any], _Reading]:
    """The samples, or what raised in their place, one by one; each in the stream of its index.

    Into `buffers` go the numbers of the samples that changed when the next one was read.
    """
    got: list[Any] = []
    before: Any = None
    started = perf_counter()
    with _open(dataset, indices, workers, seed, copy_dataset=copy) as loader, _unwarned():
        iterator = iter(loader)
        while limit is None or len(got) < limit:
            try:
                sample = next(iterator)
            except StopIteration:
                break
            except Exception as error:
                sample = f"{type(error).__name__}: {shown(error, str)}"
            if buffers is not None and got and not _same(before, got[-1]):
                buffers.append(len(got) - 1)
            before = sample
            got.append(copies.deepcopy(sample))
        seconds = perf_counter() - started
        stats = loader.stats()
    busy = seconds_in(stats, "sample")
    return got, _Reading(
        ms=seconds * 1000 / max(1, len(got)),
        cpu_share=min(1.0, stats.sample_cpu_s / busy) if busy else 0.0,
    )


def _gil_share(dataset: Any, indices: Iterable[int] | None, samples: int, seed: int) -> float:
    """How often, beside one reading thread, this one finds the GIL taken when it wakes."""
    naps = taken = 0
    with _open(dataset, indices, 1, seed, prefetch_batches=samples) as loader, _unwarned():
        iterator = iter(loader)
        deadline = perf_counter() + LONGEST_S
        while loader.stats().workers and perf_counter() < deadline:
            started = perf_counter()
            select.select((), (), (), NAP_S)
            naps += 1
            taken += perf_counter() - started > LATE * NAP_S
            stats = loader.stats()
            read = stats.stages["sample"].count if "sample" in stats.stages else 0
            if read >= samples or stats.worker_wait_s > 0:
                break
        del iterator  # held until here: its threads end with it
    return taken / max(1, naps)


@contextmanager
def _unwarned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _switching_often() -> Iterator[None]:
    """Let threads take turns every 10 us in the block: races show sooner. The interval is the process's own."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _find_races(
    dataset: Any,
    indices: list[int],
    expected: list[Any],
    workers: int,
    seed: int,
    findings: list[Finding],
) -> None:
    """Read in threads, three times; where that differs from the serial reading, find what helps."""
    for _ in range(3):
        with _switching_often():
            threaded, _ = _read(dataset, indices, workers, seed)
        if differing := _differing(indices, expected, threaded):
            break
    else:
        return
    advice = 'Use worker_method="process", or open and keep such things in __getitem__, per thread.'
    try:
        with _switching_often():
            copied, _ = _read(dataset, indices, workers, seed, copy=True)
        if not _differing(indices, expected, copied):
            advice = "Use copy_dataset=True: with a copy for each worker, they are the same."
    except Exception as error:
        advice += f" (copy_dataset=True fails: {type(error).__name__}: {shown(error, str)})"
    findings.append(
        Finding(
            "fault", f"in {workers} threads, other samples than serially, in {differing}", advice
        )
    )


def _find_global_draws(before: Any, after: Any, findings: list[Finding]) -> None:
    for whose, old, new in zip(("Python's", "NumPy's", "torch's"), before, after, strict=True):
        if old != new:
            findings.append(
                Finding(
                    "fault",
                    f"it draws from {whose} global random state, which threads share",
                    "Draw from fastload.sample_generator() (torch) or fastload.sample_rng() (NumPy, Python's random).",
                )
            )


def _find_files(dataset: Any, findings: list[Finding]) -> None:
    """Name the attributes that are open files or look like handles: with a position that threads share."""
    for name, value in vars(dataset).items() if hasattr(dataset, "__dict__") else ():
        kind = type(value)
        is_handle = isinstance(value, io.IOBase) and not isinstance(value, io.BytesIO)
        if is_handle or kind.__module__.partition(".")[0] in (
            "h5py",
            "lmdb",
            "sqlite3",
            "zipfile",
            "tarfile",
        ):
            findings.append(
                Finding(
                    "note",
                    f"its attribute {name} is an open {kind.__module__}.{kind.__qualname__}: one position for all",
                    "Use copy_dataset=True if it can be copied, open it in each thread, or read with os.pread.",
                )
            )


def _check_iterable(
    dataset: Any, samples: int, workers: int, seed: int
) -> tuple[list[Finding], int, _Reading, _Reading]:
    findings: list[Finding] = []
    if iter(dataset) is dataset:
        findings.append(
            Finding(
                "note",
                "it is its own iterator: two loops over it at once share one position",
                "Each worker has a copy, so a loader is safe; make __iter__ return a new generator all the same.",
            )
        )
    _find_files(dataset, findings)
    before = global_states()
    serial, reading = _read(dataset, None, 0, seed, limit=samples)
    _find_global_draws(before, global_states(), findings)
    try:
        threaded, in_threads = _read(dataset, None, workers, seed, limit=samples)
    except Exception as error:
        findings.append(
            Finding(
                "fault",
                f"it cannot be copied for each worker: {type(error).__name__}: {shown(error, str)}",
                'Open in __iter__ what it reads from, or use num_workers=0 or worker_method="process".',
            )
        )
        return findings, len(serial), reading, reading
    if len(threaded) >= workers > 1 and all(_same(s, threaded[0]) for s in threaded[:workers]):
        findings.append(
            Finding(
                "fault",
                f"each of {workers} workers yields the same samples: an epoch has every sample {workers} times",
                "Yield a part of them, by torch.utils.data.get_worker_info().id and .num_workers.",
            )
        )
    return findings, len(serial), reading, in_threads


def _differing(indices: Sequence[Any], one: Sequence[Any], other: Sequence[Any]) -> str:
    """Which samples differ, in words; empty if none does."""
    pairs = zip(indices, one, other, strict=True)
    wrong = [index for index, a, b in pairs if not _same(a, b)]
    return f"{len(wrong)} of {len(indices)} samples (index {wrong[0]!r} first)" if wrong else ""


def _same(a: Any, b: Any) -> bool:
    """Whether two samples are equal, bit for bit; what has no notion of it counts as equal by type."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return _same(a.detach().cpu().numpy(), b.detach().cpu().numpy())
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if hasattr(a, "tobytes"):  # pictures
        return bool(a.tobytes() == b.tobytes())
    compares = getattr(type(a), "__eq__", None) is not getattr(object, "__eq__", None)
    return not compares or bool(a == b or (a != a and b != b))
