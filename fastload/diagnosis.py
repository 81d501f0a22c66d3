"""What a snapshot of a loader's figures says: what bounds the run, and what to change.

Values and pure functions of them. `telemetry` measures; `loader` puts the snapshot together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

LOADER_STAGES = ("sampler", "sample", "collate", "pin")
"""The loader's own stages, as a batch meets them; every other name is a part of "sample"."""

# ---- thresholds, each with its reason ----

SHORTEST_S, FEWEST_BATCHES = 0.2, 3
"""Less is the start and not the run: threads come up, the first file is opened, nothing has a steady rate."""

WAITS = 0.10
"""Share of the time. If the loop waits less, a loader that cost nothing would gain it 11 % at most."""

IDLE = 0.60
"""Share of the workers' time. If they idle more, fewer than half of them would do even with the room left
for what is uneven."""

PRESSURE = 0.30
"""GIL pressure, a wait of 1.5 ms each time that a thread lets go: what samples of a few milliseconds lose
by it is as much as they take."""

MIDDLE_HOLDS = 0.15
"""GIL pressure that is enough where the process keeps one core full and no more, although there are others."""

SHORT_HOLDS = 0.05
"""GIL pressure, a quarter of a millisecond, that is enough where samples wait and the process keeps about one
core busy (`ONE_CORE`): threads that hold the GIL for 100 us each wait for a few others, not for the switch
interval. A late wake alone looks like 0.02."""

ONE_CORE = (0.5, 1.15)
"""Cores used under the GIL: one and a little that runs without, or less where other processes have a share."""

STRAGGLER = 20
"""Times the median. JPEG files of one set differ by 10 at most, a cold read differs by 20 from a cached one
but comes often; and `MOSTLY` must hold as well."""

MOSTLY = 0.5
"""Share of anything that is said to be most of it: without it, the rest would be less than it was."""

COMPUTES = 0.5
"""Seconds computing, or ready to but without a core, of a second in samples. Less, and the samples wait for
something else most of the time."""

LACKS = 0.5
"""Seconds without a core for a second of computing. More, and a third of the cores asked for are not there:
another worker would take its time from these."""

FULL = 0.85
"""Share of the CPU time of all cores. The rest is what is lost by handing over, also on a full machine."""

PINS = 0.7
"""Share of the time. One thread pins; beyond it, the next batch waits for it."""

HAND_OVER_S = 1e-3
"""Seconds for a batch. Handing one to a thread and back costs some 100 us and a wake of the loop; below a
few times that, the loop makes it sooner by itself."""


# ---- values ----


