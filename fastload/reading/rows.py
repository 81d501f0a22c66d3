"""Finds what fills the rows of a batch: a class that declares `fill_rows`, or torch's datasets. See docs/rows.md."""

from __future__ import annotations

import ctypes
import operator
import reprlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from fastload._kit.integers import BOOLS, as_indices
from fastload._kit.nested import map_leaves
from fastload.memory.layout import Layout
from fastload.reading.notices import Notices
from fastload.rows import Run


@dataclass(slots=True)
class Filler:
    """Fills runs of one dataset."""

    sample: Any
    """What `empty_sample()` returned."""
    fill: Callable[[Run], Iterable[int]]
    """Takes a run, and returns the positions that it could not fill."""
    copies: bool = False
    """Whether it only copies memory: no user code runs, and nothing is drawn."""
    gather: Callable[[NDArray[np.int64], Sequence[torch.Tensor]], bool] | None = None
    """Copies samples of a TensorDataset at indices from 0 into rows, one tensor for each of its own. Returns False if
    the rows do not fit, or an index is out of range."""


def filler(dataset: Any) -> Filler | None:
    """Return the filler of `dataset`, or None to read its samples one by one.

    `fill_rows` counts only if the class itself declares it: a subclass may override anything that it stands for. The
    same goes for a method in the instance's dict.
    """
    kind: Any = type(dataset)
    for name in getattr(dataset, "__dict__", ()):
        if name in _READS or callable(getattr(kind, name, None)):
            return None
    if kind in _OF_TORCH:
        own = [vars(kind)[name] for name in _READS if name in vars(kind)]
        replaced = any(getattr(each, "__module__", "") != kind.__module__ for each in own)
        return None if replaced else _OF_TORCH[kind](dataset)
    if not callable(vars(kind).get("fill_rows")) or not hasattr(kind, "empty_sample"):
        return None
    sample = dataset.empty_sample()
    only_copies = getattr(dataset, "fill_rows_only_copies", False) is True
    return None if sample is None else Filler(sample, dataset.fill_rows, copies=only_copies)


def find_filler(dataset: Any, notices: Notices) -> Filler | None:
    """Return the filler of `dataset`, or None to read its samples one by one. Warn if `empty_sample()` raises."""
    try:
        return filler(dataset)
    except Exception as error:
        name = type(dataset).__name__
        notices.warn("rows", f"{name} is read sample by sample: empty_sample() raised {error!r}")
        return None


_READS = ("__getitem__", "__getitems__")


class NotPositions(ValueError):
    """`fill_rows` returned something other than positions, such as a mask or None."""


def positions(missing: Iterable[Any] | None, n: int) -> list[int]:
    """Return the positions that `fill_rows` returned for `n` samples, each once. Raises NotPositions."""
    found = set()
    if type(missing) is tuple and not missing:
        return []
    if isinstance(missing, Iterable):
        for k in missing:  # a generator may fill rows as it is iterated, and raise
            if type(k) in BOOLS or not hasattr(k, "__index__") or not 0 <= operator.index(k) < n:
                break
            found.add(operator.index(k))
        else:
            return sorted(found)
    raise NotPositions(
        f"returned {reprlib.repr(missing)}, expected positions in the run from 0 to {n - 1}, or ()"
    )


# ---- torch's datasets ----


def _tensors(dataset: TensorDataset) -> Filler | None:
    tensors = dataset.tensors
    plain = all(
        type(t) is torch.Tensor
        and t.is_cpu
        and t.layout is torch.strided
        and not (t.is_quantized or t.is_conj() or t.is_neg() or t._is_zerotensor())
        # torch.stack keeps the strides of samples of four dimensions and more.
        and 1 <= t.dim() <= 4
        for t in tensors
    )
    if not plain:
        return None

    gatherer = Gatherer()

    def gather(indices: NDArray[np.int64], rows: Sequence[torch.Tensor]) -> bool:
        if dataset.tensors is not tensors:  # replaced since the loader began
            return False
        try:
            for tensor, row in zip(tensors, rows, strict=True):
                # Changed? `index_select` would resize the rows.
                if row.shape[1:] != tensor.shape[1:] or row.dtype is not tensor.dtype:
                    return False
                gatherer.gather(tensor, indices, row)
        except (IndexError, RuntimeError):
            return False
        return True

    def fill(run: Run) -> Iterable[int]:
        indices = as_indices(run.indices)
        # Torch's own indexing accepts negative indices, and says what is out of range.
        return () if indices is not None and gather(indices, run.rows) else range(len(run))

    sample = tuple(t.new_empty(t.shape[1:]) for t in tensors)
    return Filler(sample, fill, copies=True, gather=gather)


class Gatherer:
    """Gathers rows of tensors on the CPU: on all cores, or on one while other processes use some.

    `torch.index_select` waits for the slowest core. With two busy processes on two cores, batches of 0.1 ms took 5 ms.
    """

    def __init__(self) -> None:
        # The number of further calls that use one core. Threads may share a gatherer: a lost count does no harm.
        self._on_one_core = 0

    def gather(
        self,
        tensor: torch.Tensor,
        rows: NDArray[np.int64],
        out: torch.Tensor,
        on_one_core: Callable[[torch.Tensor, NDArray[np.int64], torch.Tensor], bool] | None = None,
    ) -> None:
        """Copy `tensor[rows]` to `out`. Raises IndexError or RuntimeError if a row is out of range.

        Args:
            on_one_core: copies on one core and returns True, or does nothing and returns False. By default a function
                that takes any tensor.
        """
        if tensor.dtype in _NOT_SELECTED:
            tensor, out = (each.view(_OF_SIZE[each.element_size()]) for each in (tensor, out))
        if (left := self._on_one_core) > 0:
            self._on_one_core = left - 1  # not `-= 1`: two threads would pass 0
            if (on_one_core or _take)(tensor, rows, out):
                return
        began = perf_counter()
        torch.index_select(tensor, 0, torch.from_numpy(rows), out=out)
        if perf_counter() - began > _LATE_S:
            self._on_one_core = 100


