"""A trial of plainly safe code: whether reading only copies memory, and what a batch costs the loop."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import replace
from itertools import takewhile
from math import inf
from time import perf_counter
from typing import Any

from torch.utils import data

from fastload.engine.readers import readers_of
from fastload.order.sampler import RankSampler
from fastload.order.sampler_state import single_sampler
from fastload.random.keys import StreamKeys
from fastload.random.streams import entered
from fastload.reading.notices import Notices
from fastload.reading.worker_context import finish, read_run
from fastload.settings import Settings
from fastload.telemetry import Recorder, delayed_s

HAND_OVER_SECONDS = 0.5e-3
"""What it costs the loop's process to take a batch from a worker process: 0.2 to 0.4 ms of CPU time, and a wake-up."""

_OF_POSITIONS = (
    *(data.RandomSampler, data.SequentialSampler, data.SubsetRandomSampler),
    *(data.DistributedSampler, RankSampler),
)
"""Samplers whose indices are positions in the dataset, so that the trial knows some."""


class Trial:
    """Readers without workers, for plainly safe code.

    `copies` says whether making a batch only copies memory, and `is_light` whether that is little.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = replace(
            settings, worker_method="none", pin_memory=False, on_error="raise", retries=0
        )
        self._readers = readers_of(self._settings, Notices(set()), stacklevel=1)
        source = self._readers.fetcher.source
        self.copies = source.copies
        self.is_light = source.is_light(settings.samples_per_batch) and not settings.pin_memory

    def costs_little(self) -> bool:
        """Return whether the loop reads a batch in less time than it takes to hand it over.

        It reads the first sample up to five times, and the first batch up to three times if that may be quick enough.
        A worker of torch's would read a whole batch before the loop gets one.
        """
        settings, dataset = self._settings, self._settings.dataset
        known = type(single_sampler(settings.sampler)) in _OF_POSITIONS
        n = settings.samples_per_batch or 1
        if not (settings.batched and known and isinstance(dataset, Sized) and len(dataset) >= n):
            return False
        context = self._readers.of_loop(self._readers.window())
        context.info = self._readers.info_of_loop(0, context.dataset)

        def seconds(samples: int) -> float:
            given: Any = {"keys": StreamKeys(0, 0), "recorders": [Recorder()]}
            batch = self._readers.batch([*range(samples)], epoch=0, ordinal=0, position=0, **given)
            started, delayed = perf_counter(), delayed_s()
            with context.modes.entered(), entered(context.stream):
                read_run(batch, 0, batch.units, context)
                finish(batch, context)
            taken = perf_counter() - started - (delayed_s() - delayed)  # not the wait for a core
            return taken if batch.error is None else inf

        # The first call may import, and learns how samples lie in a batch. The first four are also looked at.
        if seconds(1) > 40 * HAND_OVER_SECONDS:
            return False
        return _one_is_below(HAND_OVER_SECONDS, (seconds(1) for _ in range(4))) and _one_is_below(
            HAND_OVER_SECONDS, (seconds(n) for _ in range(3))
        )


def _one_is_below(limit: float, times: Iterator[float]) -> bool:
    """Return whether one of the times is below a limit. Take no more of them after one of ten times the limit."""
    return any(t < limit for t in takewhile(lambda t: t < 10 * limit, times))