@dataclass(frozen=True, slots=True)
class Stage:
    """What was measured of one stage."""

    name: str
    seconds: float
    """Thread-seconds in it, all together."""
    count: int
    """How often: samples, or for the loader's other stages batches."""
    p50_s: float
    """Half of them took no longer than this; within 4.5 %, as the next two."""
    p95_s: float
    p99_s: float
    cpu_s: float = 0.0
    """Thread-seconds in which they computed; the rest they waited, for storage, a core or the GIL."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What bounds a run."""

    cause: str
    """"nothing" (it is too early to say), "step" (the training step), "inline" (there are no workers),
    "sampler", "straggler" (one slow sample), "gil", "collate", "pin", "prefetch" (too few batches in
    flight), "storage", "decode" or another stage that the data set named, "cores" (all are busy) or
    "workers" (too few)."""
    advice: str
    """What to change."""
    sentence: str
    """Both, with the figures that say so."""


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of one epoch of a loader, the latest that was begun. `print` it for a report.

    Read it as a balance: where `consumer_wait_s` is a large share of `elapsed_s` the loader bounds
    the run; where `worker_wait_s` is a large share of `workers * elapsed_s` the training step does.
    """

    epoch: int
    """The epoch's number, which keys its order; -1 before the first `iter()`."""
    workers: int
    """Worker threads; 0 means that the loop's own thread reads."""
    depth: int
    """Batches that may be in flight at most: what bounds the memory."""
    samples: int
    """Samples handed to the loop."""
    batches: int
    """Batches handed to the loop, those that raised in their place included."""
    errors: int
    """Samples that raised and were skipped or replaced by `on_error`, plus batches that raised."""
    elapsed_s: float
    """Seconds from `iter()` to the end of the epoch, or until now."""
    consumer_wait_s: float
    """Seconds that the loop waited in `next()` for a batch that was not ready."""
    worker_wait_s: float
    """Seconds that workers had nothing to claim (no room in the window, or the order given out), summed over the
    workers."""
    occupancy: float
    """Mean share (0 to 1) of the batches in flight that were ready when the loop asked for one.

    Near 0: the loop takes batches as fast as they come, the loader bounds the run; more workers may
    help. Near 1: the loader is ahead, the training step bounds the run.
    """
    bytes: int = 0
    """Bytes of the tensors handed to the loop."""
    busy_s: float = 0.0
    """Thread-seconds that workers spent on samples and on collating them."""
    sample_cpu_s: float = 0.0
    """CPU seconds that the threads used within samples. Well below the seconds of the stage "sample", these wait:
    for storage, for the GIL, or for a core."""
    stages: Mapping[str, Stage] = field(default_factory=dict, hash=False)
    """By name: "sampler", "sample", the parts of a sample that the data set named by `fastload.stage`, "collate",
    "pin"; those that occurred."""
    gil_pressure: float = 0.0
    """Mean time that a worker waits to get the GIL back, in units of the switch interval (5 ms); 0 to 1.

    Estimated: after a run of samples, at most each 40 ms, a worker naps for 250 us; what that takes longer, less the
    time without a core (as Linux counts it), is the wait. Near 1, others hold the GIL whenever it is asked
    for: Python code in samples, or in the loop. It errs low where the GIL is in use all the time but never for
    long, as the wait is then that for a few short holds; it errs high by 0.02, by which the clock ends
    a nap late, and by more on full cores where the kernel does not count. A few tens of `gil_probes`
    make it a mean to go by.
    """
    gil_probes: int = 0
    """How many waits `gil_pressure` is the mean of."""
    slots_in_use: int = 0
    """Slots, each the memory of one batch, that are filled, wait for the loop, or are still held by it."""
    slowest_s: float = 0.0
    """Seconds that the slowest sample took."""
    slowest: str = ""
    """Which one that was."""
    cores: int = 0
    """Cores that the process may use; 0 is unknown."""
    process_cpu_s: float = 0.0
    """CPU seconds that the whole process used since `iter()`."""
    core_wait_s: float = 0.0
    """Thread-seconds that workers could compute and had no core, as Linux counts them; 0 elsewhere."""
    retries: int = 0
    """Reads that were tried again after an error that may pass; see `retries` of `fastload.DataLoader`."""

    def __str__(self) -> str:
        return report(self)


# ---- what bounds the run ----


def bound(stats: Stats) -> Finding:
    """Say what bounds the run that `stats` is a snapshot of.

    The first rule that holds decides, from the causes that would make later figures mislead to those
    that are left: a run on full cores has samples that wait (for a core), a run under the GIL too.
    """
    if stats.elapsed_s < SHORTEST_S or stats.batches < FEWEST_BATCHES:
        return _finding(
            "nothing",
            f"Too early to say what bounds the run: {stats.batches} batches in {_time(stats.elapsed_s)}",
            f"look again after {FEWEST_BATCHES} batches and {_time(SHORTEST_S)}",
        )
    sampler = _seconds(stats, "sampler")
    if sampler >= WAITS * stats.elapsed_s and sampler >= stats.consumer_wait_s:
        share = _percent(sampler / stats.elapsed_s)
        return _finding(
            "sampler",
            f"The sampler bounds the run: it runs in the loop's thread, as torch's does, for {share} of the time",
            "draw many indices at a time, or give seed= and no sampler of your own",
        )
    if stats.consumer_wait_s < WAITS * stats.elapsed_s:
        return _step(stats)
    if stats.workers == 0:
        return _inline(stats)
    return _straggler(stats) or _gil(stats) or _after_samples(stats) or _idle(stats) or _work(stats)


