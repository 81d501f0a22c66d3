"""The loop's side of the pipeline: fills the window out of the order, takes batches, begins and ends epochs."""

from __future__ import annotations

import logging
import math
import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from fastload import workers
from fastload.batch import Batch
from fastload.draws import single_sampler
from fastload.errors import LoaderClosedError, LoaderTimeoutError, TooManyErrorsError
from fastload.faults import annotate, shown
from fastload.fetch import Fetcher
from fastload.hashing import mix64
from fastload.isolation import Isolation, Own
from fastload.lanes import LaneFetcher, LaneOrder, Part, iterable_state
from fastload.order import Order, SampledOrder, is_function, partition, sampled_state
from fastload.randomness import (
    Streams,
    chosen_modules,
    current_stream,
    entered,
    leave,
    routable,
)
from fastload.sampler import RankSampler, integer
from fastload.slots import SlotPool
from fastload.state import State
from fastload.tally import Tally
from fastload.telemetry import Recorder, span, waiting_span
from fastload.window import FILL_SECONDS, RUN_SECONDS, Window
from fastload.workers import LOOP, Site, can_pin, finish, neutral_modes, pin_batch, read_run

if TYPE_CHECKING:
    from fastload.loader import DataLoader

TELL_SECONDS = 10.0
"""How often `on_stats` is called within an epoch."""

