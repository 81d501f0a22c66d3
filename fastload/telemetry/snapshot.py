"""The figures of an epoch, as values: what was measured, shares of it, and how figures read in a sentence.

`recorder` measures, and the loader puts a snapshot together. `diagnosis` says what bounds the run, and `stats` makes
the report of both; this file knows neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LOADER_STAGES = ("sampler", "sample", "collate", "pin")
"""The loader's own stages, as a batch meets them; every other name is a part of "sample"."""


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
class Snapshot:
    """The figures of one epoch of a loader; `Stats` adds the report."""

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
    """Seconds that workers had nothing to claim (as many batches in flight as may be, or the order given out),
    summed over the workers."""
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
    """By name: "sampler", "sample", the parts of a sample that the dataset named by `fastload.stage`, "collate",
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
    slowest_is_first: bool = False
    """Whether it was in the first run of samples of its thread: imports and files to be opened are in its time."""
    cores: int = 0
    """Cores that the process may use; 0 is unknown."""
    process_cpu_s: float = 0.0
    """CPU seconds that the whole process used since `iter()`."""
    core_wait_s: float = 0.0
    """Thread-seconds that workers could compute and had no core, as Linux counts them; 0 elsewhere."""
    blocked: int = 0
    """How often workers stopped to wait for something: the GIL, a lock, a read, work. Counted by the system."""
    retries: int = 0
    """Reads that were tried again after an error that may pass; see `retries` of `fastload.DataLoader`."""

    others_cpu_s: float = 0.0
    """CPU seconds that other processes, and other machines on the same hardware, had of this process's `cores` since
    `iter()`, as Linux counts them in ticks of 10 ms; 0 elsewhere."""

    workers_asked: int = 0
    """`num_workers` as it was given. Where `workers` is 0 all the same, batches are so light that the loop copies
    them itself sooner than it would hand them to a thread and back."""
    ended: bool = False
    """Whether the epoch is over: the figures no longer change."""


# ---- shares ----


def seconds_in(stats: Snapshot, name: str) -> float:
    """Thread-seconds in a stage; 0 where it did not occur."""
    stage = stats.stages.get(name)
    return stage.seconds if stage else 0.0


def named_stages(stats: Snapshot) -> list[Stage]:
    """Return the parts of a sample that the dataset named."""
    return [stage for name, stage in stats.stages.items() if name not in LOADER_STAGES]


def waited_s(stats: Snapshot) -> float:
    """Seconds that the loop was held up in the loader: waiting for a batch, or running the sampler."""
    return stats.consumer_wait_s + seconds_in(stats, "sampler")


def waited_share(stats: Snapshot) -> float:
    """Share (0 to 1) of the time in which the loop was held up."""
    return min(1.0, waited_s(stats) / stats.elapsed_s) if stats.elapsed_s else 0.0


def share_of_workers(seconds: float, stats: Snapshot) -> float:
    """Return the share (0 to 1) of the workers' time that `seconds` are."""
    total = stats.workers * stats.elapsed_s
    return min(1.0, seconds / total) if total else 0.0


def idle_share(stats: Snapshot) -> float:
    """Share (0 to 1) of the workers' time in which they had nothing to do."""
    return share_of_workers(stats.worker_wait_s, stats)


def others_share(stats: Snapshot) -> float:
    """Share (0 to 1) of the cores' time that other processes had."""
    total = stats.cores * stats.elapsed_s
    return min(1.0, stats.others_cpu_s / total) if total else 0.0


# ---- words ----


def percent(share: float) -> str:
    """A share (0 to 1) in words."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Seconds in words: three digits and the unit that suits."""
    if not seconds:
        return "0 s"
    unit, scale = next(
        ((unit, scale) for unit, scale in (("s", 1.0), ("ms", 1e3)) if seconds * scale >= 0.9995),
        ("us", 1e6),
    )
    return f"{_digits(seconds * scale)} {unit}"


def size(count: float) -> str:
    """Bytes in words: three digits and the unit that suits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 999.5:
            return f"{_digits(count) if unit != 'B' else round(count)} {unit}"
        count /= 1024
    return f"{_digits(count)} TiB"


def _digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{decimals}f}"