def _finding(cause: str, fact: str, advice: str) -> Finding:
    return Finding(cause, advice, f"{fact}; {advice}.")


def _step(stats: Stats) -> Finding:
    fact = (
        f"The training step bounds the run: the loop waited {_percent(_waited(stats))} of the time"
    )
    idle = _idle_share(stats)
    enough = ceil(1.3 * (1 - idle) * stats.workers)  # 1.3: room for what is uneven
    if idle > IDLE and enough < stats.workers:
        fact += f", the workers {_percent(idle)} of theirs"
        return _finding("step", fact, f"num_workers={max(1, enough)} would do")
    return _finding("step", fact, "nothing in the loader would make it faster")


def _inline(stats: Stats) -> Finding:
    each = stats.consumer_wait_s / stats.batches
    fact = f"The loop loads for itself, for {_percent(_waited(stats))} of the time ({_time(each)} a batch"
    largest = _largest(stats)
    fact += f', most of it in "{largest.name}")' if largest else ")"
    if each < HAND_OVER_S:
        return _finding(
            "inline",
            fact,
            "a thread would hardly be sooner at batches so small, make them larger",
        )
    return _finding("inline", fact, "set num_workers=2 or more, to load beside the training step")


def _straggler(stats: Stats) -> Finding | None:
    sample = stats.stages.get("sample")
    if (
        sample is None
        or stats.slowest_s < STRAGGLER * sample.p50_s
        or stats.slowest_s < MOSTLY * stats.consumer_wait_s
    ):
        return None
    return _finding(
        "straggler",
        f"One slow sample bounds the run: {stats.slowest or 'unknown which'}, it took {_time(stats.slowest_s)} "
        f"(the median is {_time(sample.p50_s)}), the loop waited {_time(stats.consumer_wait_s)} in all",
        "look at that file, or raise prefetch_batches so that the others go on meanwhile",
    )


def _gil(stats: Stats) -> Finding | None:
    if _seconds(stats, "sample") < MOSTLY * _busy(stats):
        return None
    used = stats.process_cpu_s / stats.elapsed_s
    if _lacks_cores(stats) and used > ONE_CORE[1]:
        return None  # threads that lose their core with the GIL in hand make others wait, and no code is at fault
    one_core = stats.cores > 1 and ONE_CORE[0] <= used <= ONE_CORE[1]
    short = stats.gil_pressure > SHORT_HOLDS and one_core and _waits(stats)
    full = stats.gil_pressure > MIDDLE_HOLDS and one_core and used > FULL
    if stats.gil_pressure <= PRESSURE and not short and not full:
        return None
    return _finding(
        "gil",
        f"Python code under the GIL bounds the run{_in_most_computing(stats)}: {stats.workers} workers take turns, "
        f"GIL pressure {stats.gil_pressure:.2f}",
        'worker_method="process", or data that is packed ready to use, or fewer workers; not more',
    )


def _after_samples(stats: Stats) -> Finding | None:
    collate, pin = _seconds(stats, "collate"), _seconds(stats, "pin")
    if collate > MOSTLY * _busy(stats):
        return _finding(
            "collate",
            f"Collating bounds the run: {_percent(collate / _busy(stats))} of the workers' busy time",
            "do less in collate_fn, or do it for each sample in the data set; "
            "the default collate costs one copy",
        )
    if pin > PINS * stats.elapsed_s:
        return _finding(
            "pin",
            f"Pinning bounds the run: its one thread is busy {_percent(pin / stats.elapsed_s)} of the time",
            "hand over fewer bytes (uint8, made floats on the device), or pin_memory=False",
        )
    return None