_log = logging.getLogger("fastload")


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
        self._loader = weakref.ref(loader)
        self._pins = loader.pin_memory and can_pin(loader.pin_memory_device, stacklevel=4)
        self._timeout = min(loader.timeout, threading.TIMEOUT_MAX) or None
        self._sampler = loader._index_sampler
        pool = SlotPool(channels_last=loader.memory_format is torch.channels_last)
        self._fetcher = self._make_fetcher(loader, pool)
        light = (
            not self._pins
            and loader.worker_init_fn is None
            and self._fetcher.is_light(batch_size(loader))
        )
        num_workers = 0 if light else loader.num_workers
        self._inline = num_workers == 0
        # Without workers and a seed, Python's and NumPy's functions draw from the loop's own state.
        keys = not self._fetcher.copies and (loader.seed is not None or not self._inline)
        modules = routable(chosen_modules(loader.random_modules)) if keys else frozenset()
        streams = Streams(
            modules, keyed=keys and not loader.iterable, seeded=loader.seed is not None
        )
        # Before the sampler draws: what is refused changes nothing.
        isolation = _isolation(loader) if keys or not self._inline else None
        if isolation is not None and not self._inline:
            isolation.check()
        self._dataset = loader.dataset
        self._site: Site | None = None  # of the loop, if there are no workers
        if self._inline:
            own = Own(loader.dataset, loader.collate_fn, None)
            own = own if isolation is None else isolation.originals()
            self._site = Site(0, own, None, streams.make(own))
            self._site.filler = self._fetcher.filler_of(own.dataset)
        self._window: Window[Batch] = Window(
            _depth(loader, self._fetcher, num_workers),
            in_order=loader.in_order,
            collected=self._pins and not self._inline,
            lanes=max(1, loader.num_workers) if loader.iterable else 1,
            max_bytes=loader.prefetch_bytes,
            run_seconds=FILL_SECONDS if self._fetcher.fills else RUN_SECONDS,
        )
        self._fetcher.pause = self._window.pause
        pool.limit = self._window.depth + 1
        self._tally = loader._tally = Tally(num_workers, pool, asked=loader.num_workers)
        # Holds no reference to the iterator, which may die anywhere, also in a thread of its own: so
        # the threads are told to end and not waited for.
        weakref.finalize(self, _retire, self._tally, self._window).atexit = False
        base_seed = self._begin_first(loader)
        if loader.worker_init_fn is None:
            self._issue()  # a thread finds work the moment that it is there
        self._threads: list[threading.Thread] = []
        if isolation is not None and not self._inline:
            self._threads = workers.start(
                self._window,
                self._fetcher,
                isolation,
                streams,
                num_workers=num_workers,
                base_seed=base_seed,
            )
        loader._threads = [t for t in loader._threads if t.is_alive()] + self._threads
        loader._iterators.add(self)
        self._issue()

    def _make_fetcher(self, loader: DataLoader[Any], pool: SlotPool) -> Fetcher:
        how: dict[str, Any] = {
            "collate_fn": loader.collate_fn,
            "on_error": loader.on_error,
            "retries": loader.retries,
            "pool": pool,
        }
        if not loader.iterable:
            return Fetcher(loader.dataset, batched=loader._auto_collation, **how)
        return LaneFetcher(
            loader.dataset,
            lanes=max(1, loader.num_workers),
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            **how,
        )

    # ---- epochs ----

    def _begin_first(self, loader: DataLoader[Any]) -> int:
        """Begin the first epoch, with the draws that torch makes, in torch's order; the base seed."""
        resume = loader._resume
        twice = loader.num_workers and loader.seed is None and not loader.iterable
        if resume is not None and resume.stream_seed is not None:
            base_seed = resume.stream_seed  # drawn already, when the epoch began
            order = self._make_order(loader)
        elif twice:
            iter(self._sampler)  # what draws in `__iter__` itself draws twice, as in torch
            base_seed = _base_seed(loader)
            order = self._make_order(loader)
        else:
            order = self._make_order(loader)
            base_seed = _base_seed(loader)
        self._window.begin()
        self._begin(loader, order, self._stream_seed(loader, base_seed))
        return base_seed

    def _reset(self, loader: DataLoader[Any]) -> None:
        """Begin another epoch with the same workers; torch's `DataLoader.__iter__` calls it under this name."""
        ahead = self._ahead
        if (
            ahead is not None
            and self._ended
            and loader._resume is None
            and ahead.about == fresh_state(loader, loader._epoch, loader._sampler_epoch)
        ):
            self._window.recount()
            self._begin(loader, ahead, None)
        else:
            self._window.begin()
            order = self._make_order(loader)
            self._begin(loader, order, self._stream_seed(loader, self._order.seed))
        self._issue()

    def _make_order(self, loader: DataLoader[Any]) -> Order:
        rank, _ = partition(self._sampler, loader.dataset)
        about: Any = fresh_state(loader, loader._epoch, loader._sampler_epoch)
        how: dict[str, Any] = {"rank": rank, "resume": loader._resume}
        if isinstance(self._fetcher, LaneFetcher):
            return LaneOrder(about, batch_size=self._fetcher.batch_size, **how)
        return SampledOrder(self._sampler, self._fetcher, about, **how)

    def _stream_seed(self, loader: DataLoader[Any], base_seed: int) -> int:
        resume = loader._resume
        if loader.seed is not None:
            return loader.seed
        if resume is not None and resume.stream_seed is not None:
            return resume.stream_seed
        return base_seed

    def _begin(self, loader: DataLoader[Any], order: Order, seed: int | None) -> None:
        """Begin an epoch; `seed` is None where it is under way already."""
        if seed is not None:
            order.begin(seed, self._new_recorders())
        self._order = loader._order = order
        loader._resume = None  # not before: state_dict() of another thread has one of the two
        self._ahead: SampledOrder | None = None  # the next epoch's, once it is under way
        self._runs_ahead = (
            loader.persistent_workers
            and loader.in_order
            and not self._inline
            and isinstance(order, SampledOrder)
            and is_function(self._sampler)
        )
        self._persistent = loader.persistent_workers
        self._max_errors = loader.max_errors
        self._handled = 0
        self._begun = False  # the loop has asked for a batch
        self._ended = False  # the loop has had all its batches
        self._warned = loader._warned
        self._keyed = loader.seed is not None or loader.num_workers > 0  # else torch's own draws
        self._on_stats = loader.on_stats
        self._told = perf_counter()
        self._tally.begin(order.epoch, self._window, order.recorders)

    def _new_recorders(self) -> list[Recorder]:
        return [Recorder() for _ in range(max(1, self._tally.workers) + 2)]

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._order.end()
        self._tally.end()
        if not self._persistent:
            self._window.close()
            workers.join(self._threads)
        self._tell()

    # ---- the loop's side ----

    def __iter__(self) -> ThreadIterator:
        return self

    def __len__(self) -> int:
        return len(self._sampler)

    def __next__(self) -> Any:
        if self._fetcher.noticed or self._fetcher.warnings:
            self._warn()
        if not self._begun:
            self._follow_set_epoch()
        while (batch := self._next_batch()) is not None:
            if batch.error is not None:
                # The traceback of the error holds this frame and, where it was caught, the batch: with
                # the error in neither, it is in no reference cycle; and whoever keeps a worker's
                # error does not keep this iterator and its threads with it.
                error, batch.error = batch.error, None
                annotate(error, batch.where, batch.hint)
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

    def _next_batch(self) -> Batch | None:
        """Return the next batch, which counts as delivered then, or None at the end of the epoch.

        Close the iterator if anything but a time-out is raised on the way, as Ctrl-C is: a batch that nobody got is not
        in the state, and the next `next()` raises `LoaderClosedError` in place of going on after it.
        """
        if self._window.is_taking():
            raise RuntimeError(
                "fastload: next() was called on an iterator by its own sampler, dataset or callback. It would wait "
                "for itself. Read from another iterator there, or return first."
            )
        with self._window.taking:
            if self._ended:
                return None
            if perf_counter() - self._told > TELL_SECONDS:
                self._tell()
            try:
                batch = self._take()
                if batch is not None:
                    if isinstance(batch, Part):
                        self._warn_of_length(batch)
                    self._count(batch)
                    self._order.delivered(batch)
            except LoaderTimeoutError:
                raise
            except BaseException:
                self.close()
                raise
            if batch is None:
                self._end()
        return batch

    def _follow_set_epoch(self) -> None:
        """Where the sampler was set to another epoch since `iter()`, and nothing was taken yet: that one.

        Lightning calls `iter()` first and the sampler's `set_epoch` then.
        """
        self._begun = True
        sampler, loader = single_sampler(self._sampler), self._loader()
        if loader is None or loader._epoch_is_set or not isinstance(sampler, RankSampler):
            return  # the loader's own `set_epoch` is for the next `iter()`
        if sampler.is_set and sampler.epoch == self._order.epoch:
            sampler.begin_epoch()  # it has begun
        elif sampler.is_set:
            loader._epoch = loader._begin_epoch()
            self._reset(loader)
            self._begun = True

    def _take(self) -> Batch | None:
        if self._pid != os.getpid():
            raise LoaderClosedError(
                f"this iterator belongs to process {self._pid}, from which this one was forked: "
                "begin an epoch of your own here with iter(loader)"
            )
        self._window.check()
        if self._inline:
            return self._read_here()
        self._issue()
        if self._ahead is not None:
            oldest = self._window.oldest()
            if oldest is None or oldest.epoch == self._ahead.epoch:
                return None
        try:
            with waiting_span():
                batch = self._window.take(self._timeout)
        except LoaderTimeoutError as exc:
            raise LoaderTimeoutError(
                f"{exc}. Nothing is lost, next() may be called again. The workers were here:\n"
                f"{workers.whereabouts(self._threads)}"
            ) from None
        self._issue()
        return batch

    def _issue(self) -> None:
        """Fill the window, if there are workers. The sampler runs here and in `_read_here`, on the loop's thread."""
        if self._inline:
            return
        order = self._ahead or self._order
        while not order.exhausted and self._window.has_room():
            started = perf_counter()
            with span("sampler"):
                batch = next(order, None)
            if batch is None:
                if self._ahead is not None or not self._runs_ahead:
                    return
                order = self._ahead = self._next_order()
                continue
            self._window.issue(batch)
            batch.recorders[LOOP].add("sampler", perf_counter() - started)
            if batch.error is not None:
                self._window.complete(batch)

    def _next_order(self) -> SampledOrder:
        """The next epoch's, which the workers begin while the loop is busy with the end of this one."""
        rank, _ = partition(self._sampler, self._dataset)
        about: Any = replace(self._order.about, epoch=self._order.epoch + 1)
        order = SampledOrder(self._sampler, self._fetcher, about, rank=rank)
        order.begin(self._order.seed, self._new_recorders())
        return order

    def _read_here(self) -> Batch | None:
        """Without workers: read the next batch here, in the modes of a fresh thread. None at the end."""
        assert self._site is not None
        started = perf_counter()
        with span("sampler"):
            batch = next(self._order, None)
        if batch is None:
            return None
        batch.recorders[LOOP].add("sampler", perf_counter() - started)
        if batch.error is None:
            stream, outer = self._site.stream, current_stream()
            drawing = nullcontext() if self._fetcher.copies else entered(stream)
            try:
                with neutral_modes(), drawing:
                    read_run(batch, 0, batch.units, self._fetcher, self._site)
                    finish(batch, self._fetcher, self._site)
            finally:
                leave(stream, outer)  # also if Ctrl-C struck as it was entered or left
        self._window.check()
        self._tally.served_s += perf_counter() - started
        return batch

    # ---- what is counted and told ----

    def _count(self, batch: Batch) -> None:
        for k, exc in sorted(batch.handled.items()):
            what = "skipped" if k in batch.skipped else "replaced"
            _log.warning(
                "fastload: %s sample index %s: %s: %s",
                what,
                shown(batch.indices[k]),
                type(exc).__name__,
                shown(exc, str),
            )
        if self._pins and self._inline and batch.error is None:
            pin_batch(batch)
        tally = self._tally
        tally.batches += not batch.left_out
        tally.errors += len(batch.handled) + (batch.error is not None)
        tally.retries += len(batch.retries)
        self._handled += len(batch.handled)
        if batch.handled and self._max_errors is not None and self._handled > self._max_errors:
            last = batch.handled[max(batch.handled)]
            batch.error = TooManyErrorsError(
                f"{self._handled} samples of epoch {batch.epoch} failed, max_errors={self._max_errors} allows fewer"
            )
            batch.error.__cause__ = last
            batch.data = None
        batch.handled.clear()  # the errors refer to the batch by their tracebacks
        if batch.error is None and not batch.left_out:
            tally.samples += batch.size - len(batch.skipped)
            tally.bytes += batch.nbytes

    def _tell(self) -> None:
        self._told = perf_counter()
        if self._on_stats is None:
            return
        try:
            self._on_stats(self._tally.stats())
        except BaseException as exc:
            annotate(exc, f"epoch {self._order.epoch}; stage: on_stats; no batch is lost")
            raise

    def _warn(self) -> None:
        """Warn, once for a loader, of what the workers noticed; before a batch is taken, so that none is lost where
        warnings are errors."""
        while self._fetcher.warnings:
            kind, what = self._fetcher.warnings.popleft()
            if kind not in self._warned:
                self._warned.add(kind)
                warnings.warn(f"fastload: {what}", RuntimeWarning, stacklevel=3)
        while self._fetcher.noticed:
            category, what = self._fetcher.noticed.popleft()
            if not self._keyed or what in self._warned:
                continue
            self._warned.add(what)
            warnings.warn(
                f"fastload: {type(self._dataset).__name__} seems to {what}",
                category,
                stacklevel=3,
            )

    def _warn_of_length(self, batch: Batch) -> None:
        """Warn as torch does if an iterable dataset gives more than its `len()` said."""
        loader = self._loader()
        declared: Any = None if loader is None else loader._IterableDataset_len_called
        batches = self._tally.batches + (not batch.left_out)
        if declared is not None and batches > declared:
            warnings.warn(
                f"Length of IterableDataset {self._dataset} was reported to be {declared} (when accessing "
                f"len(dataloader)), but {batches} samples have been fetched.",
                stacklevel=3,
            )

    # ---- anyone's ----

    def is_ready(self) -> bool:
        """Whether `next()` would give a batch of this epoch, or its error, without waiting or reading samples."""
        batch = None if self._ended or self._inline else self._window.ready()
        return batch is not None and batch.epoch == self._order.epoch

    def state_dict(self) -> dict[str, Any]:
        """The loader's state as of the batch that `next()` gave last; see `DataLoader.state_dict`."""
        return self._order.state()

    @property
    def alive(self) -> bool:
        """Whether another epoch can be run with these threads."""
        return not self._window.closed

    def close(self) -> None:
        """Let the threads end, after the calls that they are in; `next()` then raises `LoaderClosedError`."""
        _retire(self._tally, self._window)

    def __reduce__(self) -> Any:
        raise TypeError("an iterator with threads cannot be pickled or copied; pickle its loader")


