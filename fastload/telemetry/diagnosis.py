"""Rules that find in a snapshot what bounds a run and what to change. Each threshold has its reason."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from fastload._kit.texts import counted
from fastload.telemetry.remote_waits import waits_remotely
from fastload.telemetry.snapshot import (
    Snapshot,
    Stage,
    duration,
    idle_share,
    named_stages,
    others_share,
    percent,
    seconds_in,
    waited_s,
    waited_share,
)

# ---- thresholds ----

SHORTEST_S, FEWEST_BATCHES = 0.2, 3
"""The shortest run to judge. In a shorter one, threads start and open their first files, and no rate is steady."""

WAITS = 0.10
"""Share of the loop's time. If the loop waits less, even a loader without any cost makes it at most 11 % faster."""

IDLE = 0.60
"""Share of the workers' time. If they idle more, half of them are enough, even with room for uneven samples."""

PRESSURE = 0.30
"""GIL pressure: a wait of 1.5 ms each time that a thread releases the GIL, as long as some samples take."""

MIDDLE_HOLDS = 0.07
"""GIL pressure (a third of a millisecond) that is enough if the process keeps exactly one of several cores busy. Two
threads that hold the GIL for 0.7 ms each show 0.09 then, and one thread alone at most 0.04."""

SHORT_HOLDS = 0.05
"""GIL pressure (a quarter of a millisecond) that is enough if samples wait and about one core is busy (`ONE_CORE`).
Threads that hold the GIL for 100 us each wait for a few others. A late wake alone looks like 0.02."""

ONE_CORE = (0.5, 1.15)
"""Cores used under the GIL: one, and a little for code without the GIL. It is less if other processes use some."""

TURN_S = 1e-4
"""Seconds for each time that a worker stopped. Threads hold the GIL for 15 to 50 us in turn, and a read takes 80 us."""

TURNS = 0.25
"""Share of the samples' time that such turns take. Tiny tensors lose 0.4 of it, Pillow and torchvision's v1 0.1."""

STRAGGLER = 20
"""The slowest sample, as a multiple of the median. JPEG files of one set differ by a factor of 10 at most. A cold read
takes 20 times as long as a cached one but is frequent, so `MOSTLY` must hold too."""

MOSTLY = 0.5
"""The share from which the report calls a part "most": without it, less than half would remain."""

COMPUTES = 0.5
"""Share of the samples' time for computing, or waiting for a core. If it is less, samples mostly wait."""

LACKS = 0.5
"""Seconds without a core for each second of computing. If it is more, threads lack a third of the cores they want."""

FULL = 0.85
"""Share of the CPU time of all cores. Even a full machine loses the rest by switching threads."""

OTHERS = 0.25
"""Share of the cores' time that other processes use, and of the workers' busy time without a core. A system without
other jobs uses less. If workers lack cores for less, something else takes most of their time."""

PINS = 0.7
"""Share of the time that the one pinning thread is busy. If it is busier, the next batch waits for it."""

HAND_OVER_S = 1e-3
"""Seconds for a batch. Handing it to a thread and back costs some 100 us and a wake of the loop. If reading it
takes less than a few times that, the loop itself is faster."""


class Diagnosis(NamedTuple):
    """What bounds a run."""

    cause: str
    """"nothing" (there are too few figures, or most of the wait was the start), "step" (the training step),
    "inline" (there are no workers), "sampler", "straggler" (one slow sample), "gil", "collate", "pin", "prefetch" (too
    few batches in flight), "storage", "remote" (an object store), "decode" or another stage that the dataset named,
    "cores" (all are busy) or "workers" (too few), or "others" (other processes take the cores)."""
    advice: str
    """What to change."""
    sentence: str
    """Cause and advice in words, with the figures."""


# ---- the rules ----


