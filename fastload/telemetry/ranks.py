"""What the ranks of a job say of a loader: how its latest seconds went, which rank is the slowest, and why."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastload.telemetry.diagnosis import FEWEST_BATCHES, WAITS, bound
from fastload.telemetry.snapshot import duration, percent, waited_share
from fastload.telemetry.stats import Stats
from fastload.telemetry.sums import less

LATEST_S = 4.0
"""Seconds of the latest figures, at least: a hundred probes of the GIL by one worker."""

SILENT_S = 8.0
"""A rank that speaks every two seconds and misses four in a row is silent."""

SLOWER, BEHIND_S = 0.8, 4.0
"""A rank is slow if its rate is below this share of the others', and it lacks as many batches as they read in these
seconds. Ranks that wait for one another have the same rate, but each reports every two seconds: one that has not yet
reported a short pause may seem ahead of the others by two reports at most."""

_ROWS = 8


@dataclass(frozen=True, slots=True)
class RankStats:
    """What one rank said last of its loader. Rate, wait and cause are those of its latest seconds.

    Examples:
        >>> loader.stats(ranks=True).ranks[0].rank
        0
    """

    rank: int
    epoch: int
    batches: int
    """Batches of this epoch that the loop has received."""
    total_batches: int
    """Those of all epochs."""
    batches_per_s: float
    wait_share: float
    """Share (0 to 1) of the time for which the loader held up the loop: the exposed wait."""
    cause: str
    """What bounds this rank, in a word, as in the last sentence of `stats()`."""
    sentence: str
    since_s: float
    """For how many seconds it has been so: the loop waits, or it keeps about this pace."""
    ended: bool
    """Whether the loader's epoch is over. Until the next one, the rank says no more of it."""
    heard_s: float = 0.0
    """Seconds since this rank was heard, at least."""

    @property
    def silent(self) -> bool:
        """Whether the rank should have been heard since."""
        return self.heard_s > SILENT_S and not self.ended


@dataclass(frozen=True, slots=True)
class Ranks:
    """What all ranks of the job said last of one loader. `print` shows a report.

    Examples:
        >>> ranks = loader.stats(ranks=True)
        >>> ranks.slowest is None, ranks.waits_most.rank
        (True, 0)
    """

    loader: str
    """The loader's name: the class of its dataset, and its number among loaders of such, as they began on a rank."""
    world_size: int
    ranks: tuple[RankStats, ...]
    """The ranks that spoke of this loader."""
    note: str = ""
    """Why only this rank is known, or empty."""

    @property
    def slowest(self) -> RankStats | None:
        """The rank that the others wait for, or that has read fewer batches. None: all are alike, or one is alone."""
        heard = [one for one in self.ranks if not one.silent and one.batches]
        if len(heard) < 2:
            return None
        last = min(heard, key=lambda one: one.batches_per_s)
        pace, total = (_median(name, heard, last) for name in ("batches_per_s", "total_batches"))
        if last.batches_per_s < SLOWER * pace and last.total_batches < total - BEHIND_S * pace:
            return last
        most = max(heard, key=lambda one: one.wait_share)
        return most if most.wait_share >= WAITS + _median("wait_share", heard, most) else None

    @property
    def waits_most(self) -> RankStats | None:
        """The rank with the most exposed wait, of those that are heard."""
        heard = (one for one in self.ranks if not one.silent)
        return max(heard, key=lambda one: one.wait_share, default=None)

    @property
    def silent(self) -> tuple[RankStats, ...]:
        """The ranks that spoke, and should have been heard since."""
        return tuple(one for one in self.ranks if one.silent)

    @property
    def unheard(self) -> tuple[int, ...]:
        """The numbers of the ranks that have not spoken of this loader."""
        return tuple(sorted({*range(self.world_size)} - {one.rank for one in self.ranks}))

    def __str__(self) -> str:
        """Return a table of the ranks that wait most, and sentences on the slowest and on those that are not heard."""
        return "\n".join([*self._table(), *self.sentences()])

    def _table(self) -> list[str]:
        shown = sorted(self.ranks, key=lambda one: (-one.wait_share, one.batches_per_s))[:_ROWS]
        return [
            "rank  epoch  batches  a second  waited      since  cause",
            *(
                f"{one.rank:>4}{one.epoch:>7}{one.batches:>9,}{one.batches_per_s:>10,.1f}"
                f"{percent(one.wait_share):>8}{duration(one.since_s):>11}  {one.cause}"
                for one in shown
            ),
        ]

    def sentences(self) -> list[str]:
        """Return what is to be said of the ranks, the most important first."""
        found = [self.note] if self.note else []
        if (slow := self.slowest) is not None:
            found.append(
                f"Rank {slow.rank} is the slowest of {self.world_size}, for {duration(slow.since_s)}. {slow.sentence}"
            )
        elif self.world_size > 1 and not self.note:
            found.append("No rank is slower than the others.")
        if (most := self.waits_most) is not None:
            found.append(
                f"The most exposed wait is that of rank {most.rank}: {percent(most.wait_share)} of its time."
            )
        found += [
            f"Rank {one.rank} has been silent for {duration(one.heard_s)}, in batch {one.batches} of epoch "
            f"{one.epoch}: it has ended, was killed, or hangs."
            for one in self.silent
        ]
        if self.unheard and not self.note:
            more = ", ..." * (len(self.unheard) > _ROWS)
            numbers = ", ".join(map(str, self.unheard[:_ROWS])) + more
            found.append(f"Not heard of {self.loader} yet: rank {numbers}.")
        return found


