"""How a dataset fills the rows of a batch itself: one call for a run of samples, in place of one for each.

A class takes part with two methods, `empty_sample` and `fill_rows`; docs/rows.md has an example.

`empty_sample()` returns a sample like those of `__getitem__`, whose values do not count: tensors, NumPy arrays, ints,
floats and bools, in tuples, lists and dicts. It returns None if samples have no common shape.

`fill_rows(run)` writes every sample of a `Run` into its row: what `self[index]` would have returned. It returns the
positions in the run that it could not do. The loader reads those by `__getitem__`, so their errors, `retries` and
`on_error` stay what they are. Random numbers come from `run.keys`: what draws from the stream of a sample raises.

The loader calls `fill_rows` only with torch's default collate. It reads sample by sample if a nearer class, or the
instance, overrides `__getitem__` or any other method of the class that defines `fill_rows`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset, TensorDataset


class Run:
    """The samples of a batch that one call of `fill_rows` is to fill: `len(run)` neighbours.

    Attributes:
        indices: what the sampler gave for each of them.
        rows: their memory in the batch, in the containers of a sample. A leaf has one dimension more than that of a
            sample: `dtype[len(run), *shape]`, a tensor for a tensor and an array for an array; `int64[len(run)]`,
            `float64` or `bool` arrays for numbers. Colours of images may be the innermost dimension in memory: look at
            the strides.
    """

    __slots__ = ("_keys", "indices", "rows")

    def __init__(
        self, indices: Sequence[Any], rows: Any, keys: Callable[[], NDArray[np.uint64]]
    ) -> None:
        self.indices = indices
        self.rows = rows
        self._keys = keys

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def keys(self) -> NDArray[np.uint64]:
        """Return the keys of the samples' random streams, uint64[len(run)]: functions of seed, epoch, place, index."""
        return self._keys()

    def renamed(self, indices: Sequence[Any], rows: Any = None) -> Run:
        """Return the same samples under the indices that a wrapped dataset knows, and perhaps with fewer rows."""
        return Run(indices, self.rows if rows is None else rows, self._keys)


@dataclass(slots=True)
class Filler:
    """Fills runs of one dataset."""

    sample: Any
    """What `empty_sample()` returned."""
    fill: Callable[[Run], Iterable[int]]
    """Takes a run and returns the positions that it could not do."""
    copies: bool = False
    """It only copies memory. No code of the user's runs, and nothing is drawn."""


def filler(dataset: Any) -> Filler | None:
    """Return what fills the rows of `dataset`, or None if its samples are to be read one by one."""
    kind: Any = type(dataset)
    if kind is TensorDataset:
        return _tensors(dataset)
    if kind is Subset:
        return _subset(dataset)
    if kind is ConcatDataset:
        return _concatenated(dataset)
    methods = _methods(kind)
    if methods is None or not methods.isdisjoint(getattr(dataset, "__dict__", ())):
        return None
    sample = dataset.empty_sample()
    return None if sample is None else Filler(sample, dataset.fill_rows)


_READS = ("__getitem__", "__getitems__", "__getattr__", "__getattribute__")


def _methods(kind: type) -> set[str] | None:
    """Return what an instance must not override, or None if `kind` has no `fill_rows` that holds for it."""
    ways = kind.__mro__
    owner = next((base for base in ways if "fill_rows" in vars(base)), None)
    if owner is None or not hasattr(kind, "empty_sample"):
        return None
    # Nearer classes may add methods and attributes. They may not replace code that `fill_rows` stands for.
    own = {name for name in dir(owner) if not name.startswith("__")}
    code = {name for name in own if _is_code(getattr_static(owner, name))} | {*_READS}
    nearer = ways[: ways.index(owner)]
    return None if any(not code.isdisjoint(vars(base)) for base in nearer) else code


def _is_code(attribute: Any) -> bool:
    return callable(attribute) or hasattr(attribute, "__get__")


def as_indices(indices: Sequence[Any], length: int | None = None) -> NDArray[np.int64] | None:
    """Return indices as int64[n], or None unless NumPy makes int64 of them.

    With `length`, None unless all are from 0 to `length - 1` too.
    """
    try:
        found = np.array(indices)
    except ValueError:  # some are sequences
        return None
    if found.dtype != np.int64 or found.ndim != 1:
        return None
    # A negative number is a very large one of the other type.
    inside = length is None or bool((found.view(np.uint64) < length).all())
    return found if inside else None


