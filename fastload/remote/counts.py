"""What all stores of this process have read together, for `loader.stats()`."""

from __future__ import annotations

import os
import weakref
from collections import Counter, deque
from typing import NamedTuple

from fastload.remote import fetching
from fastload.remote.lines import Session
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


class _Record:
    """The counts of a session: those that it has, or those that it had as its store went, with its client."""

    def __init__(self, session: Session) -> None:
        self._session: Session | None = session
        self._last: Counts = Counter()

    def read(self) -> Counts:
        session = self._session
        return self._last if session is None else _of(session)

    def end(self) -> None:
        self._last = self.read()
        self._session = None

    @property
    def ended(self) -> bool:
        return self._session is None


class _Known(NamedTuple):
    records: tuple[_Record, ...]
    ended: Counts
    """Of stores that are gone, and have no record any more."""


_known = _Known((), Counter())
"""Replaced, never changed: a signal handler may ask for stats, so nothing here may wait for a lock."""


def include(session: Session) -> None:
    """Count what a new session of a store reads, also after the store is gone. One thread at a time calls this."""
    global _known
    session.seconds = _Durations()
    record = _Record(session)
    alive, ended = [record], _known.ended.copy()
    for known in _known.records:
        if known.ended:
            ended.update(known.read())
        else:
            alive.append(known)
    _known = _Known(tuple(alive), ended)
    weakref.finalize(session.owner(), record.end).atexit = False


def _read() -> Counts:
    known = _known
    found = known.ended.copy()
    for record in known.records:
        found.update(record.read())
    if known.records:
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