def bound(stats: Snapshot) -> Diagnosis:
    """Return what bounds the run that `stats` describes.

    The first rule that holds decides. Causes that make other figures mislead come first.
    """
    if stats.epoch < 0:
        return _finding(
            "nothing",
            "Nothing is measured: no epoch has begun",
            'or torch\'s own iterator runs (worker_method="torch", or a data pipe), which measures nothing',
        )
    if early := _too_little(stats):
        return early
    sampler = seconds_in(stats, "sampler")
    if sampler >= WAITS * stats.elapsed_s and sampler >= stats.consumer_wait_s:
        share = percent(sampler / stats.elapsed_s)
        return _finding(
            "sampler",
            f"The sampler bounds the run: it runs in the loop's thread, as torch's does, for {share} of the time",
            "draw many indices at a time, or give seed= and no sampler of your own",
        )
    if waited_share(stats) < WAITS:
        return _step(stats)
    if stats.workers == 0:
        return _inline(stats)
    return (
        _straggler(stats)
        or _others(stats)
        or _gil(stats)
        or _turns(stats)
        or _after_samples(stats)
        or _idle(stats)
        or _work(stats)
    )


def _finding(cause: str, fact: str, advice: str) -> Diagnosis:
    return Diagnosis(cause, advice, f"{fact}; {advice}.")


def _beside_gil(stats: Snapshot, cause: str, fact: str, advice: str) -> Diagnosis:
    """Return a finding that also tells if threads wait for the GIL, for a cause that would hide it."""
    if stats.gil and stats.gil_pressure > PRESSURE:
        fact += f", while threads wait for the GIL (pressure {stats.gil_pressure:.2f})"
        advice = f"{advice}, but " if cause != "step" else ""
        advice += 'try worker_method="process", which takes samples off this GIL'
    return _finding(cause, fact, advice)


def _too_little(stats: Snapshot) -> Diagnosis | None:
    """Return a finding if the run is too short. It names only what is missing."""
    missing = [f"at least {FEWEST_BATCHES} batches"] * (stats.batches < FEWEST_BATCHES)
    missing += [f"more than {duration(SHORTEST_S)}"] * (stats.elapsed_s < SHORTEST_S)
    seen = f"{counted(stats.batches, 'batch')} in {duration(stats.elapsed_s)}"
    fact = f"Too little was measured to say what bounds the run: {seen}"
    return _finding("nothing", fact, f"{' and '.join(missing)} are needed") if missing else None


def _step(stats: Snapshot) -> Diagnosis:
    fact = f"The training step bounds the run: the loop waited {percent(waited_share(stats))} of the time"
    idle = idle_share(stats)
    enough = ceil(1.3 * (1 - idle) * stats.workers)  # 1.3: room for what is uneven
    advice = "nothing in the loader would make it faster"
    if idle > IDLE and enough < stats.workers:
        fact += f", and the workers were idle for {percent(idle)} of theirs"
        advice = f"num_workers={max(1, enough)} would do"
    if others_share(stats) > OTHERS:
        fact += f". Other processes slow it: they take {percent(others_share(stats))} of the cores"
    return _beside_gil(stats, "step", fact, advice)


def _inline(stats: Snapshot) -> Diagnosis:
    each = stats.consumer_wait_s / stats.batches
    fact = f"The loop itself loads, for {percent(waited_share(stats))} of the time ({duration(each)} a batch"
    largest = _largest(stats)
    fact += f', most of it in "{largest.name}")' if largest else ")"
    advice = "set num_workers=2 or more, to load beside the training step"
    if each < HAND_OVER_S or stats.workers_asked:
        advice = "make the batches larger: threads would hardly load batches this small faster"
    return _finding("inline", fact, advice)


def _straggler(stats: Snapshot) -> Diagnosis | None:
    sample = stats.stages.get("sample")
    if (
        sample is None
        or stats.slowest_s < STRAGGLER * sample.p50_s
        or stats.slowest_s < MOSTLY * waited_s(stats)
    ):
        return None
    figures = (
        f"{duration(stats.slowest_s)} (the median is {duration(sample.p50_s)}), and the loop waited "
        f"{duration(waited_s(stats))} in all"
    )
    if stats.slowest_is_first:
        return _finding(
            "nothing",
            f"The start bounds the run so far: the first sample of a thread took {figures}",
            "look again after more batches, or import modules and open files before the loop",
        )
    return _finding(
        "straggler",
        f"One slow sample bounds the run: {stats.slowest or 'an unknown sample'} took {figures}",
        "check that file, or raise prefetch_batches so that other samples load meanwhile",
    )


def _others(stats: Snapshot) -> Diagnosis | None:
    """Return a finding if other processes keep the cores from the workers. Then figures say little about the loader."""
    crowded = others_share(stats) > OTHERS and stats.others_cpu_s > LACKS * stats.process_cpu_s
    lacking = _lacks_cores(stats) and stats.core_wait_s > OTHERS * stats.busy_s
    return _crowded(stats) if crowded and lacking else None


