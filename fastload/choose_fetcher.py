"""Chooses how a loader's batches are read."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset, default_collate

from fastload.fetch import BatchFetcher, Fetcher, SampleFetcher, SingleFetcher, SlotFetcher
from fastload.filling import FillingFetcher, find_filler, find_layout
from fastload.iterable import LaneFetcher
from fastload.notices import Notices
from fastload.settings import Settings
from fastload.slots import SlotPool


def make_fetcher(settings: Settings, pool: SlotPool, notices: Notices) -> Fetcher:
    """Return what reads a loader's batches.

    The first of these that applies: an iterable dataset in lanes; without batching one sample; rows that the dataset
    fills; one call of `__getitems__`; sample by sample into slots, or into a list for a `collate_fn`.
    """
    how = settings, pool, notices
    dataset = settings.dataset
    if settings.iterable:
        return LaneFetcher(*how)
    if not settings.batched:
        return SingleFetcher(*how)
    slots = settings.collate_fn is default_collate
    found = find_filler(dataset, notices) if slots else None
    if found is not None and (layout := find_layout(found, dataset, notices)) is not None:
        return FillingFetcher(*how, found, layout)
    if _reads_batches(dataset):
        return BatchFetcher(*how)
    return SlotFetcher(*how) if slots else SampleFetcher(*how)


def _reads_batches(dataset: Any) -> bool:
    """Return whether `__getitems__` is the user's: that of torch's Subset over a dataset without one only loops."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))
