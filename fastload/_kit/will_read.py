"""Finds the method `will_read` of a dataset, also through torch's Subset and ConcatDataset."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.utils.data import ConcatDataset, Subset

WillRead = Callable[[list[Any]], object]
"""Gets the indices of a batch that is read soon. An empty list says that no more of what it got is read."""


def will_read_of(dataset: Any) -> WillRead | None:
    """Return what tells a dataset, or those that it consists of, what is read soon. Return None if none listens.

    A subclass of Subset or ConcatDataset with a `__getitem__` of its own needs its own `will_read`.
    """
    own, read = getattr(dataset, "will_read", None), getattr(type(dataset), "__getitem__", None)
    if callable(own):
        return own  # type: ignore[no-any-return]
    if read is Subset.__getitem__:
        inner = will_read_of(dataset.dataset)
        return None if inner is None else _of_subset(dataset, inner)
    if read is ConcatDataset.__getitem__:
        parts = [will_read_of(part) for part in dataset.datasets]
        return _of_parts(dataset, parts) if any(parts) else None
    return None


def _of_subset(dataset: Subset[Any], inner: WillRead) -> WillRead:
    def will_read(indices: list[Any]) -> None:
        try:
            own = [dataset.indices[index] for index in indices]
        except (LookupError, TypeError):  # reading the sample raises it, in its place
            return
        inner(own)

    return will_read


def _of_parts(dataset: ConcatDataset[Any], parts: list[WillRead | None]) -> WillRead:
    def will_read(indices: list[Any]) -> None:
        ends, found = dataset.cumulative_sizes, defaultdict[int, list[Any]](list)
        for index in indices:
            try:
                at = range(ends[-1])[index]  # from the end if it is negative
            except (IndexError, TypeError):
                continue
            part = bisect_right(ends, at)
            found[part].append(at - (ends[part - 1] if part else 0))
        for part, inner in enumerate(parts):
            if inner is not None and (part in found or not indices):
                inner(found[part])

    return will_read
