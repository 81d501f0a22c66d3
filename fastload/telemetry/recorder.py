"""Measurements while the loader runs: waits, stages, the GIL.

Each thread writes to its own `Recorder` and takes no lock. `merge` may run in any thread at the same time, and may see
figures that are a moment old.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from itertools import accumulate
from math import ceil, log2, nan
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage
from select import select
from time import perf_counter
from typing import Any, NamedTuple

from fastload._kit.user_errors import shown
from fastload.telemetry.snapshot import LOADER_STAGES, Stage
from fastload.telemetry.stats import Stats

PROBE_EVERY_S = 0.040
"""A probe takes some 350 us and little CPU, so at this interval it costs 0.9 % of a worker's time. Each worker probes
25 times a second, so the mean is reliable after a second or two."""

MOST_STAGES = 32
"""The most stage names that a thread tells apart. Further ones, such as names that contain paths, count as `OTHER`."""

OTHER = "other"

# A nap, not a short call: a thread that waits for the GIL must have the time to wake and take it. Beside a thread that
# never gave up the GIL, os.access (1 us) got it back at once in four of five cases. Not a long computation either: that
# loses its core if all cores are busy, while a thread that wakes from sleep does not.
_NAP_S = 250e-6

_LOWEST_S = 100e-9
_PER_OCTAVE = 8
_BUCKETS = 36 * _PER_OCTAVE  # 2**36 x 100 ns: nearly two hours


class WaitClock:
    """Adds up the seconds that any number of threads wait, including those that still wait.

    A thread counts as waiting between `start` and `stop`. The owner holds its own lock in each call.

    Examples:
        >>> clock = fastload.telemetry.WaitClock()
        >>> clock.start()
        >>> clock.seconds() > 0
        True
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._since = perf_counter()
        self._seconds = 0.0

    def _advance(self) -> None:
        now = perf_counter()
        self._seconds += self._waiting * (now - self._since)
        self._since = now

    def start(self) -> None:
        """Count one more waiting thread."""
        self._advance()
        self._waiting += 1

    def stop(self) -> None:
        """Count one waiting thread less."""
        self._advance()
        self._waiting -= 1

    def restart(self) -> None:
        """Restart at 0 seconds. Threads that wait still count."""
        self._advance()
        self._seconds = 0.0

    def seconds(self) -> float:
        """Return the thread-seconds waited since the last restart."""
        self._advance()
        return self._seconds


class Histogram:
    """Durations on a log scale: 8 buckets an octave, from 100 ns to two hours.

    A quantile is within 4.5 % of the true one (half a bucket, 2 ** (1 / 16)). Durations outside of the scale count at
    its ends. `count` and `seconds`, the total, are exact.

    One thread writes, and any thread may read. A reader needs no lock, with or without a GIL: every bucket is one
    reference, and a figure may miss the latest observation.
    """

    __slots__ = ("_counts", "count", "cpu_seconds", "seconds")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self.count = 0
        self.seconds = 0.0
        self.cpu_seconds = 0.0  # if the caller measures them

    def add(self, seconds: float, count: int = 1) -> None:
        """Count `count` durations of `seconds` each."""
        self._counts[bucket(seconds)] += count
        self.count += count
        self.seconds += seconds * count

    def include(self, other: Histogram) -> None:
        """Add the counts of `other`."""
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self.count += other.count
        self.seconds += other.seconds
        self.cpu_seconds += other.cpu_seconds

    def quantiles(self, *shares: float) -> tuple[float, ...]:
        """Return the quantile of each share (0 to 1) of what was counted: something must be."""
        return quantiles_of(dict(enumerate(self._counts)), *shares)


def quantiles_of(counts: Mapping[int, int], *shares: float) -> tuple[float, ...]:
    """Return the quantile of each share of durations, from how many are in each bucket."""
    buckets = sorted(counts)
    reached = list(accumulate(counts[place] for place in buckets))
    places = (bisect_left(reached, max(1, ceil(share * reached[-1]))) for share in shares)
    return tuple(_LOWEST_S * 2 ** ((buckets[place] + 0.5) / _PER_OCTAVE) for place in places)


def bucket(seconds: float) -> int:
    """Return the bucket of a histogram that counts a duration."""
    place = int(log2(seconds / _LOWEST_S) * _PER_OCTAVE) if seconds > _LOWEST_S else 0
    return min(place, _BUCKETS - 1)