def _retire(tally: Tally, window: Window[Batch]) -> None:
    window.close()
    tally.end()


def _depth(loader: DataLoader[Any], fetcher: Fetcher, num_workers: int) -> int:
    """Batches in flight at most; see the docstring of `DataLoader`."""
    if num_workers == 0:
        return 1
    if loader.prefetch_batches is not None:
        return loader.prefetch_batches
    if loader.prefetch_factor is not None:
        return loader.prefetch_factor * num_workers
    if fetcher.batches_in_parallel:
        return 2 + num_workers
    return 2 + math.ceil(num_workers / (batch_size(loader) or 1))


def fresh_state(loader: DataLoader[Any], epoch: int, sampler_epoch: int | None) -> State:
    """Return the state of a loader as an epoch begins."""
    about = iterable_state if loader.iterable else sampled_state
    return about(loader, epoch, sampler_epoch)


def batch_size(loader: DataLoader[Any]) -> int | None:
    """Samples in a batch; None where a batch sampler of the user's does not say."""
    size = loader.batch_size or getattr(loader._index_sampler, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else None


def _isolation(loader: DataLoader[Any]) -> Isolation:
    return Isolation(
        loader.dataset,
        loader.collate_fn,
        loader.worker_init_fn,
        # Threads cannot share an iterable dataset: each of them iterates over it.
        copy_dataset=loader.copy_dataset or ("state" if loader.iterable else False),
    )


def _base_seed(loader: DataLoader[Any]) -> int:
    """What `get_worker_info().seed` counts from: torch's draw, in torch's place, or a function of (seed, epoch)."""
    if loader.seed is not None:
        return mix64(mix64(loader.seed) ^ loader._epoch) >> 1
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
