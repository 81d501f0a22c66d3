"""Promises:
- The report ends with a sentence that names what bounds the run and what to change.
- A notebook shows the report.

The snapshots here are made by hand, each for one rule; the figures of a run of 10 s with 4 workers on 8 cores.
"""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from fastload.telemetry import RemoteReads, Stage, Stats
from fastload.telemetry.diagnosis import (
    COMPUTES,
    FEWEST_BATCHES,
    FULL,
    LACKS,
    MOSTLY,
    ONE_CORE,
    OTHERS,
    PRESSURE,
    SHORT_HOLDS,
    SHORTEST_S,
    STRAGGLER,
    TURN_S,
    TURNS,
    WAITS,
    bound,
)


def stages(**seconds: float) -> dict[str, Stage]:
    """Stages of so many seconds, all of it computing, of 1,000 samples or batches that took 10 ms at the median."""
    return {name: Stage(name, s, 1000, 0.010, 0.020, 0.030, cpu_s=s) for name, s in seconds.items()}


def run(**changes: Any) -> Stats:
    """A run whose loop waits half of the time for samples that compute, on half of the cores."""
    figures: dict[str, Any] = {
        "epoch": 2,
        "workers": 4,
        "worker_method": "thread",
        "depth": 6,
        "samples": 6400,
        "batches": 100,
        "errors": 0,
        "elapsed_s": 10.0,
        "consumer_wait_s": 5.0,
        "worker_wait_s": 1.0,
        "occupancy": 0.1,
        "bytes": 100 * 2**20,
        "sample_cpu_s": 36.0,
        "stages": stages(sample=38.0, collate=1.0),
        "gil_pressure": 0.01,
        "gil_probes": 400,
        "slots_in_use": 5,
        "slowest_s": 0.05,
        "slowest": "sample index 7",
        "cores": 8,
        "process_cpu_s": 40.0,
    }
    figures |= changes
    named = figures["stages"]
    busy_s = sum(named[name].seconds for name in ("sample", "collate") if name in named)
    return Stats(busy_s=busy_s, **figures)


def waiting(**changes: Any) -> Stats:
    """The same, with samples that do not compute."""
    return run(**{"sample_cpu_s": 2.0, "process_cpu_s": 4.0, **changes})


def full(**changes: Any) -> Stats:
    """The same, on all of the cores."""
    return run(**{"cores": 4, **changes})


def crowded(**changes: Any) -> Stats:
    """The same, beside other processes that have two thirds of the cores."""
    return run(
        **{
            "sample_cpu_s": 9.0,
            "core_wait_s": 28.0,
            "process_cpu_s": 10.0,
            "others_cpu_s": 54.0,
            **changes,
        }
    )


def remote(**changes: Any) -> Stats:
    """The same, with 3,200 objects of 115 KB, read in 20 ms each: 6.4 in flight of at most 16."""
    figures = {"requests": 3200, "seconds": 64.0, "p50_s": 0.02, "in_flight_limit": 16}
    reads = RemoteReads(**{**figures, "bytes_fetched": 3200 * 115_000, **changes})
    return waiting(remote=reads)


ALONE = run(
    workers=1,
    gil_pressure=0.2,
    worker_wait_s=0.0,
    sample_cpu_s=9.5,
    process_cpu_s=10.0,
    stages=stages(sample=9.6, collate=0.1),
)
"""One worker that computes, and a probe that is late for another reason than the GIL."""

NONE_YET = Stats(-1, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)

