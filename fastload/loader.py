"""`fastload.DataLoader`: torch's DataLoader, with threads. Wires the stages; owns epochs and what ends them."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import (
    Dataset,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    Sampler,
)

from fastload import workers
from fastload.draws import restore_generators, restore_own_state
from fastload.epochs import Epochs, fresh_state
from fastload.isolation.worker_copies import CopyDataset
from fastload.iterator import ThreadIterator
from fastload.order import fits_any_world
from fastload.partition import partition, refuse_two_partitions
from fastload.sampler import RankSampler, integer
from fastload.settings import OnError, Settings
from fastload.state import VERSION, SampledState, check, known_length
from fastload.tally import NO_STATS, Tally
from fastload.telemetry import Stats

T = TypeVar("T", covariant=True)


class DataLoader(TorchDataLoader[T]):
    """A drop-in for `torch.utils.data.DataLoader` that loads with threads.

    All of torch's arguments keep their meaning; `num_workers` counts threads (0 runs the same code
    in the loop's own thread). An iterable dataset is copied for each worker, as in torch. Memory: at
    most

        (batches in flight + batches kept by the loop + 1) x bytes of a batch

    where the batches in flight are at most `prefetch_batches`, or `prefetch_factor * num_workers`
    if only that is given. The default is `2 + ceil(num_workers / batch_size)` for torch's own
    collate, and `2 + num_workers` for a `collate_fn` of the user's, `__getitems__`, an iterable
    dataset or `batch_size=None`. A TensorDataset with batches of up to 1 MiB needs no thread:
    the loop copies them itself, sooner than a thread could hand them over.

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
        copy_dataset: "state": each worker reads through its own copy of every object that your code can
            change: dataset, transforms, `collate_fn` and `worker_init_fn`, copied at `iter()` as one graph.
            Data is shared: arrays, tensors and buffers of more than 16 MiB, read-only and memory-mapped ones,
            tables, and containers with more than 1,000 elements (or, from 16 elements on, with more than 2,000
            objects or 4 MiB below them). A container that holds datasets, transforms, functions or generators
            is never data. True: data is copied too. False: all workers share one dataset. A class that is safe
            in threads says so: `fastload_per_worker = ()` shares its instances, `("transform",)` all but their
            attribute `transform`. See docs/threads.md; `fastload check` prints what is copied.
        random_modules: whose global random functions draw from the sample's own stream in workers, and with a seed
            also without workers: `("python", "numpy")`, one of the two, or `()`. None: what the environment
            variable FASTLOAD_RANDOM_MODULES says ("python,numpy", "python", "numpy" or "none"), or both. See
            docs/random.md.
        prefetch_batches: batches in flight at most. Without effect with `num_workers=0`.
        prefetch_bytes: bytes of the batches in flight, about: a batch that is not complete yet counts
            as the mean so far, and one is always let in. For samples of very different size.
        retries: how often a sample is read again after an error of the operating system that may
            pass (EIO, ESTALE, a time-out of a network file system ...), waiting 0.1 s, 0.2 s, 0.4 s
            ... before. It draws the same random numbers again. Not for an iterable dataset.
        memory_format: of the 4-dimensional tensors, N samples [C, H, W], that the default collate makes:
            `torch.channels_last` where the model is; then samples that are channels-last themselves
            (a plan's, a PIL picture's) are not transposed on the way.
        on_stats: called with `stats()` in the loop's thread at the end of each epoch, and every ten
            seconds in it: for loggers. What it raises comes out of `next()`, and costs no batch.
        worker_method: "thread", or "process" for torch's own iterator: the way out for datasets
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
        copy_dataset: CopyDataset = "state",
        random_modules: Collection[str] | None = None,
        prefetch_batches: int | None = None,
        prefetch_bytes: int | None = None,
        retries: int = 0,
        memory_format: torch.memory_format = torch.contiguous_format,
        on_stats: Callable[[Stats], None] | None = None,
        worker_method: Literal["thread", "process"] = "thread",
    ) -> None:
        self.worker_method = worker_method
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
        # To close them; only the user holds them, so that a forgotten one ends by itself.
        self._iterators: weakref.WeakSet[ThreadIterator] = weakref.WeakSet()
        self._threads: list[threading.Thread] = []  # of all iterators; those that may still run
        self._tally: Tally | None = None  # of the latest iterator, as is
        self._warned: set[str] = set()  # of what
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
        Settings.of(self).check()
        samplers = self._samplers()
        refuse_two_partitions(dataset, samplers)
        self._epochs = Epochs(samplers)

    # ---- what torch asks of a loader ----

    @property
    def _threaded(self) -> bool:
        # A data pipe of torch's is wired to its processes (shared seeds, graphs): left to torch.
        return self.worker_method == "thread" and not isinstance(
            self.dataset, IterDataPipe | MapDataPipe
        )

    def check_worker_number_rationality(self) -> None:
        """Torch's warning about more workers than cores: threads that wait for storage cost no core."""
        if self.worker_method == "process":
            super().check_worker_number_rationality()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's names a class of its own
        """Begin the next epoch; with persistent workers, whatever is left of the one before is dropped."""
        if not self._threaded:
            with self._epochs.beginning():
                return super().__iter__()
        iterator: Any = self._iterator
        if isinstance(iterator, ThreadIterator) and not iterator.alive:
            self._iterator = None  # closed, or left behind in the parent by a fork
        return super().__iter__()

    def _get_iterator(self) -> Any:
        if self._threaded:
            with self._epochs.beginning():
                iterator = ThreadIterator(Settings.of(self), self._epochs, self._warned)
            self._tally = iterator.tally
            self._threads = [t for t in self._threads if t.is_alive()] + iterator.threads
            self._iterators.add(iterator)
            return iterator
        if self.worker_method == "thread":
            warnings.warn(
                "fastload: a data pipe goes through torch's own iterator (processes). Pass "
                'worker_method="process" to say so yourself, and silence this warning.',
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
            "_epochs": copy.copy(self._epochs),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._iterators = weakref.WeakSet()

    def __repr__(self) -> str:
        """In a line: which dataset, in batches of what, by how many workers, in which order."""
        given = f"batch_size={self.batch_size}"
        if self.batch_size is None and self.batch_sampler is not None:
            given = f"batch_sampler={type(self.batch_sampler).__name__}"
        if self.worker_method != "thread":
            given += f', worker_method="{self.worker_method}"'
        return (
            f"{type(self).__name__}({_named(self.dataset)}, {given}, num_workers={self.num_workers}, "
            f"seed={self.seed})"
        )

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Warn: Accelerate asks for this before it builds a loader of torch's out of ours, and at no other time."""
        if self._threaded:
            warnings.warn(
                "fastload: Accelerate's prepare() replaces the loader by one of torch's, without its threads, seed and "
                f"state. It was given {self!r}. Leave the loader out of prepare(), and give it a RankSampler.",
                stacklevel=2,
            )
        return False

    # ---- what is ours ----

    def set_epoch(self, epoch: int) -> None:
        """Fix the epoch of the next `iter()`; epochs after it count on. A sampler with `set_epoch` is told."""
        self._epochs.set(epoch)

    def stats(self) -> Stats:
        """Counts and waits of the latest epoch begun; of torch's own iterators, nothing is known."""
        return NO_STATS if self._tally is None else self._tally.stats()

    def state_dict(self) -> dict[str, Any]:
        """What the loop has had of the latest epoch, as plain JSON values; to be loaded by any loader like this one.

        It says how many batches were handed out, not how many were read ahead; a batch that raised
        counts as handed out. Another number of workers may load it (not for an iterable dataset);
        with `RankSampler`, also another number of ranks at the same global batch: it is the same on
        all ranks. Resumed after the last batch, the epoch gives nothing more and the next follows;
        once the loop has seen its end, the next `iter()` begins the next epoch.

        A sampler that draws is run again, with torch's global random state as it was, the torch.Generator that the
        sampler holds as `generator`, and what its own `state_dict()` returned before the epoch. The state has a
        checksum of the indices handed out. Raises what `state_dict()` of an iterable dataset raised, and
        `StateError` if the sampler's is no JSON.
        """
        if not self._threaded:
            self._warn_of_no_state()
            return {"version": VERSION, "kind": "process"}
        return self._epochs.state_dict(lambda: Settings.of(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `iter()` resume after what `state` says was handed out; one that runs already is not changed.

        Raises `StateError` if the state was made with another seed, sampler, dataset or global
        batch: with the field, both values, and what to do. The order is sliced, or the sampler run
        again, and no sample is read for it; but an iterable dataset without `state_dict` is
        read again up to there. If the sampler then gives other indices, `iter()` raises `StateError`.
        """
        if not self._threaded:
            self._warn_of_no_state()
            return
        ours = fresh_state(Settings.of(self), 0, None)
        found = type(ours).from_json(state)
        rank, _ = partition(self._index_sampler, self.dataset)
        check(found, ours, rank=rank, any_world=fits_any_world(self._index_sampler))
        if _is_lightning() and isinstance(found, SampledState):
            found = replace(found, ended=found.ended or _is_spent(self._index_sampler, found))
        self._epochs.load(found)
        if isinstance(found, SampledState) and found.ended and found.draws:
            restore_generators(self._index_sampler, found.draws[-1])
            restore_own_state(self._index_sampler, found.sampler_state)

    def _warn_of_no_state(self) -> None:
        warnings.warn(
            'fastload: worker_method="process" is torch\'s own iterator, which keeps no place in an epoch: there is '
            "nothing to save, and after loading the epoch begins at its beginning",
            stacklevel=3,
        )

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


def _is_map_style(dataset: Any) -> bool:
    return not isinstance(dataset, IterableDataset | MapDataPipe)


def _named(dataset: Any) -> str:
    """The type of a dataset, and its length where it has one."""
    length = known_length(dataset)
    return type(dataset).__name__ + ("" if length is None else f"[{length}]")


def _is_spent(sampler: Any, state: SampledState) -> bool:
    """Whether all of an epoch's batches were handed out, as far as the sampler knows how many there are."""
    length = known_length(sampler)
    return length is not None and state.batches >= length


def _is_lightning() -> bool:
    """Whether Lightning calls the method of ours that asks."""
    # Lightning takes `len(loader)` batches and asks for no more, so behind the last one the epoch is over for it; a
    # `for` loop stopped there has yet to be told, and gets nothing more of its epoch. The states are the same, as are
    # the calls: `load_state_dict`, `iter`, `next`. To take the epoch for ended would make the `for` loop run the next
    # one under this one's number, and all of this one again where it calls `set_epoch`; not to would cost Lightning
    # an epoch. A sampler with `set_epoch` is told by Lightning which epoch it means; torch's other ones are not.
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name.partition(".")[0] in ("lightning", "pytorch_lightning")
