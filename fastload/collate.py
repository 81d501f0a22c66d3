"""From samples to a batch: large rows straight into preallocated memory, all else through torch's
default_collate.

A batch under construction is a *box*: any number of workers put samples into it, each at its own
position, and the one that delivers the last of them makes the batch. `SampleBox` keeps the samples
for a collate function. `SlotBox` stands for torch's `default_collate`: the first sample that
arrives fixes the layout, every large dense tensor or array in it becomes a row of a *slot* (the
memory of one batch), written by the worker that made the sample, in parallel; every other leaf is
kept and given to `default_collate` when the batch is complete. What does not fit the layout goes
the ordinary way: the samples are put together again and `default_collate` makes of them what it
makes of them, errors included. So a slot saves a copy and changes no result.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Collection
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from fastload.layout import Layout, Slot
from fastload.nested import map_tensors
from fastload.slots import SlotPool


class Box(Protocol):
    """A batch under construction, for positions 0 to n-1."""

    def put(self, position: int, sample: Any) -> None:
        """Keep `sample`; called at most once for a position, from any thread."""

    def make(self, absent: Collection[int], collate_fn: Callable[[list[Any]], Any]) -> Any:
        """Return the batch, without the positions in `absent`. Called once, after the last `put`.

        `collate_fn` is that of the worker that makes the batch.
        """


class SampleBox:
    """Keeps the samples of a batch for a collate function."""

    def __init__(self, samples: Any) -> None:
        """`samples`: a list with a place for each of them, or what `__getitems__` gave."""
        self._samples = samples

    def put(self, position: int, sample: Any) -> None:
        """See `Box`."""
        self._samples[position] = sample

    def shorten(self, n: int) -> None:
        """Only `n` samples came."""
        del self._samples[n:]

    def make(self, absent: Collection[int], collate_fn: Callable[[list[Any]], Any]) -> Any:
        """See `Box`."""
        samples, self._samples = self._samples, []
        if absent:
            samples = [s for i, s in enumerate(samples) if i not in absent]
        return collate_fn(samples)


class _Void:
    def put(self, position: int, sample: Any) -> None:
        pass

    def make(self, absent: Collection[int], collate_fn: Callable[[list[Any]], Any]) -> None:
        return None


VOID: Box = _Void()
"""The box of a batch that is dropped: runs in progress put their samples nowhere."""


def data_bytes(data: Any) -> int:
    """Bytes of the tensors, arrays and byte strings in a batch; of a dense tensor that is no view, its memory.

    It looks only into containers whose iteration runs no code of the user's, and into each once.
    """
    nbytes, todo, seen = 0, [data], set[int]()
    while todo:
        part = todo.pop()
        kind = type(part)
        if kind in _DICTS:
            parts = part.values()
        elif kind in (list, tuple) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
            parts = tuple.__iter__(part) if issubclass(kind, tuple) else part
        elif issubclass(kind, UserDict):  # the batches of Hugging Face's tokenizers
            parts = (vars(part).get("data"),)
        else:
            nbytes += _leaf_bytes(part)
            continue
        if id(part) not in seen:
            seen.add(id(part))
            todo.extend(parts)
    return nbytes


_DICTS = (dict, OrderedDict, defaultdict)


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
    except Exception:  # a memoryview that was released, a class of the user's
        return 0


# ---- boxes with slots ----


def collate_box(n: int, pool: SlotPool) -> Box:
    """A box that makes what `default_collate` makes of `n` samples, in a slot if the samples have large rows."""
    layout = pool.layout
    return SlotBox(n, pool) if layout is None or layout.rows else SampleBox([None] * n)


class SlotBox:
    """Writes large rows into a slot as they come; see the module's docstring.

    With `layout`, that of a dataset that fills rows, no sample is asked for it.
    """

    def __init__(self, n: int, pool: SlotPool, layout: Layout | None = None) -> None:
        self._n = n
        self._pool = pool
        self._layout = layout
        # None or one entry: two workers may come first at once, and dict.setdefault is atomic.
        self._slot: dict[None, tuple[Layout, Slot]] = {}
        self._odd: dict[int, Any] = {}  # samples that do not fit the layout

    def rows(self, start: int, stop: int) -> Any:
        """Return the rows of samples `start` to `stop`, for the dataset to fill; see `fastload.rows`."""
        assert self._layout is not None
        layout, slot = self._slot.get(None) or self._new_slot(self._layout)
        return layout.runs(slot, start, stop)

    def put(self, position: int, sample: Any) -> None:
        """See `Box`."""
        try:
            layout, slot = self._slot.get(None) or self._slot_for(sample)
            fits = layout.fits(sample)
            if fits:
                layout.write(slot, position, sample)
        except Exception:
            fits = False  # whatever is wrong with this sample, torch's collate shall say it when the batch is made
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
        return self._slot.setdefault(None, (layout, self._pool.slot(layout, self._n)))

    def make(self, absent: Collection[int], collate_fn: Callable[[list[Any]], Any]) -> Any:
        """See `Box`. It stands for torch's `default_collate` and calls no other."""
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