def _crowded(stats: Snapshot) -> Diagnosis:
    return _beside_gil(
        stats,
        "others",
        f"Other processes take the cores: {percent(others_share(stats))} of the time of {stats.cores}, while workers "
        f"lacked a core for {duration(stats.core_wait_s)}",
        "run fewer of them on this node (other ranks count), or ask for cores of your own; until then, the other "
        "figures say little",
    )


def _gil(stats: Snapshot) -> Diagnosis | None:
    if not stats.gil or seconds_in(stats, "sample") < MOSTLY * stats.busy_s:
        return None
    used = stats.process_cpu_s / stats.elapsed_s
    if _lacks_cores(stats) and used > ONE_CORE[1]:
        return None  # a thread that loses its core while it holds the GIL makes others wait
    one_core = stats.cores > 1 and ONE_CORE[0] <= used <= ONE_CORE[1]
    short = stats.gil_pressure > SHORT_HOLDS and one_core and _waits(stats)
    # One worker that computes keeps one core busy, whatever the GIL does.
    alone = stats.workers == 1 and stats.sample_cpu_s > MOSTLY * stats.process_cpu_s
    full = stats.gil_pressure > MIDDLE_HOLDS and one_core and used > FULL and not alone
    if stats.gil_pressure <= PRESSURE and not short and not full:
        return None
    turns = "the worker and the loop" if stats.workers == 1 else f"{stats.workers} workers"
    others = others_share(stats)
    beside = f"; other processes take {percent(others)} of the cores" if others > OTHERS else ""
    return _finding(
        "gil",
        f"Python code under the GIL bounds the run{_in_most_computing(stats)}: {turns} take turns, "
        f"GIL pressure {stats.gil_pressure:.2f}{beside}",
        'use worker_method="process", data that is packed ready to use, or fewer workers; not more',
    )


def _turns(stats: Snapshot) -> Diagnosis | None:
    """Return a finding if there are many short waits: each library call releases the GIL and wakes a worker.

    Worker processes share no GIL.
    """
    sample_s = seconds_in(stats, "sample")
    if stats.processes or stats.workers < 2 or not stats.gil_probes:
        return None
    waits_s = sample_s - stats.sample_cpu_s - stats.core_wait_s
    turns = TURNS * sample_s <= waits_s < TURN_S * stats.blocked
    if not turns or sample_s < MOSTLY * stats.busy_s:
        return None
    each = stats.blocked / max(1, stats.samples)
    return _finding(
        "gil",
        f"Handing over the GIL bounds the run: {stats.workers} workers stopped {each:.1f} times for each sample, "
        f"{duration(waits_s / stats.blocked)} each time, {percent(waits_s / sample_s)} of the time of samples",
        f"fewer workers (num_workers={stats.workers // 2}), larger pieces of work in each call, or rows that the "
        "dataset fills itself (docs/rows.md); not more workers",
    )


def _after_samples(stats: Snapshot) -> Diagnosis | None:
    collate, pin = seconds_in(stats, "collate"), seconds_in(stats, "pin")
    if collate > MOSTLY * stats.busy_s:
        return _finding(
            "collate",
            f"Collating bounds the run: {percent(collate / stats.busy_s)} of the workers' busy time",
            "do less in collate_fn, or do it for each sample in the dataset; "
            "the default collate costs one copy",
        )
    if pin > PINS * stats.elapsed_s:
        return _finding(
            "pin",
            f"Pinning bounds the run: its one thread is busy {percent(pin / stats.elapsed_s)} of the time",
            "hand over fewer bytes (uint8, converted to floats on the device), or pass pin_memory=False",
        )
    return None


def _idle(stats: Snapshot) -> Diagnosis | None:
    idle = idle_share(stats)
    if idle <= MOSTLY:
        return None
    return _finding(
        "prefetch",
        f"Too few batches in flight bound the run: the loop waited {percent(waited_share(stats))} of the time, and "
        f"the workers were idle for {percent(idle)} of theirs",
        f"prefetch_batches={2 * max(stats.depth, stats.workers)}",
    )


