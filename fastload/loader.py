"""`fastload.DataLoader`: torch's DataLoader, with threads. Wires the stages; owns epochs and what ends them."""

from __future__ import annotations

import logging
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, MapDataPipe, Sampler

from fastload import workers
from fastload.collate import SlotPool
from fastload.errors import LoaderClosedError, LoaderTimeoutError, TooManyErrorsError
from fastload.fetch import (
    Batch,
    Fetcher,
    OnError,
    annotate,
    contained,
    neutral_modes,
    pass_signals,
    shown,
)
from fastload.sampler import RankSampler, integer, mix64
from fastload.telemetry import Stats
from fastload.window import Window
from fastload.workers import pin_batch, serve

T = TypeVar("T", covariant=True)

_log = logging.getLogger("fastload")

_NO_STATS = Stats(
    epoch=-1,
    workers=0,
    depth=0,
    samples=0,
    batches=0,
    errors=0,
    elapsed_s=0.0,
    consumer_wait_s=0.0,
    worker_wait_s=0.0,
    occupancy=0.0,
)


class DataLoader(TorchDataLoader[T]):
    """A drop-in for `torch.utils.data.DataLoader` that loads with threads.

    All of torch's arguments keep their meaning; `num_workers` counts threads (0 runs the same code
    in the loop's own thread). An iterable data set goes through torch's own iterator for now, with
    a warning. Memory: at most

        (batches in flight + batches kept by the loop + 1) x bytes of a batch

    where the batches in flight are at most `prefetch_batches`, or `prefetch_factor * num_workers`
    where only that is given, or by default `2 + ceil(num_workers / batch_size)`; `2 + num_workers`
    where a batch is one worker's work (a `collate_fn` of the user's, `__getitems__`, a
    TensorDataset, `batch_size=None`). A TensorDataset with batches of up to 1 MiB needs no thread:
    the loop gathers them itself, sooner than a thread could hand them over.

    Args beyond torch's, all keyword-only:
        seed: the order of `shuffle=True` becomes a pure function of (seed, epoch), on every machine;
            torch's global random state is not touched, and `generator` must be None. None: the draws
            are torch's own, the batches those of torch's DataLoader under the same
            `torch.manual_seed`.
        on_error: what to do when a sample raises. "raise": the batch raises in its place, `next()`
            goes on after it. "skip": the batch is shorter by the sample (never refilled). A callable
            gets `(index, exception)` on a worker thread and returns a sample, or `fastload.SKIP`. A
            batch that loses all its samples raises `EmptyBatchError`.
        max_errors: samples that `on_error` may skip or replace in one epoch; one more raises
            `TooManyErrorsError` in place of its batch. None: any number.
        copy_dataset: each worker reads a deep copy of the data set of its own, made at `iter()`: for
            those that cannot be shared between threads (a file handle with a position, h5py).
        prefetch_batches: batches in flight at most. Without effect with `num_workers=0`.
        worker_method: "thread", or "process" for torch's own iterator: the way out for data sets
            that hold the GIL.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        on_error: OnError = "raise",
        max_errors: int | None = None,
        copy_dataset: bool = False,
        prefetch_batches: int | None = None,
        worker_method: Literal["thread", "process"] = "thread",
    ) -> None:
        if worker_method not in ("thread", "process"):
            raise ValueError(f'worker_method must be "thread" or "process", got {worker_method!r}')
        if on_error not in ("raise", "skip") and not callable(on_error):
            raise ValueError(
                f'on_error must be "raise", "skip" or a callable (index, exception), got {on_error!r}'
            )
        if max_errors is not None and integer("max_errors", max_errors) < 0:
            raise ValueError(
                f"max_errors must be 0 or more, or None for any number, got {max_errors}"
            )
        if prefetch_batches is not None and integer("prefetch_batches", prefetch_batches) < 1:
            raise ValueError(f"prefetch_batches must be 1 or more, got {prefetch_batches}")
        if seed is not None:
            seed = integer("seed", seed)
        if seed is not None and generator is not None:
            raise ValueError(
                "seed and generator exclude each other: with a seed, the order is drawn from it alone"
            )
        if worker_method == "process" and (on_error != "raise" or max_errors is not None):
            raise ValueError('on_error and max_errors need worker_method="thread"')
        self.worker_method = worker_method
        self.seed = seed
        self.on_error = on_error
        self.max_errors = max_errors
        self.copy_dataset = copy_dataset
        self.prefetch_batches = prefetch_batches
        self._next_epoch = 0
        self._epoch = -1
        # To close them; only the user holds them, so that a forgotten one ends by itself.
        self._iterators: weakref.WeakSet[ThreadIterator] = weakref.WeakSet()
        self._threads: list[threading.Thread] = []  # of all iterators; those that may still run
        self._tally: _Tally | None = None
        unsampled = sampler is None and batch_sampler is None and _is_map_style(dataset)
        if seed is not None and shuffle and unsampled:
            sampler = RankSampler(dataset, rank=0, world_size=1, seed=seed)  # type: ignore[arg-type]
            shuffle = None
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if self._threaded:
            # Torch's constructor makes 2 of None. As it was given, a loader rebuilt from its
            # attributes is the same.
            self.prefetch_factor = prefetch_factor
        _refuse_two_partitions(dataset, self._samplers())

    # ---- what torch asks of a loader ----

    @property
    def _threaded(self) -> bool:
        return self.worker_method == "thread" and _is_map_style(self.dataset)

    def check_worker_number_rationality(self) -> None:
        """Torch's warning about more workers than cores: threads that wait for storage cost no core."""
        if self.worker_method == "process":
            super().check_worker_number_rationality()

    def __iter__(self) -> Any:
        """Begin the next epoch; with persistent workers, whatever is left of the one before is dropped."""
        self._epoch = self._begin_epoch()
        iterator: Any = self._iterator
        if isinstance(iterator, ThreadIterator) and not iterator.alive:
            self._iterator = None  # closed, or left behind in the parent by a fork
        return super().__iter__()

    def _get_iterator(self) -> Any:
        if self._threaded:
            return ThreadIterator(self)
        if self.worker_method == "thread":
            warnings.warn(
                "fastload: iterable data sets are not loaded with threads yet; this one goes through torch's own "
                'iterator (processes). worker_method="process" says the same without this warning.',
                stacklevel=3,
            )
        return super()._get_iterator()

    def __getstate__(self) -> dict[str, Any]:
        """A loader pickles and copies without its threads, iterators and counts."""
        return {
            **self.__dict__,
            "_iterator": None,
            "_iterators": None,
            "_threads": [],
            "_tally": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._iterators = weakref.WeakSet()

    # ---- what is ours ----

    def set_epoch(self, epoch: int) -> None:
        """Fix the epoch of the next `iter()`; epochs after it count on. A sampler with `set_epoch` is told."""
        self._next_epoch = integer("epoch", epoch)
        for sampler in self._samplers():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self._next_epoch)

    def stats(self) -> Stats:
        """Counts and waits of the latest epoch begun; of torch's own iterators, nothing is known."""
        return _NO_STATS if self._tally is None else self._tally.stats()

    def close(self) -> None:
        """End all threads of this loader, after the calls that they are in. `iter()` starts new ones.

        Iterators still held raise `LoaderClosedError`. A call that does not return is waited for
        five seconds, then its thread is named in a warning and left behind.
        """
        for iterator in list(self._iterators):
            iterator.close()
        workers.join(self._threads)  # also those of iterators that the loop has let go
        self._threads = []
        self._iterator = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _samplers(self) -> list[Any]:
        """The samplers that may know of epochs and ranks: the batch sampler, what it batches, the sampler."""
        batch_sampler = self.batch_sampler
        found = [batch_sampler, getattr(batch_sampler, "sampler", None), self.sampler]
        return list({id(s): s for s in found if s is not None}.values())

    def _begin_epoch(self) -> int:
        """The epoch that this `iter()` runs: our samplers go on by themselves, others are asked for theirs."""
        epoch = self._next_epoch
        for sampler in self._samplers():
            if isinstance(sampler, RankSampler):
                epoch = sampler.begin_epoch()
            elif isinstance(getattr(sampler, "epoch", None), int):
                epoch = sampler.epoch
        self._next_epoch = epoch + 1
        return epoch


