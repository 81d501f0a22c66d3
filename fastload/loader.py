"""`fastload.DataLoader`: torch's DataLoader, with threads or processes of our own. It begins and ends the epochs."""

from __future__ import annotations

import copy
import os
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, Self, TypeVar, overload

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, IterDataPipe, MapDataPipe, Sampler

from fastload._kit.integers import integer
from fastload.engine import ranks as other_ranks
from fastload.engine.choice import Chosen, choose
from fastload.engine.epoch_counts import NO_STATS, EpochCounts
from fastload.engine.iterator import LoaderIterator
from fastload.engine.readers import READERS
from fastload.engine.team import Team, join
from fastload.order.batches import fits_any_world, in_world
from fastload.order.epochs import Epochs, fresh_state, state_for
from fastload.order.order import MAX_AHEAD
from fastload.order.partition import divided_once, refuse_two_partitions
from fastload.order.sampler import RankSampler
from fastload.order.sampler_state import (
    rank_sampler,
    restore_generators,
    restore_own_state,
)
from fastload.order.state import VERSION, SampledState, check, known_length
from fastload.reading.fetch import Fetcher
from fastload.reading.notices import Notices
from fastload.safety import CopyDataset
from fastload.settings import Method, OnError, Settings
from fastload.telemetry import Stats
from fastload.telemetry.ranks import Ranks

T = TypeVar("T", covariant=True)

ENVIRONMENT = "FASTLOAD_WORKER_METHOD"
"""The environment variable with the kind of workers of a loader that has no `worker_method`."""


