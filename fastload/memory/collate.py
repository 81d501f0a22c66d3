"""Builders of batches: large rows go straight into preallocated memory, all else through `default_collate`.

Every batch has a *builder*. Any number of workers put samples into it, each at its own position. The worker that
delivers the last sample makes the batch.

`ListBuilder` stores the samples for a collate function. `SlotBuilder` replaces torch's `default_collate`. The first
sample that arrives fixes the layout. Each large dense tensor or array becomes a row of a *slot*, the memory of one
batch. The workers write the rows in parallel. All other leaves are stored, and `default_collate` gets them once
the batch is complete.

If a sample does not fit the layout, `default_collate` gets all samples of the batch, and raises what it raises. So a
slot saves a copy and changes no result.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Collection
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from fastload._kit.nested import map_tensors
from fastload.memory.layout import Layout, Slot
from fastload.memory.slots import SlotPool


class BatchBuilder(Protocol):
    """Collects the samples of one batch, at positions 0 to n-1, and builds the batch."""

    def put(self, position: int, sample: Any) -> None:
        """Store `sample`. Any thread may call this, at most once for a position."""

    def make(self, absent: Collection[int], collate_fn: Callable[[list[Any]], Any]) -> Any:
        """Return the batch, without the positions in `absent`. Called once, after the last `put`.

        `collate_fn` belongs to the worker that calls this.
        """


class ListBuilder:
    """Stores the samples of a batch for a collate function."""

    def __init__(self, samples: Any) -> None:
        """Store `samples`: a list with one element for each sample, or what `__getitems__` returned."""
        self._samples = samples

    @property
    def put(self) -> Callable[[int, Any], None]:
        """See `BatchBuilder`."""
        put: Callable[[int, Any], None] = self._samples.__setitem__
        return put

    def shorten(self, n: int) -> None:
        """Keep only the first `n` elements: no more samples came."""
        del self._samples[n:]

    def make(self, absent: Collection[int], collate_fn: Callable[[list[Any]], Any]) -> Any:
        """See `BatchBuilder`."""
        samples, self._samples = self._samples, []
        if absent:
            samples = [s for i, s in enumerate(samples) if i not in absent]
        return collate_fn(samples)


class _Discard:
    def put(self, position: int, sample: Any) -> None:
        pass

    def make(self, absent: Collection[int], collate_fn: Callable[[list[Any]], Any]) -> None:
        return None


DISCARD: BatchBuilder = _Discard()
"""The builder of a dropped batch. It discards the samples of runs in progress."""


def data_bytes(data: Any) -> int:
    """Return the bytes of the tensors, arrays and byte strings in a batch.

    Search only containers whose iteration runs no user code, and each of them once.
    """
    nbytes, todo, seen = 0, [data], set[int]()
    while todo:
        part = todo.pop()
        kind = type(part)
        if kind in _PLAIN:
            continue
        if kind in _DICTS:
            parts = part.values()
        elif kind in (list, tuple) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
            parts = tuple.__iter__(part) if issubclass(kind, tuple) else part
        elif kind is not torch.Tensor and issubclass(kind, UserDict):
            parts = (vars(part).get("data"),)  # a batch of Hugging Face's tokenizers
        else:
            nbytes += _leaf_bytes(part)
            continue
        if id(part) not in seen:
            seen.add(id(part))
            todo.extend(parts)
    return nbytes


_DICTS = (dict, OrderedDict, defaultdict)
_PLAIN = frozenset({str, int, float, bool, type(None)})


def in_channels_last(batch: Any) -> Any:
    """Return `batch` with its 4-dimensional tensors in channels-last memory."""
    return map_tensors(batch, _channels_last)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.dim() == 4 and tensor.layout is torch.strided and not tensor.is_nested
    return tensor.contiguous(memory_format=torch.channels_last) if plain else tensor


def _leaf_bytes(leaf: Any) -> int:
    try:
        if isinstance(leaf, torch.Tensor | np.ndarray | memoryview):
            sparse = isinstance(leaf, torch.Tensor) and leaf.is_sparse
            return 0 if sparse else int(leaf.nbytes)
        return len(leaf) if isinstance(leaf, bytes | bytearray) else 0
    except Exception:  # a released memoryview, or a user's class
        return 0


def list_builder(n: int) -> ListBuilder:
    """Return a builder that collects `n` samples for a `collate_fn`."""
    return ListBuilder([None] * n)


# ---- builders with slots ----


def make_builder(n: int, pool: SlotPool) -> BatchBuilder:
    """Return a builder of the batch that `default_collate` would return for `n` samples. Large rows go into a slot."""
    layout = pool.layout
    return SlotBuilder(n, pool) if layout is None or layout.nbytes else list_builder(n)


class SlotBuilder:
    """Writes large rows into a slot as they arrive; see the module's docstring.

    Args:
        n: samples in the batch.
        pool: lends the slot.
        layout: how samples lie in the slot, if the dataset fills rows. By default the first sample fixes it.
    """

    def __init__(self, n: int, pool: SlotPool, layout: Layout | None = None) -> None:
        self._n = n
        self._pool = pool
        self._layout = layout
        # At most one entry. The pool's lock owns setting it: two workers may both come first.
        self._slot: dict[None, tuple[Layout, Slot]] = {}
        self._odd: dict[int, Any] = {}  # samples that do not fit the layout

    def rows(self, start: int, stop: int) -> Any:
        """Return the rows of samples `start` to `stop`. The dataset fills them; see `fastload.rows`."""
        assert self._layout is not None
        layout, slot = self._slot.get(None) or self._new_slot(self._layout)
        return layout.rows(slot, None if stop - start == self._n else slice(start, stop))

    def put(self, position: int, sample: Any) -> None:
        """See `BatchBuilder`."""
        try:
            layout, slot = self._slot.get(None) or self._slot_for(sample)
            fits = layout.put(slot, position, sample)
        except Exception:
            fits = False  # torch's collate says what is wrong, when it makes the batch
        if not fits:
            self._odd[position] = sample

    def _slot_for(self, sample: Any) -> tuple[Layout, Slot]:
        if self._layout is not None:
            return self._new_slot(self._layout)
        layout = self._pool.layout
        if layout is None or not layout.fits(sample):
            self._pool.layout = layout = Layout(sample)
        return self._new_slot(layout)

    def _new_slot(self, layout: Layout) -> tuple[Layout, Slot]:
        with self._pool.lock:
            if (made := self._slot.get(None)) is None:
                made = self._slot[None] = layout, self._pool.slot(layout, self._n)
            return made

    def make(self, absent: Collection[int], collate_fn: Callable[[list[Any]], Any]) -> Any:
        """See `BatchBuilder`. Ignore `collate_fn`: the batch is that of torch's `default_collate`."""
        layout, slot = self._slot.pop(None, (None, None))
        if layout is None or slot is None or absent or self._odd:
            return default_collate(
                [self._sample(i, layout, slot) for i in range(self._n) if i not in absent]
            )
        return layout.batch(slot)

    def _sample(self, i: int, layout: Layout | None, slot: Slot | None) -> Any:
        if i in self._odd or layout is None or slot is None:
            return self._odd[i]
        return layout.read(slot, i)