class Place(NamedTuple):
    """Where the first sample of a run is. `index` is None if samples have none, and `file` is "" if none is known.

    It keeps only the index alive.

    Examples:
        >>> str(fastload.telemetry.Place(epoch=0, ordinal=3, index=42))
        'at or after sample index 42 in batch 3 of epoch 0'
    """

    epoch: int
    ordinal: int
    index: Any
    file: str = ""

    def __str__(self) -> str:
        index = "" if self.index is None else f"at or after sample index {self.index!r} "
        file = f"({self.file}) " if self.file else ""
        return f"{index}{file}in batch {self.ordinal} of epoch {self.epoch}"


class Recorder:
    """The measurements of one thread. Only that thread writes; any may merge. A call takes under 1 us, a probe more.

    Examples:
        >>> recorder = fastload.telemetry.Recorder()
        >>> recorder.add("decode", seconds=0.004)
        >>> fastload.telemetry.merge([recorder]).stages["decode"].count
        1
    """

    __slots__ = (
        "_core_wait_s",
        "_delayed_before_s",
        "_next_probe",
        "_probe_wait_s",
        "_probes",
        "_sample",
        "_sample_cpu_s",
        "_slowest",
        "_stages",
        "_switches",
        "_switches_before",
        "running",
    )

    def __init__(self) -> None:
        self._sample = Histogram()
        self._stages = {"sample": self._sample}  # replaced, never changed: a reader may iterate
        self._sample_cpu_s = 0.0
        self._slowest: tuple[float, Any, bool] = (0.0, "", False)
        self._probes = 0
        self._probe_wait_s = 0.0
        self._next_probe = 0.0
        self._delayed_before_s: float | None = None
        self._core_wait_s = 0.0
        self._switches_before: int | None = None
        self._switches = 0
        # Stages that were entered and not left, innermost last. They are not in the `stage` itself, because threads
        # share it and calls re-enter it.
        self.running: list[tuple[object, float, float, AbstractContextManager[Any]]] = []

    def add(self, stage: str, seconds: float, count: int = 1, *, cpu_seconds: float = 0.0) -> None:
        """Record `count` durations of `seconds` in a stage. This thread computed for `cpu_seconds` of their sum."""
        histogram = self._stages.get(stage) or self._new(stage)
        histogram.add(seconds, count)
        histogram.cpu_seconds += cpu_seconds

    def _new(self, stage: str) -> Histogram:
        if len(self._stages) >= MOST_STAGES and stage not in LOADER_STAGES:
            stage = OTHER
        histogram = self._stages.get(stage)
        if histogram is None:
            histogram = Histogram()
            self._stages = {**self._stages, stage: histogram}
        return histogram

    def run(self, units: int, seconds: float, cpu_seconds: float, where: Callable[[], Any]) -> None:
        """Record a run of `units` samples that took `seconds`, of which this thread computed `cpu_seconds`.

        Each sample counts with the mean. The slowest sample of the run is taken to need what is left after the usual
        time of the others. If it is the slowest so far, store `where()`, whose text the report shows, and whether this
        is the thread's first run: its time includes imports and opening files.
        """
        self.running.clear()  # a generator may have been left inside a stage
        sample, mean = self._sample, seconds / units
        first = not sample.count
        slowest = mean
        if units > 1 and sample.count:
            slowest = max(mean, seconds - (units - 1) * sample.seconds / sample.count)
        sample.add(mean, units)
        sample.cpu_seconds += cpu_seconds
        self._sample_cpu_s += cpu_seconds
        if slowest > self._slowest[0]:
            self._slowest = slowest, where(), first

    def waited(self, core_wait_s: float, switches: int) -> None:
        """Add for how long a worker process lacked a core, and how often it blocked."""
        self._core_wait_s += core_wait_s
        self._switches += switches

    def probe(self) -> None:
        """Release the GIL for some 300 us, and measure how long it takes to get it back. At most every `PROBE_EVERY_S`.

        Without a GIL, skip that. Always note for how long the thread lacked a core, and how often it blocked, since its
        first probe.
        """
        started = perf_counter()
        if started < self._next_probe:
            return
        delayed = delayed_after = delayed_s()  # it releases the GIL too, so these waits count
        probed = gil_is_on()
        if probed:
            select((), (), (), _NAP_S)
            ended = perf_counter()
            delayed_after = delayed_s()
            self._probe_wait_s += max(0.0, ended - started - _NAP_S - (delayed_after - delayed))
        if self._delayed_before_s is None:
            self._delayed_before_s = delayed
        self._core_wait_s = delayed_after - self._delayed_before_s
        now = switches()
        if self._switches_before is None:
            self._switches_before = now + self._probes
        self._switches = now - self._switches_before - self._probes  # each nap is a switch
        self._probes += probed
        self._next_probe = perf_counter() + PROBE_EVERY_S


