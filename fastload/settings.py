"""The arguments of a loader: the values that one `iter()` works with, and the checks that refuse others."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self, get_args

import torch
from torch.utils.data import IterableDataset, default_collate, default_convert

from fastload._kit.integers import integer
from fastload.random.streams import chosen_modules, routable
from fastload.safety import CopyDataset, Survey
from fastload.telemetry import Stats

PROCESSES = "process", "multiprocessing"
Method = Literal["auto", "thread", "process", "multiprocessing", "torch"]
"""The kinds of workers.

"auto" chooses between threads, processes and the loop itself. "multiprocessing" is torch's name for "process", and
"torch" is torch's own iterator.
"""

METHODS = get_args(Method)
OnError = Literal["raise", "skip"] | Callable[[Any, Exception], Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A loader's arguments at the time of one `iter()`; see `DataLoader` for what they mean."""

    dataset: Any
    sampler: Any
    """Torch's "index sampler": of batches, or of indices without batching."""
    batched: bool
    """Whether a batch is collated from samples (torch's automatic batching)."""
    declared_length: int | None
    """What `len(loader)` returned for an iterable dataset; None if it was not called."""
    batch_size: int | None
    drop_last: bool
    num_workers: int
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], None] | None
    generator: torch.Generator | None
    pin_memory: bool
    timeout: float
    in_order: bool
    begin_early: bool
    persistent_workers: bool
    prefetch_factor: int | None
    prefetch_batches: int | None
    prefetch_bytes: int | None
    seed: int | None
    on_error: OnError
    max_errors: int | None
    retries: int
    copy_dataset: CopyDataset
    random_modules: Collection[str] | None
    memory_format: torch.memory_format
    on_stats: Callable[[Stats], None] | None
    worker_method: str
    worker_processes: int | None
    multiprocessing_context: Any

    @classmethod
    def of(cls, loader: Any) -> Self:
        """Return the arguments of a loader as they are now: a user may have set attributes since."""
        alike = cls.__dataclass_fields__.keys() - {"sampler", "batched", "declared_length"}
        return cls(
            sampler=loader._index_sampler,
            batched=loader._auto_collation,
            declared_length=loader._IterableDataset_len_called,
            **{name: getattr(loader, name) for name in alike},
        )

    def followed(self, loader: Any) -> Self:
        """Return the arguments of another epoch with the same workers, which keep theirs, as in torch.

        Those that only the loop uses are the loader's of now.
        """
        # Not `replace`, which took a tenth of what such an epoch takes to begin.
        settings = copy.copy(self)
        vars(settings).update(
            declared_length=loader._IterableDataset_len_called,
            max_errors=loader.max_errors,
            on_stats=loader.on_stats,
            begin_early=loader.begin_early,
        )
        return settings

    def check(self, *, loads: bool = False) -> None:
        """Raise ValueError if an argument beyond torch's has an invalid value. The message names the argument.

        At `iter()` (`loads`), also if nothing could be loaded. Like torch's constructor, ours does not check that. A
        user may have set attributes since.
        """
        if self.worker_method not in METHODS:
            raise ValueError(
                f"worker_method, or FASTLOAD_WORKER_METHOD in the environment, must be "
                f"{', '.join(map(repr, METHODS[:-1]))} or {METHODS[-1]!r}, got {self.worker_method!r}"
            )
        if self.on_stats is not None and not callable(self.on_stats):
            raise ValueError(f"on_stats must be a callable (stats), got {self.on_stats!r}")
        if self.on_error not in ("raise", "skip") and not callable(self.on_error):
            raise ValueError(
                f'on_error must be "raise", "skip" or a callable (index, exception), got {self.on_error!r}'
            )
        _at_least(0, ", or None for any number", max_errors=self.max_errors)
        _at_least(1, prefetch_batches=self.prefetch_batches, prefetch_bytes=self.prefetch_bytes)
        _at_least(0, retries=integer("retries", self.retries))
        _at_least(1, ", or None for one for each worker", worker_processes=self.worker_processes)
        if self.worker_processes is not None and self.worker_method not in PROCESSES:
            raise ValueError(
                'worker_processes needs worker_method="process": it spreads num_workers over that many processes'
            )
        if self.retries and self.iterable:
            raise ValueError(
                "retries is for map-style datasets: an iterable dataset cannot be asked for the same sample again"
            )
        if self.copy_dataset not in ("state", False):
            raise ValueError(
                f'copy_dataset must be "state" or False, got {self.copy_dataset!r}. If samples change data, '
                'pass worker_method="process"'
            )
        chosen_modules(self.random_modules)  # raises if they are not valid
        if self.memory_format not in (torch.contiguous_format, torch.channels_last):
            raise ValueError(
                f"memory_format must be torch.contiguous_format or torch.channels_last, got {self.memory_format!r}"
            )
        own_collate = self.collate_fn not in (default_collate, default_convert)
        if self.memory_format is torch.channels_last and own_collate:
            raise ValueError(
                "memory_format is for torch's default collate: your own collate_fn chooses how batches lie in memory"
            )
        if self.seed is not None and self.generator is not None:
            raise ValueError(
                "give seed or generator, not both: with a seed, the order depends on it alone"
            )
        if self.worker_method == "torch":
            self._refuse_for_torch()
        if loads and self.num_workers == 0 and self.timeout:
            raise ValueError(
                "timeout needs num_workers > 0: without workers the loop itself reads, and cannot interrupt a sample"
            )
        factor = 1 if self.prefetch_factor is None else self.prefetch_factor
        if loads and integer("prefetch_factor", factor) == 0 and self.prefetch_batches is None:
            raise ValueError("prefetch_factor must be 1 or more to load anything, got 0")

    def _refuse_for_torch(self) -> None:
        """Raise ValueError for arguments that torch's own iterator does not know."""
        given = {
            "on_error": self.on_error != "raise",
            "max_errors": self.max_errors is not None,
            "random_modules": self.random_modules,
            "prefetch_batches": self.prefetch_batches is not None,
            "prefetch_bytes": self.prefetch_bytes is not None,
            "retries": self.retries,
            "memory_format": self.memory_format is not torch.contiguous_format,
            "on_stats": self.on_stats is not None,
        }
        if names := [name for name, value in given.items() if value]:
            raise ValueError(f'{", ".join(names)}: not for worker_method="torch"')

    def modules(self) -> frozenset[str]:
        """Return the modules with global random functions that draw from a stream."""
        return routable(chosen_modules(self.random_modules))

    @property
    def iterable(self) -> bool:
        """Whether the dataset is iterable, so that each worker reads it in order."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def exact(self) -> bool:
        """Whether the dataset is one of `fastload.streams`: its samples do not depend on the workers that read them."""
        return getattr(type(self.dataset), "fastload_exact", False) is True

    @property
    def lanes(self) -> int:
        """Number of lanes of threads: one for each that reads an iterable dataset, else one. Each process has one."""
        return max(1, self.num_workers) if self.iterable else 1

    @property
    def keyed(self) -> bool:
        """Whether each sample has its own random numbers. Without workers and seed it draws the loop's, as in torch."""
        return self.exact or self.seed is not None or self.num_workers > 0

    @property
    def samples_per_batch(self) -> int | None:
        """The batch size, or None if the user's batch sampler has none."""
        size = self.batch_size or getattr(self.sampler, "batch_size", None)
        return size if isinstance(size, int) and size > 0 else None

    def depth(self, num_workers: int, *, batches_in_parallel: bool, hears: bool = False) -> int:
        """Return the most batches in flight; see `DataLoader`. `hears`: `will_read` runs in the worker processes."""
        if num_workers == 0:
            return 1
        if self.prefetch_batches is not None:
            return self.prefetch_batches
        if self.prefetch_factor is not None:
            return self.prefetch_factor * num_workers
        if hears:  # a batch is read and one is sent: a third one is known before the first is over
            return 3 * num_workers
        if batches_in_parallel:
            return 2 + num_workers
        return 2 + math.ceil(num_workers / (self.samples_per_batch or 1))

    @cached_property
    def survey(self) -> Survey:
        """What is known of the user's objects, and what gives each worker its own."""
        # Threads cannot share an iterable dataset: each of them iterates over it.
        copies = self.copy_dataset or ("state" if self.iterable else False)
        return Survey(self.dataset, self.collate_fn, self.worker_init_fn, copy_dataset=copies)


def _at_least(least: int, otherwise: str = "", **arguments: int | None) -> None:
    """Raise ValueError if an argument is below `least`. None passes."""
    for name, value in arguments.items():
        if value is not None and integer(name, value) < least:
            raise ValueError(f"{name} must be {least} or more{otherwise}, got {value}")
