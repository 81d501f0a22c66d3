"""The report of an epoch's figures that `print` shows: a table, and what bounds the run as the last line."""

from __future__ import annotations

from typing import Any

from fastload._kit.tables import columns
from fastload._kit.texts import counted, size_text
from fastload.telemetry.prediction import best_kind
from fastload.telemetry.snapshot import (
    LOADER_STAGES,
    Snapshot,
    duration,
    idle_share,
    others_share,
    percent,
    seconds_in,
    share_of_workers,
    waited_s,
    waited_share,
)


class Stats(Snapshot):
    """A snapshot of the latest epoch of a loader. `print` shows its report, as does a notebook.

    Read it as a balance. If `consumer_wait_s` is a large share of `elapsed_s`, the loader bounds the run. If
    `worker_wait_s` is a large share of `workers * elapsed_s`, the training step does.

    Examples:
        >>> epoch = list(loader)
        >>> stats = loader.stats()
        >>> stats.samples, stats.batches
        (500, 10)
    """

    __slots__ = ()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the report if a notebook's cell ends with this value."""
        printer.text(str(self))

    def __str__(self) -> str:
        """Return the figures in a table. The last line says what bounds the run. Before an epoch it is the only one."""
        # Imported here: a run without a report does not need its 300 lines.
        from fastload.telemetry.diagnosis import bound

        if self.epoch < 0:
            return bound(self).sentence
        return "\n".join([*_figures(self), *_stage_table(self), bound(self).sentence])


# ---- the report ----


def _figures(stats: Snapshot) -> list[str]:
    per_s = 1 / stats.elapsed_s if stats.elapsed_s else 0.0
    cores = counted(stats.cores, "core")
    used = f"{stats.process_cpu_s * per_s:.1f} of {cores} used" if stats.cores else ""
    if others_share(stats) > 0.05:
        used += f", {stats.others_cpu_s * per_s:.1f} by other processes"
    waited = f"{percent(waited_share(stats))} of the time"
    if (sampler_s := seconds_in(stats, "sampler")) > 0.01 * stats.elapsed_s:
        waited += f", {duration(sampler_s)} of it in the sampler"
    retried = f"{stats.retries:,} reads retried" if stats.retries else ""
    slot_bytes = stats.bytes / stats.batches * stats.slots_in_use if stats.batches else 0.0
    rows = [
        (f"epoch {stats.epoch}", duration(stats.elapsed_s), used),
        ("samples", f"{stats.samples:,}", f"{stats.samples * per_s:,.1f} a second"),
        ("batches", f"{stats.batches:,}", f"{stats.batches * per_s:,.1f} a second"),
        ("bytes", size_text(stats.bytes), f"{size_text(stats.bytes * per_s)} a second"),
        *_padding(stats),
        *_remote(stats),
        ("errors", f"{stats.errors:,}", retried),
        ("loop waited", duration(waited_s(stats)), waited),
        *(_worker_figures(stats) if stats.workers else _no_workers(stats)),
        ("slots in use", f"{stats.slots_in_use}", f"about {size_text(slot_bytes)}"),
    ]
    if stats.workers:
        rows += [
            ("lacked a core", duration(stats.core_wait_s), "workers that could compute"),
            _gil_figure(stats),
            *_other_kind(stats),
        ]
    if stats.slowest_s:
        rows.append(("slowest sample", duration(stats.slowest_s), stats.slowest))
    return [f"{name:<15}{value:>11}  {note}".rstrip() for name, value, note in rows]


def _gil_figure(stats: Snapshot) -> tuple[str, str, str]:
    if not stats.gil:
        return "GIL pressure", "none", "this Python runs without the GIL"
    probes = counted(stats.gil_probes, "probe")
    if stats.processes:
        of = f"of {counted(stats.processes, 'process')}; {probes}"
        return "GILs in use", f"{stats.gil_held:.2f}", of
    return "GIL pressure", f"{stats.gil_pressure:.2f}", f"mean of {probes}"


def _other_kind(stats: Snapshot) -> list[tuple[str, str, str]]:
    """Return a row for the kind of workers that would read better, if there is one."""
    best = best_kind(stats)
    if best is None or (best.kind, best.processes) == (stats.worker_method, stats.processes):
        return []
    names = {"none": "0 workers", "thread": "threads"}
    name = names.get(best.kind) or counted(best.processes, "process")
    safe = "" if best.kind == "none" else ", if threads may run your code"
    return [("other kind", name, f"{best.reason}{safe}")]


def _padding(stats: Snapshot) -> list[tuple[str, str, str]]:
    if (share := stats.useful_share) is None:
        return []
    return [("useful tokens", f"{share:.1%}", f"of the epoch; {1 - share:.1%} are padding")]


def _remote(stats: Snapshot) -> list[tuple[str, str, str]]:
    remote = stats.remote
    if remote is None:
        return []
    in_flight = remote.seconds / stats.elapsed_s if stats.elapsed_s else 0.0
    each = f"p50 {duration(remote.p50_s)}, p99 {duration(remote.p99_s)}, {in_flight:.1f} in flight"
    counts = {
        "retried": remote.retries,
        "throttled": remote.throttled,
        "cache hits": remote.cache_hits,
    }
    wanted = [f"{size_text(remote.bytes_wanted)} wanted"]
    wanted += [f"{number:,} {name}" for name, number in counts.items() if number]
    return [
        ("requests", f"{remote.requests:,}", each),
        ("fetched", size_text(remote.bytes_fetched), ", ".join(wanted)),
    ]


def _worker_figures(stats: Snapshot) -> list[tuple[str, str, str]]:
    kind = "threads" if stats.worker_method == "thread" else "processes"
    chosen = [("workers are", kind, stats.worker_reason)] if stats.worker_reason else []
    waited = f"{percent(idle_share(stats))} of the time of {stats.workers}"
    busy = f"{percent(share_of_workers(stats.busy_s, stats))} of it"
    most = counted(stats.depth, "batch")
    return [
        *chosen,
        ("workers waited", duration(stats.worker_wait_s), waited),
        ("workers busy", duration(stats.busy_s), busy),
        ("occupancy", percent(stats.occupancy), f"of at most {most} in flight"),
    ]


def _no_workers(stats: Snapshot) -> list[tuple[str, str, str]]:
    if not stats.workers_asked:
        return []
    return [("workers", "0", f"{stats.workers_asked} asked for: {stats.worker_reason}")]


def _stage_table(stats: Snapshot) -> list[str]:
    if not stats.stages:
        return []
    total = sum(seconds_in(stats, name) for name in LOADER_STAGES)
    titles = ("stage".ljust(15), "share", "seconds", "count", "p50", "p95", "p99")
    rows = [
        (
            stage.name if stage.name in LOADER_STAGES else f"  {stage.name}",
            percent(stage.seconds / total if total else 0.0),
            duration(stage.seconds),
            f"{stage.count:,}",
            duration(stage.p50_s),
            duration(stage.p95_s),
            duration(stage.p99_s),
        )
        for stage in stats.stages.values()
    ]
    return columns([titles, *rows], rule=False)