def _work(stats: Snapshot) -> Diagnosis:
    """Return a finding for workers that are busy with samples: there are too few, or more would not help."""
    largest = _largest(stats)
    cause = None if largest is None else {"read": "storage"}.get(largest.name, largest.name)
    where = _in_largest(stats)
    waited = f"the loop waited {percent(waited_share(stats))} of the time"
    fewer = f"; num_workers={stats.cores} does as well" if stats.workers > stats.cores > 0 else ""
    what = "decode less" if cause == "decode" else "compute less for each sample"
    less = f"{what} (packed data, smaller images); more workers will not help{fewer}"
    if stats.process_cpu_s >= FULL * stats.cores * stats.elapsed_s and stats.cores:
        if stats.sample_cpu_s < MOSTLY * stats.process_cpu_s:
            return _finding(
                "cores",
                f"All {stats.cores} cores are busy, mostly with other things than samples, and {waited}",
                "let the training step use fewer threads (torch.set_num_threads), or ask for more cores",
            )
        return _finding(
            cause or "cores",
            f"All {stats.cores} cores are busy with samples{where}, and {waited}",
            less,
        )
    if _lacks_cores(stats):
        return _beside_gil(
            stats,
            cause or "cores",
            f"Too few cores bound the run: samples computed for {duration(stats.sample_cpu_s)}{where}, workers lacked "
            f"a core for {duration(stats.core_wait_s)}, and {waited}",
            less,
        )
    if not _waits(stats) and others_share(stats) > OTHERS and _cores_taken(stats):
        return _crowded(stats)
    more = f"num_workers={_enough(stats)}"
    if _waits(stats) and (remotely := waits_remotely(stats, _enough(stats))):
        return _finding("remote", *remotely)
    if _waits(stats):
        what = f'stage "{largest.name}"' if largest and cause != "storage" else "storage"
        packed = ", or packed data that is read in order" if what == "storage" else ""
        return _finding(
            cause or "storage",
            f"Waiting in {what} bounds the run: samples compute only "
            f"{percent(stats.sample_cpu_s / seconds_in(stats, 'sample'))} of their time, and {waited}",
            f"more workers, {more}{packed}",
        )
    return _finding(
        cause or "workers",
        f"Too few workers bound the run: they are busy with samples{where}, cores are free, and {waited}",
        f"more workers, {more}",
    )


# ---- what they look at ----


def _waits(stats: Snapshot) -> bool:
    return stats.sample_cpu_s + stats.core_wait_s < COMPUTES * seconds_in(stats, "sample")


def _lacks_cores(stats: Snapshot) -> bool:
    return not _waits(stats) and stats.core_wait_s > LACKS * stats.sample_cpu_s


def _cores_taken(stats: Snapshot) -> bool:
    """Return whether all processes together fill the cores."""
    taken_s = stats.process_cpu_s + stats.others_cpu_s
    return stats.cores > 0 and taken_s >= FULL * stats.cores * stats.elapsed_s


def _largest(stats: Snapshot) -> Stage | None:
    """Return the stage, of those that the dataset named, that takes most of the samples' time, or None."""
    largest = max(named_stages(stats), key=lambda stage: stage.seconds, default=None)
    if largest is None or largest.seconds <= MOSTLY * seconds_in(stats, "sample"):
        return None
    return largest


def _in_largest(stats: Snapshot) -> str:
    largest = _largest(stats)
    if largest is None:
        return ""
    return f', {percent(largest.seconds / seconds_in(stats, "sample"))} of it in "{largest.name}"'


def _in_most_computing(stats: Snapshot) -> str:
    """Name the stage that computes most. It need not be the longest: a stage that releases the GIL waits for it too."""
    most = max(named_stages(stats), key=lambda stage: stage.cpu_s, default=None)
    if most is None or most.cpu_s < MOSTLY * stats.sample_cpu_s:
        return ""
    return f', {percent(most.cpu_s / stats.sample_cpu_s)} of what they compute in "{most.name}"'


def _enough(stats: Snapshot) -> int:
    """Return how many workers keep up with the loop: at most four times as many, or the cores if they compute."""
    work = stats.workers * stats.elapsed_s - stats.worker_wait_s
    need = ceil(work / max(stats.elapsed_s - stats.consumer_wait_s, 1e-9))
    most = 4 * stats.workers
    if stats.cores and not _waits(stats):
        most = min(most, stats.cores)
    return max(stats.workers + 1, min(need, most))
