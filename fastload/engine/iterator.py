"""The loop's side of the pipeline: fills the window from the order, takes batches, begins and ends epochs."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

from fastload._kit.user_errors import annotate
from fastload.engine.epoch_counts import EpochCounts
from fastload.engine.pinning import LOOP
from fastload.engine.readers import Loop, Readers
from fastload.engine.team import Team, join
from fastload.engine.window import Window
from fastload.errors import LoaderClosedError, LoaderTimeoutError, StateError, WorkerDiedError
from fastload.memory.batch import Batch
from fastload.order.batches import can_run_ahead, has_pure_order
from fastload.order.epochs import Epochs
from fastload.order.order import Order
from fastload.order.sampler_state import rank_sampler
from fastload.telemetry import span, waiting_span

AHEAD = 2
"""Of how many batches beyond the one that it reads a loop without workers tells a dataset; see `LookAhead`."""


class LoaderIterator(Iterator[Any]):
    """One epoch of a loader; with persistent workers, one epoch after another. `iter(loader)` makes it.

    Args:
        readers: read its batches.
        epochs: says which epoch begins, and after which batch.
    """

    team: Team
    _order: Order

    def __init__(self, readers: Readers, epochs: Epochs) -> None:
        self._settings = readers.what.settings
        self._pid = os.getpid()
        self._epochs = epochs
        self._begin_order = partial(
            epochs.begin_order,
            make_batch=readers.what.source.batch,
            workers=readers.who.number,
        )
        self._timeout = min(self._settings.timeout, threading.TIMEOUT_MAX) or None
        self._notices = readers.what.notices
        self._readers = readers
        self._window = readers.window
        self.counts = EpochCounts(readers.who, readers.pools)
        # The iterator may be collected in any thread, also in one of its own. So the finalizer holds no reference
        # to it, closes the window, and does not wait for the threads.
        weakref.finalize(self, _retire, self.counts, self._window).atexit = False
        self._seed: int | None = None  # of the latest epoch's streams
        self._ahead: Order | None = None  # of the next epoch, if the workers have begun it
        self._ended = False
        self._told = deque[Batch]()  # what the loop reads next, if it is to read itself

    # ---- epochs ----

    def begin(self) -> None:
        """Begin the first epoch, and start the workers, or begin another one with the same workers.

        If Ctrl-C strikes, some workers may have begun it: they are not used again.
        """
        settings, readers = self._settings, self._readers
        try:
            with self._epochs.beginning(seeded=settings.seed is not None):
                ahead = self._ahead if self._ended else None
                self._order = order = self._begin_order(settings, running=self._seed, ahead=ahead)
                self._ahead = None
                if order is not ahead:
                    self._window.discard()
                    self._told.clear()
                    readers.ahead.forget()
                self._begun = False  # whether the loop has asked for a batch
                self._ended = False
                self.counts.begin(settings, order.epoch, self._window, order.recorders)
                starts, self._seed = self._seed is None, order.seed
                if starts:
                    may_fail = settings.worker_init_fn is not None or readers.ahead.listens
                    if not (may_fail or readers.in_turn):
                        self._issue()  # before the threads start: each finds work at once
                    self.team = readers.start(order.worker_seed)
                    self.counts.children = self.team.children
                self._issue()
        except BaseException as exc:
            if not isinstance(exc, StateError):  # it leaves a running epoch as it was
                self.close()
            raise

    def _begin_early(self) -> Order | None:
        """Return the order of the next epoch if the workers may begin it while the loop works on the end of this one.

        They may not if the loop may change its order or its samples first, or if they have begun it already.
        """
        settings = self._settings
        if (
            self._ahead is None
            and settings.begin_early
            and settings.persistent_workers
            and settings.in_order
            and has_pure_order(settings.sampler)
            and self._readers.may_begin_early
        ):
            with suppress(Exception):  # the next `iter()` raises it again
                self._ahead = self._begin_order(settings, running=self._seed, early=True)
            return self._ahead
        return None

    def _reset(self, loader: Any) -> None:
        """Begin another epoch with the same workers. Torch's `DataLoader.__iter__` calls this by name."""
        settings = self._settings.followed(loader)
        settings.check(loads=True)
        self._settings = settings
        self.begin()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._order.end()
        self.counts.end()
        if not self._settings.persistent_workers:
            self._window.close()
            join([self.team])
        elif self._ahead is None:  # else it was told of the next epoch
            self._readers.ahead.forget()
        self.counts.learn()
        self.counts.tell()

    # ---- the loop's side ----

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._settings.sampler)

    def __next__(self) -> Any:
        counted: list[Callable[[], None]] = []  # takes back that the batch counts
        try:
            while (batch := self._next_batch(counted)) is not None:
                if batch.error is not None:
                    # The traceback of the error holds this frame, and the frame that caught it, which holds the batch.
                    # If neither holds the error, there is no reference cycle, and an error that is kept keeps neither
                    # this iterator nor its threads.
                    error, batch.error = batch.error, None
                    annotate(error, batch.where)
                    if isinstance(error, WorkerDiedError) and self.team.is_spent():
                        self._end_with_worker(counted)
                    counted = []
                    try:
                        raise error
                    finally:
                        del error, self
                if not batch.left_out:
                    # A user may keep an error that `on_error` got, and with it the batch (and without workers this
                    # frame). The data must not stay alive with it.
                    try:
                        return batch.data
                    finally:
                        batch.data = None
        except BaseException:
            if counted:  # Ctrl-C struck, and the loop does not get the batch
                counted[0]()
                self.close()
            raise
        raise StopIteration

    def _next_batch(self, counted: list[Callable[[], None]]) -> Batch | None:
        """Return the next batch and count it as delivered, or return None at the end of the epoch.

        If anything but a time-out is raised here, such as Ctrl-C, close the iterator. The state does not count a batch
        that the loop did not get, and the next `next()` raises `LoaderClosedError` rather than skip that batch.
        Fill `counted`, so that `__next__` can uncount the batch.
        """
        if self._window.taking._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                "fastload: next() was called on an iterator by its own sampler, dataset or callback. The iterator "
                "would wait for itself. Read from another iterator there, or return first."
            )
        del counted[:]
        with self._window.taking:
            # Here, because several threads may share the iterator, and before a batch is taken: nothing is lost.
            self._notices.tell(stacklevel=3)
            if not self._begun:
                self._follow_set_epoch()
            if self._ended:
                return None
            self.counts.tell_if_due()
            try:
                batch = self._take()
                if batch is not None:
                    self.counts.count(batch)
                    counted[:] = [self._order.count(batch)]
            except LoaderTimeoutError:
                raise
            except BaseException:
                self.close()
                raise
            if batch is None:
                self._end()
                self._notices.tell(stacklevel=3)
        return batch

    def _end_with_worker(self, counted: list[Callable[[], None]]) -> None:
        """Close the iterator: a worker process has died, and no other reads its batches.

        What other workers have begun comes first. The state does not count the batch of a lane: the loader that
        resumes reads it from there.
        """
        if self._settings.iterable:
            counted[0]()
        elif self._window.is_begun():
            return  # each worker's last batch is the one that it died of, so such an error closes the iterator
        self.close()

    def _follow_set_epoch(self) -> None:
        """Begin another epoch if the sampler's `set_epoch` was called after `iter()` and before the first batch.

        Lightning calls them in this order.
        """
        self._begun = True
        sampler = rank_sampler(self._settings.sampler)
        if self._epochs.is_set or self._epochs.resume or sampler is None:
            return  # `set_epoch` and `load_state_dict` of the loader are for the next `iter()`
        if sampler.is_set and sampler.epoch == self._order.epoch:
            sampler.begin_epoch()  # the epoch that has begun
        elif sampler.is_set:
            self.begin()
            self._begun = True

    def _take(self) -> Batch | None:
        if self._pid != os.getpid():
            raise LoaderClosedError(
                f"this iterator belongs to process {self._pid}, and this process is a fork of it. "
                "Begin an epoch here with iter(loader)"
            )
        self._window.check()
        if isinstance(self._readers, Loop):
            started = perf_counter()
            batch = self._next_in_loop()
            if batch is not None and batch.error is None:
                self._readers.read(batch)
            self._window.check()
            self.counts.now.served_s += perf_counter() - started
            return batch
        self._issue(waits=True)
        if self._ahead is not None:
            oldest = self._window.oldest()  # if it is of the next epoch, all of this one were taken
            if oldest is None or oldest.epoch == self._ahead.epoch:
                return None
        try:
            with waiting_span():
                batch = self._window.take(self._timeout)
        except LoaderTimeoutError as exc:
            raise LoaderTimeoutError(
                f"{exc}. No batch is lost: next() can be called again. The workers were "
                f"here:\n{self.team.whereabouts()}"
            ) from None
        self._issue()
        return batch

    def _next_in_loop(self) -> Batch | None:
        """Return the next batch for the loop to read. Tell the dataset of it, and of later ones if they are fixed."""
        ahead, order, told = self._readers.ahead, self._order, self._told
        most = AHEAD if ahead.listens and can_run_ahead(self._settings.sampler) else 0
        while len(told) <= most and not order.exhausted and (batch := _next_of(order)) is not None:
            ahead.announce(batch)
            told.append(batch)
        return told.popleft() if told else None

    def _issue(self, *, waits: bool = False) -> None:
        """Fill the window, if there are workers. `waits`: if no batch is in flight, wait for the order."""
        if isinstance(self._readers, Loop):
            return
        order = self._ahead or self._order
        while not order.exhausted and self._window.has_room():
            if not (order.is_ready() or (waits and self._window.oldest() is None)):
                return
            if (batch := _next_of(order)) is not None:
                self._readers.ahead.announce(batch)
                self._window.issue(batch)
            else:
                order = self._begin_early() or order

    # ---- anyone's ----

    def is_ready(self) -> bool:
        """Return whether `next()` would give a batch of this epoch, or its error, without waiting or reading."""
        batch = None if self._ended or not self._readers.who.number else self._window.ready()
        return batch is not None and batch.epoch == self._order.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch that `next()` gave; see `DataLoader.state_dict`."""
        return self._order.state()

    @property
    def alive(self) -> bool:
        """Whether these workers can run another epoch."""
        return not self._window.closed and self.team.is_whole()

    def close(self) -> None:
        """Let the threads end after their current calls. From now on `next()` raises `LoaderClosedError`."""
        _retire(self.counts, self._window)

    def __reduce__(self) -> Any:
        raise TypeError("an iterator with threads cannot be pickled or copied. Pickle its loader")


def _retire(counts: EpochCounts, window: Window[Batch]) -> None:
    window.close()
    counts.end()


def _next_of(order: Order) -> Batch | None:
    """Ask the sampler for the next batch, and note how long that took. Return None at the end."""
    started = perf_counter()
    with span("sampler"):
        batch = next(order, None)
    if batch is not None:
        batch.recorders[LOOP].add("sampler", perf_counter() - started)
    return batch
