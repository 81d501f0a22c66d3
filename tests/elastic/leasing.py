"""Loaders of leases, and works that run at once, for the tests of leases and of the stores that hold them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

import fastload
from fastload.elastic import Leases, LeaseSampler
from fastload.elastic.watch import Watch

# Neither divides: 11 shards, the last of 40, batches of 40, 40, 16.
LENGTH, SHARD, BATCH = 1000, 96, 40
DEADLINE_S = 60.0

Make = Callable[..., Leases]


def loader_of(
    leases: Leases, dataset: Any = None, *, batch: int = BATCH, **options: Any
) -> fastload.DataLoader[Any]:
    """Return a loader of the indices, or of a dataset."""
    data = range(leases.terms.length) if dataset is None else dataset
    options = {"num_workers": 2, "seed": 0} | options
    return fastload.DataLoader(data, batch_sampler=LeaseSampler(leases, batch), **options)


def samples(batches: Iterable[torch.Tensor]) -> list[int]:
    """Return the indices in batches of them."""
    return [int(index) for batch in batches for index in batch]


def watch_of(leases: Leases) -> Watch:
    return leases._join()


def lease_threads() -> list[str]:
    """Return the names of the threads that leases have started."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("fastload-lease", "fastload-events"))]


def together(*works: Callable[[], Any]) -> list[Any]:
    """Return what some works give, each in a thread. Raise what the first of them raised."""
    found: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(k: int, work: Callable[[], Any]) -> None:
        try:
            found[k] = work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(works)]
    # `torch.get_rng_state` makes an object under a lock. If a garbage collection begins there and lets the GIL go, a
    # second thread that asks for the state waits for that lock with the GIL: neither goes on.
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), errors
    finally:
        gc.enable()
    if errors:
        raise errors[0]
    return found