class ThreadIterator(Iterator[Any]):
    """One pass over a loader's data; with persistent workers, one after another. Made by `iter(loader)`."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        if loader.num_workers == 0 and loader.timeout:
            raise ValueError(
                "timeout needs num_workers > 0: without workers nobody could stop waiting"
            )
        factor = 1 if loader.prefetch_factor is None else loader.prefetch_factor
        if integer("prefetch_factor", factor) == 0 and loader.prefetch_batches is None:
            raise ValueError("prefetch_factor must be 1 or more to load anything, got 0")
        self._pid = os.getpid()
        self._pins = loader.pin_memory and _can_pin(loader)
        self._timeout = min(loader.timeout, threading.TIMEOUT_MAX) or None
        self._dataset = loader.dataset
        self._sampler = loader._index_sampler
        self._sampler_iter = iter(self._sampler)
        base_seed = _base_seed(loader)
        if loader.num_workers and loader.seed is None:
            # As torch does with workers: a sampler that draws in `__iter__` itself draws twice.
            self._sampler_iter = iter(self._sampler)
        self._fix_epoch(loader)
        pool = SlotPool()
        self._fetcher = Fetcher(
            loader.dataset,
            batched=loader._auto_collation,
            collate_fn=loader.collate_fn,
            on_error=loader.on_error,
            pool=pool,
        )
        light = (
            not self._pins
            and loader.worker_init_fn is None
            and self._fetcher.is_light(loader.dataset, _batch_size(loader))
        )
        num_workers = 0 if light else loader.num_workers
        self._inline = num_workers == 0
        self._window: Window[Batch] = Window(
            _depth(loader, self._fetcher, num_workers),
            in_order=loader.in_order,
            collected=self._pins and not self._inline,
        )
        pool.limit = self._window.depth + 1
        self._tally = loader._tally = _Tally(num_workers)
        # Holds no reference to the iterator, which may die anywhere, also in a thread of its own: so
        # the threads are told to end and not waited for.
        weakref.finalize(self, _retire, self._tally, self._window).atexit = False
        self._begin(loader)
        if loader.worker_init_fn is None:
            self._issue_ahead()  # a thread finds work the moment that it is there
        self._threads = workers.start(
            self._window,
            self._fetcher,
            loader.dataset,
            num_workers=num_workers,
            copy_dataset=loader.copy_dataset,
            init_fn=loader.worker_init_fn,
            base_seed=base_seed,
        )
        loader._threads = [t for t in loader._threads if t.is_alive()] + self._threads
        loader._iterators.add(self)
        self._issue_ahead()

    def _reset(self, loader: DataLoader[Any]) -> None:
        """Begin another epoch with the same workers; torch's `DataLoader.__iter__` calls it under this name."""
        self._sampler_iter = iter(self._sampler)
        self._fix_epoch(loader)
        self._begin(loader)
        self._issue_ahead()

    def _fix_epoch(self, loader: DataLoader[Any]) -> None:
        """Let our sampler begin now, in the epoch of this `iter()`: torch's BatchSampler would at the first batch."""
        if any(isinstance(sampler, RankSampler) for sampler in loader._samplers()):
            self._sampler_iter = chain(list(islice(self._sampler_iter, 1)), self._sampler_iter)

    def _begin(self, loader: DataLoader[Any]) -> None:
        self._persistent = loader.persistent_workers
        self._max_errors = loader.max_errors
        self._handled = 0
        self._exhausted = False  # the sampler has given all its indices
        self._ended = False  # and the loop has had all its batches
        self._ordinal = 0
        self._position = 0
        self._window.begin()
        self._tally.begin(loader._epoch, self._window)

    # ---- the loop's side ----

    def __iter__(self) -> ThreadIterator:
        return self

    def __len__(self) -> int:
        return len(self._sampler)

    def __next__(self) -> Any:
        while not self._ended:
            with self._window.taking:
                batch = None if self._ended else self._take()
                if batch is None:
                    self._end()
                    break
                self._count(batch)
            if batch.error is not None:
                # The traceback of the error holds this frame and, where it was caught, the batch: with
                # the error in neither, it is in no reference cycle; and whoever keeps a worker's
                # error does not keep this iterator and its threads with it.
                error, batch.error = batch.error, None
                annotate(error, batch.where)
                try:
                    raise error
                finally:
                    del error, self
            if not batch.left_out:
                # An error that `on_error` was given may be kept, and with it the batch, and this frame
                # where there are no workers: not its data.
                try:
                    return batch.data
                finally:
                    batch.data = None
        raise StopIteration

    def _take(self) -> Batch | None:
        if self._pid != os.getpid():
            raise LoaderClosedError(
                f"this iterator belongs to process {self._pid}, from which this one was forked: "
                "begin an epoch of your own here with iter(loader)"
            )
        self._window.check()
        self._issue()
        if self._inline:
            self._serve()
        try:
            batch = self._window.take(self._timeout)
        except LoaderTimeoutError as exc:
            raise LoaderTimeoutError(
                f"{exc}. Nothing is lost, next() may be called again. The workers were here:\n"
                f"{workers.whereabouts(self._threads)}"
            ) from None
        self._issue_ahead()
        return batch

    def _issue_ahead(self) -> None:
        if not self._inline:
            self._issue()

    def _issue(self) -> None:
        """Fill the window. The only place that runs the sampler, and only on the loop's thread, as torch does."""
        while not self._exhausted and self._window.has_room():
            place = {
                "epoch": self._tally.epoch,
                "ordinal": self._ordinal,
                "position": self._position,
            }
            try:
                batch = self._fetcher.batch(next(self._sampler_iter), **place)
            except StopIteration:
                self._exhausted = True
                return
            except BaseException as exc:
                pass_signals(exc)
                batch = Batch(0, [], size=0, **place)
                batch.error, batch.where = contained(exc), f"{batch}; stage: sampler"
            self._ordinal += 1
            self._position += batch.size
            self._window.issue(batch)
            if batch.error is not None:
                self._window.complete(batch)

    def _serve(self) -> None:
        """Without workers: do here, in the modes of a fresh thread, what a worker would."""
        started = perf_counter()
        try:
            with neutral_modes():
                while self._window.has_work() and serve(
                    self._window, self._fetcher, self._dataset, None
                ):
                    pass
        except BaseException:
            self._window.discard()  # Ctrl-C: this batch will not come, and must not be waited for
            raise
        self._tally.served_s += perf_counter() - started

    def _count(self, batch: Batch) -> None:
        tally = self._tally
        tally.batches += not batch.left_out
        tally.errors += len(batch.handled) + (batch.error is not None)
        for k, exc in sorted(batch.handled.items()):
            what = "skipped" if k in batch.skipped else "replaced"
            _log.warning(
                "fastload: %s sample index %s: %s: %s",
                what,
                shown(batch.indices[k]),
                type(exc).__name__,
                shown(exc, str),
            )
        self._handled += len(batch.handled)
        if batch.handled and self._max_errors is not None and self._handled > self._max_errors:
            last = batch.handled[max(batch.handled)]
            batch.error = TooManyErrorsError(
                f"{self._handled} samples of epoch {batch.epoch} failed, max_errors={self._max_errors} allows fewer"
            )
            batch.error.__cause__ = last
            batch.data = None
        batch.handled.clear()  # the errors refer to the batch by their tracebacks
        if self._pins and self._inline and batch.error is None:
            pin_batch(batch)
        if batch.error is None:
            tally.samples += batch.size - len(batch.skipped)

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._tally.end()
        if not self._persistent:
            self._window.close()
            workers.join(self._threads)

    # ---- anyone's ----

    @property
    def alive(self) -> bool:
        """Whether another epoch can be run with these threads."""
        return not self._window.closed

    def close(self) -> None:
        """Let the threads end, after the calls that they are in; `next()` then raises `LoaderClosedError`."""
        _retire(self._tally, self._window)

    def __reduce__(self) -> Any:
        raise TypeError("an iterator with threads cannot be pickled or copied; pickle its loader")