def _idle(stats: Stats) -> Finding | None:
    idle = _idle_share(stats)
    if idle <= MOSTLY:
        return None
    return _finding(
        "prefetch",
        f"Too few batches in flight bound the run: the loop waited {_percent(_waited(stats))} of the time while "
        f"the workers had nothing to do for {_percent(idle)} of theirs",
        f"prefetch_batches={2 * max(stats.depth, stats.workers)}",
    )


def _work(stats: Stats) -> Finding:
    """Workers are busy with samples: there are too few of them, or no more would help."""
    largest = _largest(stats)
    cause = None if largest is None else {"read": "storage"}.get(largest.name, largest.name)
    where = _in_largest(stats)
    waited = f"the loop waited {_percent(_waited(stats))} of the time"
    fewer = f"; num_workers={stats.cores} does as well" if stats.workers > stats.cores > 0 else ""
    what = "decode less" if cause == "decode" else "compute less for each sample"
    less = f"{what} (packed data, smaller pictures), more workers will not help{fewer}"
    if _cores_full(stats):
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
        return _finding(
            cause or "cores",
            f"Too few cores bound the run: samples computed for {_time(stats.sample_cpu_s)}{where}, workers could "
            f"have and got no core for {_time(stats.core_wait_s)}, and {waited}",
            less,
        )
    more = f"num_workers={_enough(stats)}"
    if _waits(stats):
        what = f'stage "{largest.name}"' if largest and cause != "storage" else "storage"
        packed = ", or packed data that is read in order" if what == "storage" else ""
        return _finding(
            cause or "storage",
            f"Waiting in {what} bounds the run: samples compute only "
            f"{_percent(stats.sample_cpu_s / _seconds(stats, 'sample'))} of their time, and {waited}",
            f"more workers, {more}{packed}",
        )
    return _finding(
        cause or "workers",
        f"Too few workers bound the run: they are busy with samples{where}, cores are free, and {waited}",
        f"more workers, {more}",
    )


# ---- shares ----


def _seconds(stats: Stats, name: str) -> float:
    stage = stats.stages.get(name)
    return stage.seconds if stage else 0.0


def _busy(stats: Stats) -> float:
    return _seconds(stats, "sample") + _seconds(stats, "collate")


def _waited(stats: Stats) -> float:
    return stats.consumer_wait_s / stats.elapsed_s if stats.elapsed_s else 0.0


def _of_workers(seconds: float, stats: Stats) -> float:
    total = stats.workers * stats.elapsed_s
    return min(1.0, seconds / total) if total else 0.0


def _idle_share(stats: Stats) -> float:
    return _of_workers(stats.worker_wait_s, stats)


def _waits(stats: Stats) -> bool:
    return stats.sample_cpu_s + stats.core_wait_s < COMPUTES * _seconds(stats, "sample")


def _lacks_cores(stats: Stats) -> bool:
    return not _waits(stats) and stats.core_wait_s > LACKS * stats.sample_cpu_s


def _cores_full(stats: Stats) -> bool:
    return stats.cores > 0 and stats.process_cpu_s >= FULL * stats.cores * stats.elapsed_s


def _named(stats: Stats) -> list[Stage]:
    return [stage for name, stage in stats.stages.items() if name not in LOADER_STAGES]


def _largest(stats: Stats) -> Stage | None:
    """The stage that the data set named, if most of the time of samples is in one."""
    largest = max(_named(stats), key=lambda stage: stage.seconds, default=None)
    if largest is None or largest.seconds < MOSTLY * _seconds(stats, "sample"):
        return None
    return largest


def _in_largest(stats: Stats) -> str:
    largest = _largest(stats)
    if largest is None:
        return ""
    return f', {_percent(largest.seconds / _seconds(stats, "sample"))} of it in "{largest.name}"'


def _in_most_computing(stats: Stats) -> str:
    """Not the largest: where threads wait for the GIL, any stage that lets go of it waits to have it back."""
    most = max(_named(stats), key=lambda stage: stage.cpu_s, default=None)
    if most is None or most.cpu_s < MOSTLY * stats.sample_cpu_s:
        return ""
    return f', {_percent(most.cpu_s / stats.sample_cpu_s)} of what they compute in "{most.name}"'