CASES = [
    (NONE_YET, "nothing", "no epoch has begun"),
    (run(batches=FEWEST_BATCHES - 1), "nothing", "2 batches"),
    (run(elapsed_s=SHORTEST_S / 2), "nothing", "100 ms; more than 200 ms are needed"),
    (run(batches=2, ended=True), "nothing", "10.0 s; at least 3 batches are needed"),
    (run(workers=0, batches=1000, workers_asked=4), "inline", "larger"),
    (run(consumer_wait_s=0.1), "step", "nothing in the loader would make it faster"),
    (run(consumer_wait_s=0.1, worker_wait_s=36.0), "step", "num_workers=1 would do"),
    (run(workers=16, consumer_wait_s=0.1, worker_wait_s=120.0), "step", "num_workers=6 would do"),
    (run(workers=1, consumer_wait_s=0.1, worker_wait_s=9.0), "step", "nothing in the loader"),
    (run(stages=stages(sampler=6.0, sample=1.0)), "sampler", "60 % of the time"),
    (run(workers=0, worker_wait_s=0.0), "inline", "num_workers=2 or more"),
    (run(workers=0, stages=stages(sample=5.0, decode=4.0)), "inline", 'most of it in "decode"'),
    (run(slowest_s=4.0), "straggler", "sample index 7 took 4.00 s (the median is 10.0 ms)"),
    (run(slowest_s=4.0, slowest=""), "straggler", "an unknown sample took"),
    (run(gil_pressure=0.9), "gil", 'worker_method="process"'),
    (
        run(
            gil_pressure=0.9,
            sample_cpu_s=38.0,
            stages=stages(sample=38.0, read=2.0, transform=30.0, collate=1.0),
        ),
        "gil",
        '79 % of what they compute in "transform"',
    ),
    (run(gil_pressure=0.2, sample_cpu_s=8.0, process_cpu_s=10.0), "gil", "not more"),
    (run(gil_pressure=0.2, process_cpu_s=10.0), "gil", "4 workers take turns"),
    (ALONE, "workers", "num_workers="),
    (replace(ALONE, sample_cpu_s=4.9), "gil", "the worker and the loop take turns"),
    (replace(ALONE, gil_pressure=0.9), "gil", "the worker and the loop take turns"),
    (run(blocked=10**6, sample_cpu_s=20.0), "gil", "num_workers=2"),
    (run(blocked=10**6, sample_cpu_s=20.0, gil_probes=0), "workers", "num_workers="),  # processes
    (
        run(blocked=10**6, sample_cpu_s=1.0, stages=stages(sample=9.0, collate=30.0)),
        "collate",
        "collate_fn",
    ),
    (full(blocked=10**6, sample_cpu_s=14.0, core_wait_s=11.0, workers=2), "gil", "num_workers=1"),
    (run(stages=stages(sample=9.0, collate=30.0)), "collate", "77 % of the workers' busy time"),
    (run(worker_wait_s=35.0, stages=stages(sample=4.0, pin=9.0)), "pin", "90 % of the time"),
    (run(worker_wait_s=30.0), "prefetch", "prefetch_batches=12"),
    (run(worker_wait_s=30.0, depth=1), "prefetch", "prefetch_batches=8"),
    (waiting(stages=stages(sample=38.0, lookup=3.0)), "storage", "packed data"),
    (crowded(consumer_wait_s=0.1), "step", "nothing in the loader"),
    (
        run(consumer_wait_s=0.1, gil_pressure=1.0),
        "step",
        'of the time, while threads wait for the GIL (pressure 1.00); try worker_method="process"',
    ),
    (
        run(consumer_wait_s=0.1, gil_pressure=1.0, worker_wait_s=36.0),
        "step",
        'of theirs, while threads wait for the GIL (pressure 1.00); try worker_method="process"',
    ),
    (waiting(), "storage", "packed data"),
    (waiting(), "storage", "num_workers=8"),
    (waiting(stages=stages(sample=38.0, read=2.0, decode=30.0)), "decode", 'stage "decode"'),
    (waiting(stages=stages(sample=38.0, lookup=30.0)), "lookup", 'stage "lookup"'),
    (full(), "cores", "All 4 cores are busy with samples, and the loop waited 50 % of the time"),
    (full(workers=16, sample_cpu_s=25.0), "cores", "num_workers=4 does as well"),
    (full(process_cpu_s=39.0, sample_cpu_s=3.0), "cores", "torch.set_num_threads"),
    (full(stages=stages(sample=38.0, decode=30.0)), "decode", "decode less"),
    (run(gil_pressure=0.9, core_wait_s=30.0, process_cpu_s=9.0), "gil", "not more"),
    (run(core_wait_s=30.0), "cores", "lacked a core for 30.0 s"),
    (run(gil_pressure=0.9, core_wait_s=30.0), "cores", "wait for the GIL (pressure 0.90)"),
    (run(core_wait_s=30.0, stages=stages(sample=38.0, decode=30.0)), "decode", "decode less"),
    (
        crowded(),
        "others",
        "68 % of the time of 8, while workers lacked a core for 28.0 s",
    ),
    (crowded(gil_pressure=1.0), "others", "cores of your own"),
    (crowded(consumer_wait_s=0.1), "step", "they take 68 % of the cores"),
    (crowded(gil_pressure=1.0), "others", "for 28.0 s, while threads wait for the GIL (pressure"),
    (crowded(gil_pressure=1.0), "others", 'say little, but try worker_method="process"'),
    (crowded(gil_pressure=1.0, others_cpu_s=8.0), "gil", "not more"),
    (
        crowded(gil_pressure=1.0, core_wait_s=2.0),
        "gil",
        "pressure 1.00; other processes take 68 % of the cores",
    ),
    (
        crowded(sample_cpu_s=30.0, core_wait_s=2.0, process_cpu_s=31.0, others_cpu_s=46.0),
        "others",
        "Other",
    ),
    (crowded(sample_cpu_s=0.1, core_wait_s=2.0), "storage", "num_workers"),
    (
        run(core_wait_s=30.0, others_cpu_s=20.1, process_cpu_s=44.0),
        "cores",
        "lacked a core for 30.0 s",
    ),
    (run(), "workers", "num_workers=8"),
    (run(workers=8, worker_wait_s=2.0), "workers", "num_workers=9"),
    (run(stages=stages(sample=38.0, decode=30.0)), "decode", 'in "decode", cores are free'),
    (run(stages={}), "workers", "num_workers"),
    (remote(), "remote", "20.0 ms each, 6.4 in flight of at most 16"),
    (remote(), "remote", "more requests in flight: prefetch_batches=12, or num_workers=8"),
    (remote(in_flight_limit=9), "remote", "Small objects bound the run: requests of 115.0 kB"),
    (remote(in_flight_limit=9), "remote", "; larger objects or shards."),
    (remote(in_flight_limit=10), "remote", "Too few requests in flight"),
    (remote(in_flight_limit=9, bytes_fetched=2**34), "remote", "1.7 GB a second"),
    (remote(throttled=32), "remote", "6.4 in flight"),
    (remote(throttled=33), "remote", "33 of 3,200 requests were throttled by the server"),
    (replace(remote(throttled=33), sample_cpu_s=38.0), "workers", "more workers"),
    (replace(remote(), consumer_wait_s=0.1), "step", "nothing in the loader"),
    (replace(remote(), remote=RemoteReads(cache_hits=9)), "storage", "num_workers="),
]