class _Tally:
    """What an iterator counts in an epoch. Outlives it, so that `loader.stats()` can be asked after the loop."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._window: Window[Batch] | None = None
        self._final = _NO_STATS

    def begin(self, epoch: int, window: Window[Batch]) -> None:
        """Count anew, with what `window` counts since its own `begin()`."""
        self.epoch = epoch
        self.samples = 0
        self.batches = 0
        self.errors = 0
        self.served_s = 0.0  # without workers, the loop waits for itself
        self._started = perf_counter()
        self._window = window

    def stats(self) -> Stats:
        """A snapshot; after the end, the last one."""
        window = self._window
        if window is None:
            return self._final
        waits = window.counts()
        return Stats(
            epoch=self.epoch,
            workers=self._workers,
            depth=window.depth,
            samples=self.samples,
            batches=self.batches,
            errors=self.errors,
            elapsed_s=perf_counter() - self._started,
            consumer_wait_s=waits.consumer_wait_s + self.served_s,
            worker_wait_s=waits.worker_wait_s,
            occupancy=waits.occupancy if self._workers else 0.0,
        )

    def end(self) -> None:
        """Keep the figures as they are, and the window no longer: batches in flight lie in it."""
        self._final = self.stats()
        self._window = None


def _retire(tally: _Tally, window: Window[Batch]) -> None:
    window.close()
    tally.end()


def _depth(loader: DataLoader[Any], fetcher: Fetcher, workers: int) -> int:
    """Batches in flight at most; see the docstring of `DataLoader`."""
    if workers == 0:
        return 1
    if loader.prefetch_batches is not None:
        return loader.prefetch_batches
    if loader.prefetch_factor is not None:
        return loader.prefetch_factor * workers
    if fetcher.batches_in_parallel:
        return 2 + workers
    return 2 + math.ceil(workers / (_batch_size(loader) or 1))


def _batch_size(loader: DataLoader[Any]) -> int | None:
    """Samples in a batch; None where a batch sampler of the user's does not say."""
    size = loader.batch_size or getattr(loader._index_sampler, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else None


def _base_seed(loader: DataLoader[Any]) -> int:
    """What `get_worker_info().seed` counts from: torch's draw, in torch's place, or a function of (seed, epoch)."""
    if loader.seed is not None:
        return mix64(mix64(loader.seed) ^ loader._epoch) >> 1
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())


def _can_pin(loader: DataLoader[Any]) -> bool:
    """Whether there is anything to pin for; warns in torch's words where there is not."""
    if loader.pin_memory_device:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{loader.pin_memory_device}'.",
            stacklevel=4,
        )
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if accelerator is None:
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, "
            "then device pinned memory won't be used.",
            stacklevel=4,
        )
    elif accelerator.type == "mps":
        warnings.warn(
            "'pin_memory' argument is set as true but not supported on MPS now, device pinned memory won't be used.",
            stacklevel=4,
        )
    return accelerator is not None and accelerator.type != "mps"


def _is_map_style(dataset: Any) -> bool:
    return not isinstance(dataset, IterableDataset | MapDataPipe)


def _refuse_two_partitions(dataset: Any, samplers: list[Any]) -> None:
    if not getattr(dataset, "partitioned_by_rank", False):
        return
    for sampler in samplers:
        world_size = getattr(sampler, "world_size", getattr(sampler, "num_replicas", 1))
        if world_size > 1:
            raise ValueError(
                f"{type(dataset).__name__} holds only the part of its rank, and {type(sampler).__name__} "
                f"would take one of {world_size} parts of that: give the whole data set to the sampler, "
                "or drop the sampler"
            )