def gil_is_on() -> bool:
    """Return whether the threads of this Python take turns now. A free-threaded one may get a GIL by an import."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def switches() -> int:
    """Return how often the calling thread has blocked."""
    return getrusage(RUSAGE_THREAD).ru_nvcsw


def delayed_s(thread: object = "thread-self") -> float:
    """Return the seconds for which a thread could run but had no core, or 0.0 if the kernel does not say.

    Args:
        thread: number of the thread in Linux, such as `threading.get_native_id()`. The calling thread by default.

    Examples:
        >>> fastload.telemetry.delayed_s() >= 0
        True
    """
    with suppress(OSError), open(f"/proc/{thread}/schedstat", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * 1e-9
    return 0.0


def cpu_seconds(pid: int, *, ended_children: bool = False) -> float:
    """Return the CPU seconds (user + system) of a process, or 0.0 if the system does not say."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        # The command, field 2, is in parentheses and may contain spaces. Fields 14 to 17 are user and system ticks,
        # then those of children that have ended.
        ticks = file.read().rpartition(b")")[2].split()[11 : 15 if ended_children else 13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def cores_busy_s() -> float:
    """Return the CPU seconds that all processes used on this process's cores since boot, or nan if unknown.

    They include time that a hypervisor gave to other machines: this machine could not use it.

    Examples:
        >>> before = fastload.telemetry.cores_busy_s()
    """
    mine = {b"cpu%d" % core for core in os.sched_getaffinity(0)}
    try:
        read = Path("/proc/stat").read_bytes()  # as text it costs 30 us an epoch
    except OSError:
        return nan
    rows = [line.split() for line in read.partition(b"intr")[0].splitlines()]
    # user, nice, system, (idle, iowait,) irq, softirq, steal
    ticks = sum(int(row[k]) for row in rows if row[0] in mine for k in (1, 2, 3, 6, 7, 8))
    return ticks / os.sysconf("SC_CLK_TCK")


def merge(recorders: Iterable[Recorder]) -> Stats:
    """Return what `recorders` measured, all of them together. Any thread may call this while others write to them.

    Stages come in the order in which a batch meets them. Those that the dataset named come after "sample", the longest
    first. A stage without observations is left out.

    Args:
        recorders: one of each thread, and of each worker process.

    Examples:
        >>> fastload.telemetry.merge([fastload.telemetry.Recorder()]).stages
        {}
    """
    recorders = list(recorders)
    histograms: dict[str, Histogram] = {}
    for recorder in recorders:
        for name, histogram in recorder._stages.items():
            if histogram.count:
                histograms.setdefault(name, Histogram()).include(histogram)
    probes = sum(recorder._probes for recorder in recorders)
    wait_s = sum(recorder._probe_wait_s for recorder in recorders) / max(1, probes)
    slowest_s, where, first = max(
        (r._slowest for r in recorders), key=lambda s: s[0], default=(0.0, "", False)
    )

    def place(name: str) -> tuple[float, float]:
        known = name in LOADER_STAGES
        order = LOADER_STAGES.index(name if known else "sample") + (0 if known else 0.5)
        return order, -histograms[name].seconds

    return Stats(
        stages={name: _summary(name, histograms[name]) for name in sorted(histograms, key=place)},
        sample_cpu_s=sum(recorder._sample_cpu_s for recorder in recorders),
        core_wait_s=sum(recorder._core_wait_s for recorder in recorders),
        blocked=sum(recorder._switches for recorder in recorders),
        gil_pressure=min(1.0, wait_s / sys.getswitchinterval()),
        gil_probes=probes,
        slowest_s=slowest_s,
        slowest=shown(where, str),  # it contains a user's index
        slowest_is_first=first,
    )


def _summary(name: str, histogram: Histogram) -> Stage:
    p50, p95, p99 = histogram.quantiles(0.50, 0.95, 0.99)
    return Stage(name, histogram.seconds, histogram.count, p50, p95, p99, histogram.cpu_seconds)
