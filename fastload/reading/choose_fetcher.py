"""The choice of how a loader's batches are read."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset, default_collate

from fastload.memory.slots import SlotPool
from fastload.reading.fetch import BatchFetcher, Fetcher, SampleFetcher, SingleFetcher, SlotFetcher
from fastload.reading.filling import FillingFetcher, find_filler, find_layout
from fastload.reading.iterable import LaneFetcher
from fastload.reading.notices import Notices
from fastload.settings import Settings


def make_fetcher(settings: Settings, pool: SlotPool, notices: Notices) -> Fetcher:
    """Return the fetcher of a loader.

    The first way that applies is chosen: lanes of an iterable dataset; single samples without batching; rows that the
    dataset fills; one call of `__getitems__`; sample by sample into slots, or into a list for a `collate_fn`.
    """
    arguments = settings, pool, notices
    dataset = settings.dataset
    if settings.iterable:
        if settings.max_wait_ms is not None:
            from fastload.reading.read_ahead import (  # few loaders need it
                DeadlineFetcher,
                DecodingFetcher,
            )

            return (DecodingFetcher if settings.decodes else DeadlineFetcher)(*arguments)
        return LaneFetcher(*arguments)
    if not settings.batched:
        return SingleFetcher(*arguments)
    slots = settings.collate_fn is default_collate
    found = find_filler(dataset, notices) if slots else None
    if found is not None and (layout := find_layout(found, dataset, notices)) is not None:
        return FillingFetcher(*arguments, found, layout)
    if _reads_batches(dataset):
        return BatchFetcher(*arguments)
    return SlotFetcher(*arguments) if slots else SampleFetcher(*arguments)


def _reads_batches(dataset: Any) -> bool:
    """Return whether the dataset has its own `__getitems__`. That of torch's Subset may only loop over samples."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))
