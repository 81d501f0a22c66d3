"""Who reads a loader's batches: the loop itself, threads, or processes. What each owns, and its random streams."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from fastload._kit.torch_private import make_worker_info, show_worker_info_in_threads
from fastload.engine import crew, workers
from fastload.engine.pinning import can_pin
from fastload.engine.team import Team
from fastload.engine.window import Window
from fastload.memory.batch import Batch
from fastload.memory.slots import SlotPool
from fastload.processes.segments import Segments
from fastload.random.worker_rng import WorkerRng
from fastload.reading.fetch import Fetcher
from fastload.reading.modes import modes_of_thread
from fastload.reading.notices import Notices
from fastload.reading.sources import own_indices
from fastload.reading.worker_context import WorkerContext, streams_of
from fastload.safety import WorkerCopies
from fastload.settings import Settings


def readers_of(settings: Settings, notices: Notices, *, stacklevel: int) -> Readers:
    """Return the readers of an iterator. All its epochs have the same.

    Args:
        settings: the loader's arguments.
        notices: collects warnings for the loop.
        stacklevel: of a warning that nothing can be pinned; 1 is the caller.

    Raises `DatasetCopyError` if an object of the dataset can neither be copied nor shared.
    """
    pins = settings.pin_memory and can_pin(settings.pin_memory_device, stacklevel=stacklevel + 1)
    pool = SlotPool(channels_last=settings.memory_format is torch.channels_last)
    fetcher = Fetcher(settings, pool, notices)
    # The loop copies a light batch faster than a worker could hand it over.
    light = settings.worker_init_fn is None and fetcher.source.is_light(settings.samples_per_batch)
    kind: type[Readers] = Processes if settings.processes else Threads
    if not settings.num_workers or settings.worker_method == "none" or (light and not pins):
        kind = Readers
    return kind(settings, fetcher, pool, pins=pins)


class Readers:
    """The loop itself. Threads and processes derive from it."""

    is_inline = True
    """Whether the loop itself reads."""
    in_turn = False
    """Whether other processes read whole batches, in turn, rather than workers in this process sharing each batch."""
    runs_ahead = True
    """Whether workers may read from the next epoch before the loop begins it."""

    def __init__(self, settings: Settings, fetcher: Fetcher, pool: SlotPool, *, pins: bool) -> None:
        self.workers = 0 if self.is_inline else settings.num_workers
        self.pins = pins
        self.fetcher = fetcher
        self._settings = settings
        self._segments = Segments()
        self.pools = pool, self._segments
        # Without workers and a seed, Python's and NumPy's functions draw from the loop's own state.
        draws = not fetcher.source.copies and settings.keyed
        self._streams = streams_of(settings, draws=draws)
        self._survey = settings.survey if self._owns_copies(draws) else None
        if self._survey is not None and settings.num_workers:
            self._survey.check()
            if settings.persistent_workers:
                self._survey.graph.keep_lists()

    def _owns_copies(self, draws: bool) -> bool:
        """Return whether readers need copies of the dataset, or a list of its generators, in this process."""
        return draws

    @cached_property
    def hear_of_the_loop(self) -> bool:
        """Whether the loop can change what samples are while workers run, as through a `multiprocessing.Value`."""
        return self._survey is not None and self._survey.hears_messages()

    def window(self) -> Window[Batch]:
        """Return a window for these readers."""
        settings, source = self._settings, self.fetcher.source
        parallel = source.batches_in_parallel or self.in_turn
        window: Window[Batch] = Window(
            settings.depth(self.workers, batches_in_parallel=parallel),
            in_order=settings.in_order,
            collected=self.pins and self.workers > 0,
            lanes=0 if self.in_turn else settings.lanes,
            max_bytes=settings.prefetch_bytes,
            run_seconds=source.run_seconds,
        )
        for pool in self.pools:
            pool.limit = window.depth + 1
        return window

    def of_loop(self, window: Window[Batch]) -> WorkerContext:
        """Return what the loop reads with if there are no workers.

        These are the loader's own objects, or copies of them if the loop reads in the place of workers.
        """
        settings = self._settings
        if self._survey is None:
            own = WorkerCopies(settings.dataset, settings.collate_fn, None)
        elif settings.worker_method == "none":
            own = self._survey.own()  # as worker 0 would have
        else:
            own = self._survey.originals()
        stream = self._streams.make(own.generators, initialised=False)
        wait, modes = window.changes.wait, modes_of_thread()
        if settings.persistent_workers:
            modes = modes.shared()
        return WorkerContext(0, own, None, stream, self.fetcher, wait, modes)

    def info_of_loop(self, base_seed: int, dataset: Any) -> Any:
        """Return the worker info of a loop that reads `dataset` in the place of workers, or None."""
        settings = self._settings
        if not settings.num_workers:
            return None
        show_worker_info_in_threads()
        return make_worker_info(0, settings.num_workers, base_seed, dataset, rng=WorkerRng())

    def batch(self, given: Any, **place: Any) -> Batch:
        """Return a new batch of what the sampler gave."""
        return self.fetcher.source.batch(given, **place)

    def start(self, window: Window[Batch], base_seed: int) -> Team:
        """Start the workers, if there are any."""
        return Team(window)


class Threads(Readers):
    """Threads of this process, with copies of their own. They share the runs of a batch."""

    is_inline = False

    def _owns_copies(self, draws: bool) -> bool:
        return True

    def start(self, window: Window[Batch], base_seed: int) -> Team:
        """See `workers.start`."""
        assert self._survey is not None
        return workers.start(
            window,
            self.fetcher,
            self._survey,
            self._streams,
            num_workers=self.workers,
            base_seed=base_seed,
        )


class Processes(Readers):
    """Processes, each of which reads whole batches, by one worker or by several that share its runs."""

    is_inline = False
    in_turn = True
    runs_ahead = False  # they have the dataset of `iter()`

    def _owns_copies(self, draws: bool) -> bool:
        # Several workers of a process do. Here, to see before a fork whether their objects can be copied.
        return self._settings.processes < self.workers

    def batch(self, given: Any, **place: Any) -> Batch:
        """See `Readers`.

        Batch k is read by worker k modulo their number, as in torch: code that changes what its process holds then
        gives the same samples in each run.
        """
        batch = super().batch(given, **place)
        batch.given, batch.builder, batch.units = own_indices(given), None, 1
        batch.lane = batch.ordinal % self.workers
        return batch

    def start(self, window: Window[Batch], base_seed: int) -> Team:
        """See `crew.start`."""
        return crew.start(window, self._settings, self._segments, self.fetcher.notices, base_seed)