def _take(tensor: torch.Tensor, rows: NDArray[np.int64], out: torch.Tensor) -> bool:
    """Copy rows on one core; if that is not possible, do nothing and return False."""
    kind = _OF_SIZE.get(tensor.element_size())  # NumPy lacks some of torch's dtypes
    # The negative bit, which makes the values differ from those in memory, may be set at any time.
    if kind is None or tensor.is_complex() or tensor.is_neg() or tensor.requires_grad:
        return False
    # NumPy would first copy the whole of a tensor that is not contiguous.
    if not tensor.is_contiguous() or not out.is_contiguous():
        return False
    # Its storage may have been resized.
    if (
        tensor.untyped_storage().nbytes()
        < (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    ):
        return False
    # As uint64 a negative row is huge.
    if not out.numel() or bool((rows.view(np.uint64) >= len(tensor)).any()):
        return False
    # Not `tensor.numpy()`, after which torch refuses to resize the tensor for good.
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    items: NDArray[Any] = np.ndarray(tensor.shape, f"i{tensor.element_size()}", memory)
    # "raise" would fill a copy of `out` first.
    items.take(rows, 0, out.view(kind).numpy(), "clip")
    return True


_LATE_S = 1e-3
"""A longer call waited for a core: the loop's thread gathers at most 1 MB, in 0.2 ms. In a worker, `index_select` has
one core anyway."""
_NOT_SELECTED = {torch.uint16, torch.uint32, torch.uint64}  # by some versions of index_select
_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _empty_like(leaf: Any) -> Any:
    return torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else np.empty_like(leaf)


def _leaves(rows: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(rows, found.append)
    return found


def _subset(dataset: Subset[Any]) -> Filler | None:
    whole = dataset.dataset
    inner = filler(whole)
    if inner is None:
        return None
    fill = inner.fill

    def fill_subset(run: Run) -> Iterable[int]:
        if dataset.dataset is not whole:  # replaced since the loader began
            return range(len(run))
        try:
            indices = [dataset.indices[index] for index in run.indices]
        except (IndexError, TypeError):
            return range(len(run))
        return fill(run.renamed(indices))

    return Filler(inner.sample, fill_subset, copies=inner.copies)


def _concatenated(dataset: ConcatDataset[Any]) -> Filler | None:
    datasets = list(dataset.datasets)
    parts = [part for part in map(filler, datasets) if part is not None]
    if not parts or len(parts) < len(datasets):
        return None
    # If the samples have no rows, the caller finds out why.
    with suppress(TypeError, LookupError):
        layout = Layout(parts[0].sample, filled=True)
        if not all(layout.fits(part.sample) for part in parts):
            return None
    ends, gatherer = np.array(dataset.cumulative_sizes, np.uint64), Gatherer()
    begins = [0, *dataset.cumulative_sizes]
    copies = all(part.copies for part in parts)

    def fill(run: Run) -> Iterable[int]:
        indices = as_indices(run.indices)
        if indices is None or dataset.datasets != datasets:  # replaced since the loader began
            return range(len(run))
        numbers = ends.searchsorted(indices.view(np.uint64), "right")  # negative ones are huge
        counts = np.bincount(numbers)
        present = counts.nonzero()[0]
        if copies and 4 * len(present) > len(run):  # a call for each part would cost more
            return range(len(run))
        places = numbers.argsort(kind="stable")  # each part fills neighbouring rows
        indices = indices[places]
        moved = len(present) > 1
        rows = map_leaves(run.rows, _empty_like) if moved else run.rows
        stops = counts[present].cumsum().tolist()
        missing: list[int] = []
        for number, start, stop in zip(present.tolist(), [0, *stops], stops, strict=False):
            own = places[start:stop]
            if number == len(ends):  # negative or out of range: torch reads it or raises
                missing += own.tolist()
                continue
            local = indices[start:stop] - begins[number]
            if (gather := parts[number].gather) is None:
                part = _part(run, rows, slice(start, stop), own, local.tolist())
                missing += [int(own[k]) for k in positions(parts[number].fill(part), len(own))]
            elif not gather(local, [leaf[start:stop] for leaf in rows]):
                missing += own.tolist()
        if moved:
            back = places.argsort()
            for leaf, made in zip(_leaves(run.rows), _leaves(rows), strict=True):
                if isinstance(leaf, torch.Tensor):
                    gatherer.gather(made, back, leaf)
                else:
                    leaf[places] = made
        return missing

    return Filler(parts[0].sample, fill, copies=copies)


def _part(run: Run, rows: Any, where: slice, places: NDArray[np.intp], indices: list[int]) -> Run:
    """Return the samples at `places` of a run, with these indices and their rows, which are neighbours in `rows`."""
    return Run(indices, map_leaves(rows, lambda leaf: leaf[where]), lambda: run.keys[places])


_OF_TORCH: dict[type, Callable[[Any], Filler | None]] = {
    TensorDataset: _tensors,
    Subset: _subset,
    ConcatDataset: _concatenated,
}