def _median(name: str, ranks: Sequence[RankStats], without: RankStats) -> float:
    values: list[float] = sorted(getattr(one, name) for one in ranks if one is not without)
    return values[len(values) // 2]


def loader_name(loader: Any, seen: Counter[str]) -> str:
    """Return a name for a loader: the class of its dataset, and a number if loaders of such were `seen` before."""
    kind = type(loader.dataset).__name__
    seen[kind] += 1
    return kind if seen[kind] == 1 else f"{kind} {seen[kind]}"


def rank_stats(rank: int, now: Stats, total: Stats, latest: Stats, since_s: float) -> RankStats:
    """Return what a rank says.

    Args:
        rank: its number.
        now: its figures.
        total: those of all epochs.
        latest: those of its latest seconds.
        since_s: for how long it has been so.
    """
    cause, _, sentence = bound(latest)
    return RankStats(
        *(rank, now.epoch, now.batches, total.batches, _pace(latest), waited_share(latest)),
        *(cause, sentence, since_s, now.ended),
    )


def _pace(stats: Stats) -> float:
    return stats.batches / stats.elapsed_s if stats.elapsed_s else 0.0


class Latest:
    """Follows a loader: how its latest seconds went, and since when."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, Stats]] = deque()
        self._since = 0.0
        self._waits: bool | None = None
        self._pace = 0.0

    def look(self, rank: int, now: Stats, total: Stats, clock: float) -> RankStats:
        """Return what to say. `now` are the figures of the epoch, `total` those of all, and `clock` is in seconds."""
        points = self._points
        if not points:
            points.append((clock, Stats()))
        # The latest seconds begin where they are long enough, and have batches enough to judge.
        while len(points) > 1 and (
            total.batches - points[1][1].batches >= FEWEST_BATCHES
            and total.elapsed_s - points[1][1].elapsed_s >= LATEST_S
        ):
            points.popleft()
        before, latest = points[-1], less(total, points[0][1])
        waits = waited_share(latest) >= WAITS
        pace = _pace(latest)
        same_pace = SLOWER * self._pace <= pace <= self._pace / SLOWER
        if waits != self._waits or not (waits or same_pace):
            self._since, self._waits, self._pace = before[0], waits, pace
        if total.batches > before[1].batches:
            points.append((clock, total))
        return rank_stats(rank, now, total, latest, clock - self._since)
