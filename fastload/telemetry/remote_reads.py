"""What processes have read from object stores.

`sources` gives counts that only grow, of this process. Who reads local files has none, and pays nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest

from fastload.telemetry.recorder import quantiles_of
from fastload.telemetry.snapshot import RemoteReads

Counts = Counter[str | int]
"""Fields of `RemoteReads`, and by the number of a histogram's bucket how many requests took so long."""

LIMIT = "in_flight_limit"
"""The field that is no count: its latest value holds."""

sources: list[Callable[[], Counts]] = []
"""`fastload.remote` adds its own once a store is used."""


def read_so_far() -> Counts:
    """Return the counts of this process since it began."""
    counts: Counts = Counter()
    for source in sources:
        counts.update(source())
    return counts


def between(before: Sequence[Counts], now: Sequence[Counts]) -> RemoteReads | None:
    """Return what processes have read between two times, or None if that is nothing. Processes may come later."""
    both: Counts = Counter()
    for since, until in zip_longest(before, now, fillvalue=Counter[str | int]()):
        new = until - Counter({name: n for name, n in since.items() if name != LIMIT})
        if new["requests"] or new["bytes_wanted"] or new["cache_hits"]:
            both.update(new)
    if not both:
        return None
    buckets = {place: n for place, n in both.items() if isinstance(place, int)}
    p50, p99 = quantiles_of(buckets, 0.50, 0.99) if buckets else (0.0, 0.0)
    fields = {name: n for name, n in both.items() if isinstance(name, str)}
    return RemoteReads(p50_s=p50, p99_s=p99, **fields)
