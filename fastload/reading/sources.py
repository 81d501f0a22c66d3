"""The ways to read a run of a batch. A source fills what it can, and names what is missing.

`Fetcher` reads what is missing sample by sample, by the dataset's `__getitem__`. So errors, retries, skipped samples
and random streams have one path.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Protocol

import numpy as np
import torch

from fastload._kit.user_errors import contained, shown_indices
from fastload.memory.batch import Batch
from fastload.memory.collate import BatchBuilder, ListBuilder, list_builder
from fastload.random.streams import Stream
from fastload.reading.failures import Failures, Wait, fail
from fastload.reading.rows import Filler
from fastload.reading.runs import RUN_SECONDS


class Reader(Protocol):
    """What a source needs from the worker that reads. `WorkerContext` implements it."""

    dataset: Any
    stream: Stream
    filler: Filler | None
    """Fills rows from `dataset`, or None to read it sample by sample."""
    wait: Wait


class Source:
    """A map-style dataset that is read sample by sample: it fills nothing, so all is missing. Others derive from it.

    Args:
        builder: returns what collects the samples of a batch, given their number.
        batches_in_parallel: whether each worker reads its own batch, rather than all of them the same one.
    """

    run_seconds = RUN_SECONDS
    """How long a run of samples, which a worker claims at once, should last."""
    copies = False
    """Whether making a batch only copies memory: no user code runs, and nothing is drawn."""

    def __init__(
        self, builder: Callable[[int], BatchBuilder], *, batches_in_parallel: bool = True
    ) -> None:
        self._builder = builder
        self.batches_in_parallel = batches_in_parallel

    def batch(self, indices: Any, **place: Any) -> Batch:
        """Return a new batch of what the sampler gave. `place` holds the other arguments of `Batch`."""
        given = own_indices(indices)
        indices = given if isinstance(given, list | tuple) else list(given)
        n = len(indices)
        batch = Batch(max(1, n), indices, size=n, **place)
        batch.given, batch.builder = given, self._builder(n)
        return batch

    def ahead(self, batch: Batch) -> list[Any]:
        """Return the indices by which a batch is read, for `will_read`. Return none if they cannot be told."""
        return list(batch.indices)

    def fill(self, batch: Batch, start: int, stop: int, reader: Reader) -> Iterable[range]:
        """Fill units `start` to `stop` of a batch, as far as possible. Return the positions that are missing.

        Stop between two samples once the batch is dropped.
        """
        return (range(start, min(stop, len(batch.indices))),)

    def filler_of(self, dataset: Any) -> Filler | None:
        """Return the filler of a worker's own dataset, or None to read its samples one by one."""
        return None

    def is_light(self, batch_size: int | None) -> bool:
        """Return whether copying a batch takes less time than a hand-over between threads, and runs no user code."""
        return False


class Unbatched(Source):
    """Reads without batching: a "batch" is one sample, for any key that the sampler gave."""

    def batch(self, indices: Any, **place: Any) -> Batch:
        """See `Source`. A list comes from a sampler that batches. Any other key is one sample."""
        given = own_indices(indices)
        batch = Batch(1, [given], size=len(given) if isinstance(given, list) else 1, **place)
        batch.given, batch.builder = given, self._builder(1)
        return batch

    def ahead(self, batch: Batch) -> list[Any]:
        """See `Source`."""
        return list(batch.given if isinstance(batch.given, list) else batch.indices)


class Batches(Source):
    """Reads a batch with one call of the dataset's `__getitems__`."""

    def __init__(self, failures: Failures) -> None:
        super().__init__(list_builder)
        self._failures = failures

    def batch(self, indices: Any, **place: Any) -> Batch:
        """See `Source`. A slice, a generator or another non-collection counts as one sample, as in torch."""
        given = own_indices(indices)
        one = [given if isinstance(given, slice) else type(given).__name__]
        indices = given if _is_collection(given) else one
        batch = Batch(1, indices, size=len(indices), **place)
        batch.given = given
        return batch

    def ahead(self, batch: Batch) -> list[Any]:
        """See `Source`. One sample is what the dataset makes of it."""
        return list(batch.given) if _is_collection(batch.given) else []

    def fill(self, batch: Batch, start: int, stop: int, reader: Reader) -> Iterable[range]:
        """See `Source`. After an error that `on_error` handles, all is missing: so the bad samples are found."""
        attempt = 0
        while not batch.dropped:
            reader.stream.move(batch, None)
            try:
                batch.builder = ListBuilder(reader.dataset.__getitems__(batch.given))
                break
            except BaseException as exc:
                again = not isinstance(batch.given, Iterator)
                if again and self._failures.may_retry(batch, exc, attempt, reader.wait):
                    attempt += 1
                    continue
                if self._failures.are_handled(exc) and _is_collection(batch.given):
                    n = batch.first_failed = len(batch.indices)
                    batch.builder = self._builder(n)
                    return (range(n),)
                where = f"__getitems__({shown_indices(batch.indices)}), {batch}; stage: sample"
                fail(batch, 0, contained(exc), where)
                break
        return ()


def own_indices(indices: Any) -> Any:
    """Return a copy of indices that may change: a sampler may reuse its list, array or tensor."""
    if type(indices) is list:
        return indices.copy()
    if isinstance(indices, torch.Tensor):
        return indices.clone()
    return copy.copy(indices) if isinstance(indices, list | np.ndarray) else indices


def _is_collection(given: Any) -> bool:
    return isinstance(given, Sized) and isinstance(given, Iterable)