def _enough(stats: Stats) -> int:
    """Workers that keep up with the loop, if the work is shared out evenly; four times those there at most.

    Where samples compute, no more than there are cores, unless those have nothing to do.
    """
    work = stats.workers * stats.elapsed_s - stats.worker_wait_s
    need = ceil(work / max(stats.elapsed_s - stats.consumer_wait_s, 1e-9))
    most = 4 * stats.workers
    if stats.cores and not _waits(stats):
        most = min(most, stats.cores)
    return max(stats.workers + 1, min(need, most))


# ---- the report ----


def report(stats: Stats) -> str:
    """The figures, aligned, and the sentence of `bound` as the last line."""
    per_s = 1 / stats.elapsed_s if stats.elapsed_s else 0.0
    used = f"{stats.process_cpu_s * per_s:.1f} of {stats.cores} cores used" if stats.cores else ""
    slot_bytes = stats.bytes / stats.batches * stats.slots_in_use if stats.batches else 0.0
    rows = [
        (f"epoch {stats.epoch}", _time(stats.elapsed_s), used),
        ("samples", f"{stats.samples:,}", f"{stats.samples * per_s:,.1f} a second"),
        ("batches", f"{stats.batches:,}", f"{stats.batches * per_s:,.1f} a second"),
        ("bytes", _bytes(stats.bytes), f"{_bytes(stats.bytes * per_s)} a second"),
        ("errors", f"{stats.errors:,}", ""),
        ("loop waited", _time(stats.consumer_wait_s), f"{_percent(_waited(stats))} of the time"),
        (
            "workers waited",
            _time(stats.worker_wait_s),
            f"{_percent(_idle_share(stats))} of the time of {stats.workers}",
        ),
        (
            "workers busy",
            _time(stats.busy_s),
            f"{_percent(_of_workers(stats.busy_s, stats))} of it",
        ),
        ("occupancy", _percent(stats.occupancy), f"of at most {stats.depth} batches in flight"),
        ("slots in use", f"{stats.slots_in_use}", f"about {_bytes(slot_bytes)}"),
        ("lacked a core", _time(stats.core_wait_s), "workers that could compute"),
        ("GIL pressure", f"{stats.gil_pressure:.2f}", f"mean of {stats.gil_probes:,} probes"),
        ("slowest sample", _time(stats.slowest_s), stats.slowest),
    ]
    if not stats.slowest_s:
        rows.pop()
    lines = [f"{name:<15}{value:>11}  {note}".rstrip() for name, value, note in rows]
    return "\n".join([*lines, *_stage_table(stats), bound(stats).sentence])


def _stage_table(stats: Stats) -> list[str]:
    if not stats.stages:
        return []
    total = sum(_seconds(stats, name) for name in LOADER_STAGES)
    titles = ("stage", "share", "seconds", "count", "p50", "p95", "p99")
    table = [titles] + [
        (
            stage.name if stage.name in LOADER_STAGES else f"  {stage.name}",
            _percent(stage.seconds / total if total else 0.0),
            _time(stage.seconds),
            f"{stage.count:,}",
            _time(stage.p50_s),
            _time(stage.p95_s),
            _time(stage.p99_s),
        )
        for stage in stats.stages.values()
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    widths[0] = max(widths[0], 15)
    return [
        row[0].ljust(widths[0])
        + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in table
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _time(seconds: float) -> str:
    """Three digits and the unit that suits."""
    if not seconds:
        return "0 s"
    unit, scale = next(
        ((unit, scale) for unit, scale in (("s", 1.0), ("ms", 1e3)) if seconds * scale >= 0.9995),
        ("us", 1e6),
    )
    return f"{_digits(seconds * scale)} {unit}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 999.5:
            return f"{_digits(count) if unit != 'B' else round(count)} {unit}"
        count /= 1024
    return f"{_digits(count)} TiB"


def _digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{decimals}f}"