class DataLoader(TorchDataLoader[T]):
    """A drop-in for `torch.utils.data.DataLoader` that loads with worker processes, threads, or both.

    All of torch's arguments keep their meaning. `num_workers` counts threads or processes; 0 runs the same code in the
    loop's own thread.

    Memory: at most (batches in flight + batches kept by the loop + 1) x bytes of a batch. At most `prefetch_batches`
    batches are in flight, or `prefetch_factor * num_workers` if only that is given. The default is `2 +
    ceil(num_workers / batch_size)` for torch's own collate in threads, and `2 + num_workers` for processes, your own
    `collate_fn`, `__getitems__`, an iterable dataset or `batch_size=None`. Processes have `3 * num_workers` for one
    with `will_read`. The loop copies a TensorDataset's batches of up to 1 MiB. Keyword-only, and beyond torch's:

    Args:
        seed: makes the order of `shuffle=True`, and what any other sampler draws from global generators, a pure
            function of (seed, epoch), the same on all ranks. The loader does not touch the global random states, and
            `generator` must be None. None: the loader draws as torch's does.
        on_error: what to do when a sample raises. "raise": `next()` raises the error; the next call returns the next
            batch. "skip": the batch is one sample shorter, and the error is logged. A callable gets `(index,
            exception)` on a thread of the loop's process and returns a sample, or `fastload.SKIP`.
        max_errors: the most samples that `on_error` may skip or replace in one epoch. None: any number.
        copy_dataset: what each thread copies at `iter()`. "state": what the dataset, transforms, `collate_fn` and
            `worker_init_fn` hold and your code can change. Data is shared: large arrays and containers,
            tables. False: nothing is copied, as in processes of one worker.
        random_modules: the modules whose global random functions draw from the sample's own stream, without workers
            only with a seed. `("python", "numpy")`, one of the two, or `()`. None: $FASTLOAD_RANDOM_MODULES, or both.
        prefetch_batches: the most batches in flight.
        prefetch_bytes: about how many bytes may be in flight, for samples of very different size. A batch that is not
            complete yet counts as the mean so far. One batch is always let in.
        retries: how often a sample is read again after a transient error of the operating system (EIO, ESTALE ...),
            after waits of 0.1 s, 0.2 s, 0.4 s ... It draws the same random numbers. Not for an iterable dataset.
        memory_format: that of 4-dimensional tensors from the default collate, such as `torch.channels_last`.
        on_stats: a function that the loop's thread calls with `stats()` at the end of each epoch, and every ten seconds
            during it: for loggers. If it raises, `next()` raises its error; no batch is lost.
        begin_early: let persistent threads start the next epoch while the loop uses the last batches of this one.
            Disabled if the dataset holds shared tensors or queues. Set False if the loop changes the dataset.
        snapshot_every_n_steps: an argument of torchdata's StatefulDataLoader, without effect.
        worker_method: "auto": worker processes, unless your code is plainly thread-safe and threads, or the loop
            itself, read faster. "thread", or "process" (torch calls it "multiprocessing"). "torch": torch's own
            iterator, which always reads data pipes. None: $FASTLOAD_WORKER_METHOD, or "auto". See docs/workers.md.
        worker_processes: over how many processes `worker_method="process"` spreads the workers, which are threads with
            copies of their own, as `copy_dataset` says. None: each worker is a process. See docs/processes.md.

    Raises:
        ValueError: an argument is out of range, or two exclude each other.
        EmptyBatchError, TooManyErrorsError: `next()`, if `on_error` skipped a whole batch, or more than `max_errors`.

    Examples:
        >>> loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=2, seed=0)
        >>> images, labels = next(iter(loader))  # of shapes (N, C, H, W) and (N,)
    """

    def __init__(
        self,
        dataset: Dataset[T] | Sequence[T],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[T]], Any] | None = None,
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
        copy_dataset: CopyDataset = "state",
        random_modules: Collection[str] | None = None,
        prefetch_batches: int | None = None,
        prefetch_bytes: int | None = None,
        retries: int = 0,
        memory_format: torch.memory_format = torch.contiguous_format,
        on_stats: Callable[[Stats], None] | None = None,
        begin_early: bool = True,
        snapshot_every_n_steps: int | None = 1,
        worker_method: Method | None = None,
        worker_processes: int | None = None,
    ) -> None:
        self.worker_method: str = worker_method or os.environ.get(ENVIRONMENT) or "auto"
        self.worker_processes = worker_processes
        self.seed = None if seed is None else integer("seed", seed)
        self.on_error = on_error
        self.max_errors = max_errors
        self.copy_dataset = copy_dataset
        self.random_modules = random_modules
        self.prefetch_batches = prefetch_batches
        self.prefetch_bytes = prefetch_bytes
        self.retries = retries
        self.memory_format = memory_format
        self.on_stats = on_stats
        self.begin_early = begin_early
        self.snapshot_every_n_steps = snapshot_every_n_steps
        # For `close()`. Weak: an iterator that the user drops ends by itself.
        # By id. Not a WeakSet: one cannot list it while other threads begin and drop iterators.
        self._iterators = weakref.WeakValueDictionary[int, LoaderIterator]()
        self._teams: list[Team] = []  # of all iterators, if they may still run
        self._counts: EpochCounts | None = None  # of the latest iterator
        self._choice: Chosen | None = None  # the latest, if one was to be made
        self._warned: set[str] = set()  # the warnings that were given, each once
        sampler = divided_once(sampler)
        map_style = not isinstance(dataset, IterableDataset | MapDataPipe)
        unsampled = sampler is None and batch_sampler is None
        if seed is not None and shuffle and unsampled and map_style:
            sampler = RankSampler(dataset, rank=0, world_size=1, seed=seed)  # type: ignore[arg-type]
            shuffle = None
        super().__init__(
            dataset,  # type: ignore[arg-type]
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
        if self._is_ours:
            # Torch's constructor turns None into 2. A loader rebuilt from its attributes must get None again.
            self.prefetch_factor = prefetch_factor
        Settings.of(self).check()
        samplers = samplers_of(self._index_sampler, self.batch_sampler, self.sampler)
        refuse_two_partitions(dataset, samplers)
        if (single := rank_sampler(self._index_sampler)) is not None:
            size = getattr(self._index_sampler, "batch_size", None)
            single.check_loader(size, dataset)
        self._epochs = Epochs(samplers, dataset)

    # ---- what torch asks of a loader ----

    @property
    def _is_ours(self) -> bool:
        # A data pipe depends on torch's processes (shared seeds, graphs), so torch reads it.
        return self.worker_method != "torch" and not isinstance(
            self.dataset, IterDataPipe | MapDataPipe
        )

    def check_worker_number_rationality(self) -> None:
        """Skip torch's warning about more workers than cores, for threads: those that wait for storage use no core."""
        if self.worker_method not in ("auto", "thread") and self.worker_processes is None:
            super().check_worker_number_rationality()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch annotates a class of its own
        """Begin the next epoch. Persistent workers drop the rest of the previous epoch."""
        if not self._is_ours:
            with self._epochs.beginning(seeded=self.seed is not None):
                return super().__iter__()
        before: Any = self._iterator
        if isinstance(before, LoaderIterator) and not before.alive:
            before.close()  # an error that the user keeps may keep it, and with it the workers that live
            self._iterator = None
        iterator = super().__iter__()
        if (watch := other_ranks.watch_of(self)) is not None:
            watch.wake()
        return iterator

    def _get_iterator(self) -> Any:
        if not self._is_ours:
            if self.worker_method != "torch":
                warnings.warn(
                    "fastload: the dataset is a data pipe, so torch's own iterator reads it, in processes. Pass "
                    'worker_method="torch" to silence this warning.',
                    stacklevel=3,
                )
            return super()._get_iterator()
        what = Fetcher(Settings.of(self), Notices(self._warned))
        who = self._who(what)
        iterator = LoaderIterator(READERS[who.kind](what, who), self._epochs)
        self._iterators[id(iterator)] = iterator
        if self._counts is not None:
            iterator.counts.now.earlier = self._counts.total()
        with self._epochs.restoring():  # Ctrl-C may strike once it has begun
            iterator.begin()
            self._counts = iterator.counts
            self._teams = [t for t in self._teams if t.is_running()] + [iterator.team]
        return iterator

    def _who(self, what: Fetcher) -> Chosen:
        """Return who reads it. By "auto", and for the first threads, this reads the dataset's code."""
        if self._counts is not None:
            self._counts.learn()  # the loop may have left the epoch
        self._choice = choose(what, stacklevel=5, before=self._choice)
        return self._choice

    def chosen(self) -> Chosen:
        """Return kind and number of the workers, and why. It chooses as `iter()` does, and starts none."""
        if not self._is_ours:
            return Chosen("torch", self.num_workers)
        return self._who(Fetcher(Settings.of(self), Notices(self._warned)))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy: without workers, iterators and counts."""
        return {
            **self.__dict__,
            "_iterator": None,
            "_iterators": None,
            "_teams": [],
            "_counts": None,
            "_choice": None,
            "_epochs": copy.copy(self._epochs),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._iterators = weakref.WeakValueDictionary()

    def __repr__(self) -> str:
        """Return dataset, batch size, workers and seed, in one line."""
        given = f"batch_size={self.batch_size}"
        if self.batch_size is None and self.batch_sampler is not None:
            given = f"batch_sampler={type(self.batch_sampler).__name__}"
        if self.worker_method != "auto":
            given += f', worker_method="{self.worker_method}"'
        elif self._choice is not None:
            given += f', worker_method="auto" ({self._choice.kind})'
        if self.worker_processes is not None:
            given += f", worker_processes={self.worker_processes}"
        given += f", num_workers={self.num_workers}, seed={self.seed}"
        n = known_length(self.dataset)
        named = type(self.dataset).__name__ + ("" if n is None else f"[{n}]")
        return f"{type(self).__name__}({named}, {given})"

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Raise RuntimeError: an Accelerator that reads this would make one of torch's loaders."""
        if self._is_ours:
            raise RuntimeError(
                "Accelerate would make a loader of torch's. from fastload.integrations.accelerate import Accelerator"
            )
        return False

    # ---- beyond torch's interface ----

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next `iter()`, also in a sampler or iterable dataset that has `set_epoch`."""
        self._epochs.set(epoch)

    @overload
    def stats(self, *, total: bool = False) -> Stats: ...

    @overload
    def stats(self, *, ranks: Literal[True]) -> Ranks: ...

    def stats(self, *, total: bool = False, ranks: bool = False) -> Stats | Ranks:
        """Return the counts and waits of the latest epoch. Torch's own iterators measure nothing.

        Args:
            total: of all epochs together.
            ranks: of all ranks of the job. They need not call it: see docs/ranks.md.
        """
        if ranks:
            return other_ranks.of_ranks(self)
        counts = self._counts
        return NO_STATS if counts is None else counts.total() if total else counts.stats()

    def state_dict(self, *, ahead: int = 0) -> dict[str, Any]:
        """Return the loop's position in the latest epoch, as plain JSON values. Any loader like this one can load it.

        The state counts the batches that the loop received, not those read ahead. A batch that raised counts. A loader
        with other workers can load it, unless each reads its own copy of an iterable dataset. With `RankSampler`, so
        can another number of ranks with the same global batch. A state saved after the last batch resumes an empty
        epoch. After the loop saw the end of the epoch, it resumes with the next epoch. If the sampler draws random
        numbers, resuming runs it again, from the state of what it draws from. A checksum compares.

        Args:
            ahead: how many of the latest batches the loop holds but has not used, at most 2. The state does not count
                them. A loop that copies the next batch to the GPU during a step holds one.

        Raises:
            StateError: JSON cannot hold what `state_dict()` of the sampler returned.
        """
        if not self._is_ours:
            _warn_of_no_state()
            return {"version": VERSION, "kind": "torch"}
        if integer("ahead", ahead) not in range(MAX_AHEAD + 1):
            raise ValueError(f"ahead must be 0 to {MAX_AHEAD}, got {ahead}")
        return self._epochs.state_dict(lambda: Settings.of(self), ahead)

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Let the next `iter()` resume after the last batch that `state` counts. A running iterator is not changed.

        It reads no sample. Only an iterable dataset without `state_dict` is read again up to that batch. For a stream
        of `fastload.streams`, pass the states of all ranks as a list if ranks or workers are others.

        Raises:
            StateError: the state is of another seed, sampler, dataset or global batch. It names the field, both values,
                and what to do. If the sampler gives other indices than before, `iter()` raises it.
        """
        if not self._is_ours:
            _warn_of_no_state()
            return
        settings = Settings.of(self)
        ours, rank = fresh_state(settings, 0, None)
        found = state_for(settings, state, ours)
        check(found, ours, rank=rank, any_world=fits_any_world(self._index_sampler))
        if isinstance(found, SampledState):
            found = in_world(self._index_sampler, found, ours.world_size)
        with self._epochs.restoring():
            self._epochs.load(found)
            if isinstance(found, SampledState) and found.ended and found.draws:
                restore_own_state(self._index_sampler, found.sampler_state)  # it may raise
                restore_generators(self._index_sampler, found.draws[-1])

    def close(self) -> None:
        """End all workers of this loader once their current calls return. `iter()` starts new ones.

        Iterators that you still hold raise `LoaderClosedError`. After five seconds it abandons the threads that still
        run, kills such worker processes, and names them in a warning.
        """
        for ref in self._iterators.valuerefs():
            if (iterator := ref()) is not None:
                iterator.close()
        join(self._teams)  # also those of iterators that the user has dropped
        self._teams = []
        self._iterator = None
        if self._counts is not None:
            self._counts.learn()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def samplers_of(index_sampler: Any, batch_sampler: Any, sampler: Any) -> list[Any]:
    """Return the samplers that may know of epochs and ranks: the batch sampler, what it batches, the sampler."""
    found = [batch_sampler, getattr(index_sampler, "sampler", None), sampler]
    return list({id(s): s for s in found if s is not None}.values())


def _warn_of_no_state() -> None:
    warnings.warn(
        'fastload: worker_method="torch" uses torch\'s own iterator, which does not know its place in an epoch. '
        "There is nothing to save, and after loading the epoch starts from its first batch. To save and resume, "
        'use worker_method="thread" or "process"',
        stacklevel=3,
    )
