"""What all stores of this process have read together, for `loader.stats()`."""

from __future__ import annotations

import os
from collections import Counter, deque
from typing import NamedTuple

from fastload.remote import fetching
from fastload.remote.fetching import Session
from fastload.telemetry.recorder import bucket
from fastload.telemetry.remote_reads import LIMIT, Counts, sources


class _Durations(deque[float]):
    """How long the last 1,000 requests took, and how many of all took how long. Its owner holds a lock."""

    def __init__(self) -> None:
        super().__init__(maxlen=1000)
        self.counts: Counts = Counter()

    def append(self, seconds: float) -> None:
        super().append(seconds)
        self.counts[bucket(seconds)] += 1
        self.counts["seconds"] += seconds  # type: ignore[assignment]


class _Known(NamedTuple):
    sessions: tuple[Session, ...]
    ended: Counts  # of sessions whose stores are gone


_known = _Known((), Counter())
"""Replaced, never changed: a signal handler may ask for stats, so nothing here may wait for a lock."""


def include(session: Session) -> None:
    """Count what a new session of a store reads, also after the store is gone. One thread at a time calls this."""
    global _known
    session.seconds = _Durations()
    alive, ended = [session], _known.ended.copy()
    for known in _known.sessions:
        if known.owner() is not None:
            alive.append(known)
        else:
            ended.update(_of(known))
    _known = _Known(tuple(alive), ended)


def _read() -> Counts:
    known = _known
    found = known.ended.copy()
    for session in known.sessions:
        found.update(_of(session))
    if known.sessions:
        found[LIMIT] = fetching.process.limit.allowed
    return found


def _of(session: Session) -> Counts:
    durations = session.seconds
    assert isinstance(durations, _Durations)
    counts = durations.counts.copy()
    counts["requests"] = session.requests
    counts["retries"] = session.retried
    counts["throttled"] = session.throttled
    counts["bytes_wanted"] = session.bytes_wanted
    counts["bytes_fetched"] = session.bytes_fetched
    return counts


def _after_fork_in_child() -> None:
    global _known
    _known = _Known((), Counter())


sources.append(_read)
os.register_at_fork(after_in_child=_after_fork_in_child)
