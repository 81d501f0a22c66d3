"""The figures of an epoch, as values: measurements, shares of them, and figures in words.

`recorder` measures, and the loader builds the snapshot. `diagnosis` says what bounds the run, and `stats` prints both.
This file knows neither of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LOADER_STAGES = ("sampler", "sample", "collate", "pin")
"""The loader's own stages, in the order in which a batch passes them. Every other name is a part of "sample"."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The measurements of one stage.

    Examples:
        >>> epoch = list(loader)
        >>> loader.stats().stages["sample"].count
        500
    """

    name: str
    seconds: float
    """Total thread-seconds in the stage."""
    count: int
    """Number of samples, or of batches for "sampler", "collate" and "pin"."""
    p50_s: float
    """Half of them took at most this long. This quantile and the next two are within 4.5 %."""
    p95_s: float
    p99_s: float
    cpu_s: float = 0.0
    """Thread-seconds of computing. For the rest, threads waited for storage, a core or the GIL."""


@dataclass(frozen=True, slots=True)
class RemoteReads:
    """What was read from object stores in an epoch, in the loop's process and in the workers' together.

    It has all stores of these processes: others than the dataset's too. There is no figure for the CPU that it took:
    the threads that read also decode.

    Examples:
        >>> epoch = list(loader)
        >>> loader.stats().remote is None  # it read no store
        True
    """

    requests: int = 0
    """Requests, with those that failed."""
    bytes_wanted: int = 0
    """Bytes that reads returned."""
    bytes_fetched: int = 0
    """Bytes that came. Gaps between merged ranges are among them, and what was read ahead and not asked for."""
    seconds: float = 0.0
    """How long the requests that succeeded took, added up. Divided by `elapsed_s`: how many were in flight."""
    p50_s: float = 0.0
    """Half of them took at most this long. This quantile and the next one are within 4.5 %."""
    p99_s: float = 0.0
    retries: int = 0
    """Requests that were repeated."""
    throttled: int = 0
    """Requests that the server refused for now (503, 429), or did not answer in time."""
    in_flight_limit: int = 0
    """How many requests may be in flight now, in all processes that read."""
    cache_hits: int = 0
    """Reads that needed no request."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The figures of one epoch of a loader; `Stats` adds the report."""

    epoch: int = -1
    """The epoch's number, which keys its order; -1 before the first `iter()`."""
    workers: int = 0
    """Workers, in threads or processes; 0 means that the loop's own thread reads."""
    processes: int = 0
    """Worker processes, over which the workers are spread; 0 if workers are threads of the loop's process."""
    depth: int = 0
    """The most batches that may be in flight. This bounds the memory."""
    samples: int = 0
    """Samples handed to the loop."""
    batches: int = 0
    """Batches handed to the loop, including those that raised instead."""
    errors: int = 0
    """Samples that `on_error` skipped or replaced, plus batches that raised."""
    elapsed_s: float = 0.0
    """Seconds from `iter()` to the end of the epoch, or until now."""
    consumer_wait_s: float = 0.0
    """Seconds that the loop waited in `next()` for a batch that was not ready."""
    worker_wait_s: float = 0.0
    """Seconds in which workers had nothing to claim, summed over the workers. Either the window was full, or the
    order had ended."""
    occupancy: float = 0.0
    """Mean share (0 to 1) of the batches in flight that were ready when the loop asked for one.

    Near 0, the loader bounds the run: the loop takes batches as fast as they arrive. More workers may help.
    Near 1, the training step bounds the run: the loader is ahead.
    """
    bytes: int = 0
    """Bytes of the tensors handed to the loop."""
    busy_s: float = 0.0
    """Thread-seconds that workers spent on samples and on collating them."""
    sample_cpu_s: float = 0.0
    """CPU seconds that threads used within samples. If this is far below the seconds of the stage "sample", samples
    wait for storage, for the GIL, or for a core."""
    stages: Mapping[str, Stage] = field(default_factory=dict, hash=False)
    """The stages that occurred, by name: "sampler", "sample", those that the dataset named with `fastload.stage`,
    "collate", "pin"."""
    gil_pressure: float = 0.0
    """Mean wait of a worker to get the GIL back (0 to 1), in units of the switch interval (5 ms).

    Near 1, Python code in samples or in the loop holds the GIL whenever a worker wants it.

    This is an estimate. At most every 40 ms, after a run of samples, a worker naps for 250 us. The wait is how much
    longer the nap takes, minus the time without a core as Linux counts it. The estimate is too low if the GIL is
    always in use but never for long. It is too high by 0.02, because timers fire late, and by more on full cores
    if the kernel does not count. It needs a few tens of `gil_probes`. Worker processes have their own GILs: it is 0.
    """
    gil_held: float = 0.0
    """How many GILs the worker processes hold at once while they have work (0 to `processes`). It is 0 for threads.

    With a process for each worker, this is their number times the share of its time for which a sample holds the GIL.
    A thread in each process naps for 10 ms, and sees whether it must wait for the GIL afterwards. After 1,000 naps
    beside work, or 3,000 in all, it stops.
    """
    gil_probes: int = 0
    """Number of naps from which `gil_pressure` or `gil_held` is estimated. Without a GIL there are none."""
    gil: bool = True
    """Whether Python has a GIL. A free-threaded one has none, or gets one by an import. Then threads take turns."""
    slots_in_use: int = 0
    """Slots (each the memory of one batch) that workers fill, that wait for the loop, or that the loop holds."""
    slowest_s: float = 0.0
    """Seconds that the slowest sample took."""
    slowest: str = ""
    """Where the slowest sample is: index, file, batch and epoch."""
    slowest_is_first: bool = False
    """Whether the slowest sample was in its thread's first run, whose time includes imports and opening files."""
    cores: int = 0
    """Cores that the process may use; 0 if unknown."""
    process_cpu_s: float = 0.0
    """CPU seconds that the whole process, and its worker processes, used since `iter()`."""
    core_wait_s: float = 0.0
    """Thread-seconds in which workers could compute but had no core, as Linux counts them; 0 on other systems."""
    blocked: int = 0
    """How often workers stopped to wait for the GIL, a lock, a read or work, as the system counts it."""
    retries: int = 0
    """Reads that were repeated after a transient error; see `retries` of `fastload.DataLoader`."""
    others_cpu_s: float = 0.0
    """CPU seconds that other processes, and other virtual machines, used of this process's `cores` since `iter()`,
    as Linux counts them in ticks of 10 ms; 0 on other systems."""
    workers_asked: int = 0
    """The loader's `num_workers`. If `workers` is 0, the loop itself reads."""
    worker_method: str = ""
    """The kind of workers: "thread" or "process", or "" if the loop itself reads."""
    worker_reason: str = ""
    """Why "auto" chose it, or "" if it did not choose."""
    useful_share: float | None = None
    """The share (0 to 1) of an epoch's tokens that are not padding, if the batch sampler or the dataset plans it."""
    remote: RemoteReads | None = None
    """What was read from object stores, or None if nothing was."""
    ended: bool = False
    """Whether the epoch is over and the figures no longer change."""


