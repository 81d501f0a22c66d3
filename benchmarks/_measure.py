"""What a measured process runs: loaders with equal arguments, epochs under a clock, and a check of the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from fastload import DataLoader
from fastload.bench.figures import BenchError
from fastload.measure.repeats import turns

READERS = {
    "auto": "the default",
    "none": "no workers",
    "thread": "threads",
    "process": "processes",
    "spread": "threads in few processes",
    "torch": "torch's processes",
}
"""Kinds of readers, with their names."""


class NotMeasuredError(Exception):
    """Raised for a configuration that this machine cannot run. The message says why."""


@contextmanager
def open_readers(
    kind: str, dataset: Dataset[Any], readers: int, processes: int | None = None, **arguments: Any
) -> Iterator[TorchDataLoader[Any]]:
    """Yield a loader of a kind in READERS. All kinds get the same arguments, and defaults for the others.

    The kind "auto" gets nothing else, so it starts its workers in each epoch. Workers of all others persist from one
    epoch to the next. Those of kind "spread" are threads in `processes` processes.
    """
    if kind == "spread":
        arguments["worker_processes"] = processes
    if kind not in ("auto", "torch"):
        arguments["worker_method"] = {"none": "auto", "spread": "process"}.get(kind, kind)
    workers = 0 if kind == "none" else readers
    if kind != "auto":
        arguments.setdefault("persistent_workers", workers > 0)
    arguments["num_workers"] = workers
    loader = (TorchDataLoader if kind == "torch" else DataLoader)(dataset, **arguments)
    try:
        yield loader
    finally:
        if isinstance(loader, DataLoader):
            loader.close()


class Epoch(NamedTuple):
    """One pass over a loader. Both times count from `iter()`."""

    samples: int
    first_batch_s: float
    seconds: float
    """Until the last batch came. The end of the epoch is not in it."""


def run_epochs(
    batches: Iterable[Any], *, count: int, indices: Sequence[int] | torch.Tensor
) -> list[Epoch]:
    """Pass over `batches` `count` times, one pass after the other without a pause.

    A batch, or its last element, is the int64[B] of its samples' indices, which the dataset put there.

    Raise BenchError unless every pass delivered each of `indices` exactly once.
    """
    passes = [_run_epoch(batches) for _ in range(count)]
    expected = torch.as_tensor(indices).sort().values
    for number, (_, seen) in enumerate(passes):
        # Looked at only now: no loader can work ahead while its samples are checked.
        delivered = torch.cat(seen).sort().values if seen else expected[:0]
        if not torch.equal(delivered, expected):
            different = len(set(delivered.tolist()))
            raise BenchError(
                f"pass {number} delivered {len(delivered)} samples, {different} of them different, but "
                f"must deliver each of {len(expected)} exactly once"
            )
    return [epoch for epoch, _ in passes]


def _run_epoch(batches: Iterable[Any]) -> tuple[Epoch, list[torch.Tensor]]:
    seen: list[torch.Tensor] = []
    arrived = first = 0.0
    began = perf_counter()
    for batch in batches:
        arrived = perf_counter()
        first = first or arrived
        # A copy: a kept tensor would keep a loader from using its memory again.
        seen.append((batch if isinstance(batch, torch.Tensor) else batch[-1]).clone())
    return Epoch(sum(map(len, seen)), first - began, arrived - began), seen


def rate(epochs: Sequence[Epoch]) -> float:
    """Return the samples per second of the epochs together."""
    return sum(epoch.samples for epoch in epochs) / sum(epoch.seconds for epoch in epochs)


def steady(
    batches: Iterable[Any],
    *,
    warm_s: float,
    seconds: float,
    step: Callable[[Any], object] = lambda _: None,
) -> tuple[float, float]:
    """Return the steps a second, and the median seconds of a step without the wait for its batch.

    The loop goes over `batches` again and again. It is measured for `seconds`, from `warm_s` after the first batch on.
    """
    times: list[float] = []
    warm = began = 0.0
    for batch in chain.from_iterable(repeat(batches)):
        now = perf_counter()
        warm = warm or now + warm_s
        if not began and now >= warm:
            times.clear()
            began = now
        if began and now - began >= seconds:
            break
        step(batch)
        times.append(perf_counter() - now)
    return len(times) / (now - began), median(times)


def in_turns(
    ways: Mapping[str, Callable[[], object]],
    count: int,
    *,
    after: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Return the median seconds of each way. They take turns.

    The first turn does not count, nor does `after`, which follows each way.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _, (name, way) in turns([*ways.items()], count + 1):
        began = perf_counter()
        way()
        found[name].append(perf_counter() - began)
        after()
    return {name: median(times[1:]) for name, times in found.items()}