def positions(missing: Iterable[Any] | None, n: int) -> list[int]:
    """Return the positions that `fill_rows` returned for `n` samples, each once.

    Raises ValueError for anything else, such as a mask.
    """
    if missing is None:
        raise ValueError("it returned None. Return () if all samples are done")
    found = set(missing)
    for k in found:
        if isinstance(k, bool | np.bool_) or not 0 <= operator.index(k) < n:
            raise ValueError(
                f"it must return positions in the run, from 0 to {n - 1}, and returned {k!r}"
            )
    return sorted(map(operator.index, found))


def mapped(rows: Any, function: Callable[[Any], Any]) -> Any:
    """Return the containers of a sample with `function` of every leaf."""
    if isinstance(rows, dict):
        return {key: mapped(part, function) for key, part in rows.items()}
    if isinstance(rows, tuple) and hasattr(rows, "_fields"):
        return type(rows)(*(mapped(part, function) for part in rows))
    if isinstance(rows, tuple | list):
        return type(rows)(mapped(part, function) for part in rows)
    return function(rows)


# ---- datasets of torch's ----


def _tensors(dataset: TensorDataset) -> Filler | None:
    tensors = dataset.tensors
    plain = all(
        type(t) is torch.Tensor
        and t.is_cpu
        and t.layout is torch.strided
        and not t.requires_grad
        and not (t.is_quantized or t.is_conj() or t.is_neg())
        # torch.stack keeps the strides of samples of four dimensions and more.
        and 1 <= t.dim() <= 4
        for t in tensors
    )
    if not plain:
        return None

    def fill(run: Run) -> Iterable[int]:
        places = as_indices(run.indices)
        if places is None or dataset.tensors is not tensors:  # replaced since the loader began
            return range(len(run))
        rows = torch.from_numpy(places)
        try:
            for tensor, row in zip(tensors, run.rows, strict=True):
                torch.index_select(tensor, 0, rows, out=row)
        # Torch's own indexing takes what is negative, or says what is out of range.
        except (IndexError, RuntimeError):
            return range(len(run))
        return ()

    return Filler(tuple(t.new_empty(t.shape[1:]) for t in tensors), fill, copies=True)


def _empty_like(leaf: Any) -> Any:
    return torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else np.empty_like(leaf)


def _leaves(rows: Any) -> list[Any]:
    found: list[Any] = []
    mapped(rows, found.append)
    return found


_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    parts = [filler(part) for part in dataset.datasets]
    first = parts[0]
    if first is None:
        return None
    alike = [part for part in parts if part is not None and _alike(part.sample, first.sample)]
    if len(alike) < len(parts):
        return None
    ends = np.array(dataset.cumulative_sizes)
    copies = all(part.copies for part in alike)

    def fill(run: Run) -> Iterator[int]:
        indices = as_indices(run.indices)
        if indices is None:
            yield from range(len(run))
            return
        numbers = np.searchsorted(ends, indices, side="right")
        numbers[indices < 0] = len(ends)
        present = np.unique(numbers).tolist()
        if copies and 4 * len(present) > len(run):  # a call for each part would cost more
            yield from range(len(run))
            return
        for number in present:
            places = np.flatnonzero(numbers == number)
            if number == len(ends):  # negative, or out of range
                yield from places.tolist()
                continue
            begin = ends[number - 1] if number else 0
            yield from _fill_some(alike[number], run, places, (indices[places] - begin).tolist())

    return Filler(first.sample, fill, copies=copies)


def _fill_some(
    found: Filler, run: Run, places: NDArray[np.intp], indices: list[int]
) -> Iterable[int]:
    """Fill the samples at `places` of a run, and return those that could not be done."""
    start, stop = int(places[0]), int(places[-1]) + 1
    if stop - start == len(places):
        rows = mapped(run.rows, lambda leaf: leaf[start:stop])
    else:  # they are made side by side, and copied
        rows = mapped(run.rows, lambda leaf: _empty_like(leaf[: len(places)]))
    part = Run(indices, rows, lambda: run.keys[places])
    missing = [int(places[k]) for k in positions(found.fill(part), len(part))]
    if stop - start > len(places):
        for leaf, made in zip(_leaves(run.rows), _leaves(rows), strict=True):
            leaf[places] = made
    return missing


def _alike(a: Any, b: Any) -> bool:
    """Return whether two samples have the same containers, types, dtypes and shapes."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, torch.Tensor | np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape)
    return True