def test_each_rule_names_its_cause_and_what_to_change() -> None:
    for stats, cause, words in CASES:
        finding = bound(stats)
        assert finding.cause == cause, finding
        assert words in finding.sentence
        assert finding.sentence.endswith(f"{finding.advice}.")
        assert "\n" not in finding.sentence
        assert str(stats).rpartition("\n")[2] == finding.sentence
        assert not re.search(r"\b(nan|inf)\b", str(stats))


UNDER, OVER = 0.999, 1.001


# For each threshold: the field, its value at the threshold, and the causes under it and over it.
BORDERS = [
    (run(), "elapsed_s", SHORTEST_S, "nothing", "prefetch"),
    (run(), "consumer_wait_s", 10 * WAITS, "step", "workers"),
    (run(workers=0), "consumer_wait_s", 10 * WAITS, "step", "inline"),
    (run(), "slowest_s", MOSTLY * 5.0, "workers", "straggler"),
    (run(consumer_wait_s=1.1), "slowest_s", MOSTLY * 1.1, "workers", "straggler"),
    (run(), "gil_pressure", PRESSURE, "workers", "gil"),
    (run(sample_cpu_s=8.0, process_cpu_s=10.0), "gil_pressure", SHORT_HOLDS, "storage", "gil"),
    (run(sample_cpu_s=8.0, gil_pressure=0.2), "process_cpu_s", 10 * ONE_CORE[0], "storage", "gil"),
    (run(sample_cpu_s=8.0, gil_pressure=0.2), "process_cpu_s", 10 * ONE_CORE[1], "gil", "storage"),
    (run(blocked=10**6), "sample_cpu_s", 38 * (1 - TURNS), "gil", "workers"),
    (run(sample_cpu_s=20.0), "blocked", 18 / TURN_S, "workers", "gil"),
    (run(), "worker_wait_s", 40 * MOSTLY, "workers", "prefetch"),
    (run(process_cpu_s=10.0), "sample_cpu_s", 19.0, "storage", "workers"),
    (run(), "process_cpu_s", 80 * FULL, "workers", "cores"),
    (run(), "core_wait_s", 36 * LACKS, "workers", "cores"),
    (run(gil_pressure=0.9), "core_wait_s", 36 * LACKS, "gil", "cores"),
    (run(sample_cpu_s=4.0, process_cpu_s=4.0), "core_wait_s", 15.0, "storage", "cores"),
    (crowded(gil_pressure=0.9), "others_cpu_s", 80 * OTHERS, "gil", "others"),
    (crowded(gil_pressure=0.9, sample_cpu_s=20.0), "core_wait_s", 20.0 * LACKS, "gil", "others"),
    (crowded(gil_pressure=0.9), "core_wait_s", 38 * COMPUTES - 9.0, "gil", "others"),
    (
        crowded(sample_cpu_s=1.0, stages=stages(sample=8.0, collate=30.0)),
        *("core_wait_s", 38.0 * OTHERS, "collate", "others"),
    ),
]


