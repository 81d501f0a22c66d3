"""Rules that say what bounds a run whose samples wait for an object store. Each threshold has its reason."""

from __future__ import annotations

from fastload._kit.texts import counted, size_text
from fastload.telemetry.snapshot import Snapshot, duration, percent, waited_share

THROTTLED = 0.01
"""Share of the requests. One halves what may be in flight, and 3,000 requests pass until 32 are 64 again."""

USED = 0.7
"""Share of the limit. One that reads reach most of the time is used by more on average: by 0.9 at 60 ms a read."""

LARGE = 1 << 20
"""Bytes of a request. At 1 Gbit/s they take 8 ms, and most object stores begin to answer later than that."""


def waits_remotely(stats: Snapshot, more_workers: int) -> tuple[str, str] | None:
    """Return what bounds a run whose samples wait, and what to change. Return None if it read nothing remotely."""
    remote = stats.remote
    if remote is None or not remote.requests:
        return None
    waited = f"the loop waited {percent(waited_share(stats))} of the time"
    if remote.throttled > THROTTLED * remote.requests:
        return (
            f"The object store throttles the run: {remote.throttled:,} of {counted(remote.requests, 'request')} were "
            f"throttled by the server or had no answer in time, and {waited}",
            "ask for a higher limit, spread objects over more prefixes, or take larger objects or shards",
        )
    in_flight = remote.seconds / stats.elapsed_s
    each = f"{duration(remote.p50_s)} each, {in_flight:.1f} in flight of at most {remote.in_flight_limit}"
    if in_flight < USED * remote.in_flight_limit:
        return (
            f"Too few requests in flight bound the run: they took {each}, and {waited}",
            f"more requests in flight: prefetch_batches={2 * max(stats.depth, stats.workers)}, or "
            f"num_workers={more_workers} if the dataset has no will_read",
        )
    size = remote.bytes_fetched / remote.requests
    of = f"requests of {size_text(size)} took {each}, and {waited}"
    if size < LARGE:
        return f"Small objects bound the run: {of}", "larger objects or shards"
    rate = size_text(remote.bytes_fetched / stats.elapsed_s)
    return (
        f"The way to the object store bounds the run, with {rate} a second: {of}",
        "read fewer bytes, or a copy on a local disk; more workers will not help",
    )