# ---- shares ----


def seconds_in(stats: Snapshot, name: str) -> float:
    """Return the thread-seconds in a stage, or 0 if it did not occur."""
    stage = stats.stages.get(name)
    return stage.seconds if stage else 0.0


def named_stages(stats: Snapshot) -> list[Stage]:
    """Return the parts of a sample that the dataset named."""
    return [stage for name, stage in stats.stages.items() if name not in LOADER_STAGES]


def waited_s(stats: Snapshot) -> float:
    """Return the seconds for which the loader held up the loop: it waited for a batch or ran the sampler."""
    return stats.consumer_wait_s + seconds_in(stats, "sampler")


def waited_share(stats: Snapshot) -> float:
    """Return the share (0 to 1) of the time for which the loader held up the loop."""
    return min(1.0, waited_s(stats) / stats.elapsed_s) if stats.elapsed_s else 0.0


def share_of_workers(seconds: float, stats: Snapshot) -> float:
    """Return `seconds` as a share (0 to 1) of the workers' time."""
    total = stats.workers * stats.elapsed_s
    return min(1.0, seconds / total) if total else 0.0


def idle_share(stats: Snapshot) -> float:
    """Return the share (0 to 1) of the workers' time in which they had nothing to do."""
    return share_of_workers(stats.worker_wait_s, stats)


def others_share(stats: Snapshot) -> float:
    """Return the share (0 to 1) of the cores' time that other processes used."""
    total = stats.cores * stats.elapsed_s
    return min(1.0, stats.others_cpu_s / total) if total else 0.0


# ---- words ----


def percent(share: float) -> str:
    """Return a share (0 to 1) in words."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Return seconds in words: three digits and a unit."""
    if not seconds:
        return "0 s"
    unit, scale = next(
        ((unit, scale) for unit, scale in (("s", 1.0), ("ms", 1e3)) if seconds * scale >= 0.9995),
        ("us", 1e6),
    )
    value = seconds * scale
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{decimals}f} {unit}"