def test_without_a_gil_it_never_bounds_the_run() -> None:
    """The figures are those of a run with one, which another thread could make alike."""
    for stats, *_ in CASES:
        assert bound(replace(stats, gil=False, gil_probes=0)).cause != "gil", stats


def test_the_cause_changes_at_the_threshold_and_not_before() -> None:
    for stats, name, border, under, over in BORDERS:
        for factor, cause in ((UNDER, under), (OVER, over)):
            changed: dict[str, Any] = {name: border * factor}
            assert bound(replace(stats, **changed)).cause == cause, changed


def test_a_straggler_is_far_from_the_median_and_not_the_first_of_its_thread() -> None:
    for factor, cause in ((UNDER, "straggler"), (OVER, "workers")):
        sample = Stage("sample", 38.0, 1000, 4.0 / STRAGGLER * factor, 1.0, 2.0)
        assert bound(run(slowest_s=4.0, stages={"sample": sample})).cause == cause
    stats = run(slowest_s=4.0, stages=stages(sampler=0.5, sample=38.0, collate=1.0))
    assert "loop waited         5.50 s" in str(stats), "with what it spends in the sampler"
    assert "the loop waited 5.50 s in all" in bound(stats).sentence
    finding = bound(run(slowest_s=4.0, slowest_is_first=True))
    assert finding.cause == "nothing"
    assert "The start bounds the run so far" in finding.sentence


def test_a_notebook_shows_the_report() -> None:
    """IPython asks for this, with a printer that has `text`."""
    said: list[str] = []
    run()._repr_pretty_(SimpleNamespace(text=said.append), cycle=False)
    assert said == [str(run())]


def test_the_report_in_full() -> None:
    stats = run(core_wait_s=2.0, stages=stages(sample=36.0, read=6.0, decode=28.0, collate=4.0))
    assert str(stats).split("\n") == [
        "epoch 2             10.0 s  4.0 of 8 cores used",
        "samples              6,400  640.0 a second",
        "batches                100  10.0 a second",
        "bytes             104.9 MB  10.5 MB a second",
        "errors                   0",
        "loop waited         5.00 s  50 % of the time",
        "workers waited      1.00 s  2 % of the time of 4",
        "workers busy        40.0 s  100 % of it",
        "occupancy             10 %  of at most 6 batches in flight",
        "slots in use             5  about 5.2 MB",
        "lacked a core       2.00 s  workers that could compute",
        "GIL pressure          0.01  mean of 400 probes",
        "slowest sample     50.0 ms  sample index 7",
        "stage            share  seconds  count      p50      p95      p99",
        "sample            90 %   36.0 s  1,000  10.0 ms  20.0 ms  30.0 ms",
        "  read            15 %   6.00 s  1,000  10.0 ms  20.0 ms  30.0 ms",
        "  decode          70 %   28.0 s  1,000  10.0 ms  20.0 ms  30.0 ms",
        "collate           10 %   4.00 s  1,000  10.0 ms  20.0 ms  30.0 ms",
        'Too few workers bound the run: they are busy with samples, 78 % of it in "decode", cores are free, '
        "and the loop waited 50 % of the time; more workers, num_workers=8.",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (12.34e-6, "12.3 us"),
        (0.9996e-3, "1.00 ms"),
        (0.0999, "99.9 ms"),
        (0.9996, "1.00 s"),
        (7200.0, "7,200 s"),
    ],
)
def test_times_are_shown_in_three_digits(seconds: float, text: str) -> None:
    assert f" {text}" in str(run(consumer_wait_s=seconds)).split("\n")[5]


def test_a_snapshot_can_be_hashed_pickled_and_logged_as_json() -> None:
    stats = run()
    assert hash(stats) == hash(pickle.loads(pickle.dumps(stats)))
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert json.loads(json.dumps(asdict(stats)))["stages"]["sample"]["count"] == 1000
