"""Promises:
- Stages, quantiles and spans are measured in the worker threads, with an estimate of GIL pressure and how often
  workers stop. See also `tests/promises/test_beside_the_loop.py`.
- The first sample of a thread is never reported as a straggler. A straggler's wait is that of the report. See also
  `tests/telemetry/test_diagnosis.py`.
- Measuring costs the worker threads next to nothing.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastload.telemetry import Place, Recorder, merge, recording, span, stage
from fastload.telemetry import recorder as recorder_module
from fastload.telemetry import stages as stages_module
from fastload.telemetry.recorder import MOST_STAGES, OTHER, PROBE_EVERY_S, Histogram
from tests.gil import needs_gil

RESOLUTION = 2 ** (1 / 16) * (1 + 1e-9)


class Clock:
    """Stands in for the clock of telemetry: seconds pass when a test says so."""

    def __init__(self) -> None:
        self.wall = 100.0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        for module in (recorder_module, stages_module):
            monkeypatch.setattr(module, "perf_counter", lambda: self.wall)
        return self


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock().install(monkeypatch)


# ---- histograms ----


@given(
    st.lists(st.tuples(st.floats(1e-7, 3600.0), st.integers(1, 50)), min_size=1, max_size=40),
    st.floats(0.0, 1.0),
)
def test_a_quantile_is_an_observation_that_as_many_do_not_exceed(
    observations: list[tuple[float, int]], share: float
) -> None:
    histogram = Histogram()
    for seconds, count in observations:
        histogram.add(seconds, count)
    values = sorted(seconds for seconds, count in observations for _ in range(count))
    assert histogram.count == len(values)
    assert histogram.seconds == pytest.approx(sum(values))
    expected = values[max(1, math.ceil(share * len(values))) - 1]
    (found,) = histogram.quantiles(share)
    assert expected / RESOLUTION <= found <= expected * RESOLUTION


# ---- recorders ----


def test_samples_are_counted_and_the_slowest_is_kept_with_its_place() -> None:
    for recorders in ([], [Recorder()]):
        merged = merge(recorders)
        assert merged.stages == {}
        assert (merged.sample_cpu_s, merged.gil_pressure, merged.gil_probes) == (0, 0, 0)
        assert (merged.slowest_s, merged.slowest) == (0.0, "")
    recorders = [Recorder(), Recorder()]
    recorders[0].run(3, 0.3, 0.2, lambda: Place(0, 1, 10))
    recorders[1].run(1, 0.7, 0.1, lambda: Place(0, 2, 20))
    recorders[0].run(1, 0.6, 0.0, lambda: Place(0, 3, 30))
    merged = merge(recorders)
    assert merged.slowest_s == 0.7
    assert merged.slowest == "at or after sample index 20 in batch 2 of epoch 0"
    assert merged.slowest_is_first
    recorders[1].run(1, 3.0, 0.0, lambda: "slow")
    assert not merge(recorders).slowest_is_first
    assert str(Place(4, 2, None)) == "in batch 2 of epoch 4"
    sample = merged.stages["sample"]
    assert (sample.count, sample.seconds) == (5, pytest.approx(1.6))
    assert merged.sample_cpu_s == pytest.approx(0.3)
    assert 0.1 / RESOLUTION <= sample.p50_s <= 0.1 * RESOLUTION
    assert 0.7 / RESOLUTION <= sample.p99_s <= 0.7 * RESOLUTION


def test_stages_come_as_a_batch_meets_them_and_the_number_of_names_is_bounded() -> None:
    recorder = Recorder()
    for name, seconds in {"pin": 1, "read": 2, "collate": 9, "decode": 5, "sampler": 1}.items():
        recorder.add(name, seconds)
    recorder.run(1, 8.0, 0.0, lambda: "")
    ordered = ["sampler", "sample", "decode", "read", "collate", "pin"]
    assert list(merge([recorder]).stages) == ordered
    recorder = Recorder()
    for k in range(10 * MOST_STAGES):
        recorder.add(f"name {k}", 1.0)
    recorder.add("collate", 1.0)
    stages = merge([recorder]).stages
    assert len(stages) <= MOST_STAGES + len(["other", "collate"])
    assert sum(s.count for s in stages.values()) == 10 * MOST_STAGES + 1
    assert stages[OTHER].count > 8 * MOST_STAGES
    assert stages["collate"].count == 1


def test_a_snapshot_can_be_taken_while_a_thread_writes() -> None:
    recorder, names = Recorder(), [f"name {k}" for k in range(25)]

    def write() -> None:
        for _ in range(200):
            for name in names:
                recorder.add(name, 0.001)
                recorder.run(2, 0.002, 0.001, lambda name=name: name)

    thread = threading.Thread(target=write)
    thread.start()
    snapshots = [merge([recorder])]
    while thread.is_alive():
        snapshots.append(merge([recorder]))
    thread.join()
    counts = [sum(s.count for s in snapshot.stages.values()) for snapshot in snapshots]
    assert counts == sorted(counts)
    last = merge([recorder])
    assert last.stages["sample"].count == 2 * 200 * 25
    assert all(last.stages[name].count == 200 for name in names)
    assert last.sample_cpu_s == pytest.approx(200 * 25 * 0.001)


# ---- stages ----


def seconds_of(recorder: Recorder) -> dict[str, tuple[int, float]]:
    return {name: (s.count, s.seconds) for name, s in merge([recorder]).stages.items()}


def test_a_stage_counts_the_time_in_its_block_nested_ones_in_both(clock: Clock) -> None:
    """One that is entered again while it is counts each time."""
    recorder, outer = Recorder(), stage("outer")
    with recording(recorder), outer:
        clock.wall += 1
        with stage("inner"):
            clock.wall += 2
        with outer, stage("inner"):
            clock.wall += 4
    assert seconds_of(recorder) == {"outer": (2, 11.0), "inner": (2, 6.0)}


def test_an_exception_passes_through_and_its_block_counts(clock: Clock) -> None:
    recorder, error = Recorder(), OSError("no such file")
    with pytest.raises(OSError, match="no such file") as caught, recording(recorder), stage("read"):
        clock.wall += 3
        raise error
    assert caught.value is error
    assert seconds_of(recorder) == {"read": (1, 3.0)}
    with stage("read"), stage("read"):  # the recorder is no longer this thread's
        clock.wall += 3
    with pytest.raises(ValueError, match="bad"), stage("read"):
        raise ValueError("bad")
    assert seconds_of(recorder) == {"read": (1, 3.0)}


@pytest.mark.parametrize("name", ["", "sample", "pin", 3])
def test_names_that_would_mix_with_the_loader_s_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=r"a stage name must .* got"):
        stage(name)


# ---- the profiler ----


def test_the_loader_s_own_spans_are_there_while_a_profile_is() -> None:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    for _ in range(2):
        with (
            torch.profiler.profile(activities=cpu, acc_events=True) as profile,
            span("sample"),
            span("collate"),
        ):
            pass
        names = sorted(e.name for e in profile.events() if e.name.startswith("fastload."))
        assert names == ["fastload.collate", "fastload.sample"]
        with span("sample"):  # no profile: no harm
            pass
    recorder = Recorder()
    with recording(recorder), stage("decode"):  # a profile that begins or ends within a stage
        profile = torch.profiler.profile(activities=cpu, acc_events=True)
        profile.start()
    with recording(recorder), stage("decode"):
        profile.stop()
    assert merge([recorder]).stages["decode"].count == 2


# ---- the probe ----


@needs_gil
def test_a_probe_is_made_at_most_each_40_ms(clock: Clock) -> None:
    recorder = Recorder()
    for k in range(1000):
        recorder.probe()
        assert merge([recorder]).gil_probes == 1 + int(k * 0.001 / PROBE_EVERY_S + 1e-6)
        clock.wall += 0.001


@needs_gil
@pytest.mark.parametrize(("wait_s", "pressure"), [(0.0, 0.0), (0.0025, 0.5), (0.05, 1.0)])
def test_pressure_is_the_wait_beyond_the_nap_in_units_of_the_switch_interval(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, wait_s: float, pressure: float
) -> None:
    monkeypatch.setattr(sys, "getswitchinterval", lambda: 0.005)
    # The time without a core is real, beside a clock that is not: on busy cores it would be taken off the wait.
    monkeypatch.setattr(recorder_module, "delayed_s", lambda: 0.0)

    def nap(_r: Any, _w: Any, _x: Any, seconds: float) -> None:
        clock.wall += seconds + wait_s

    monkeypatch.setattr(recorder_module, "select", nap)
    recorder = Recorder()
    for _ in range(10):
        clock.wall += 1
        recorder.probe()
    assert merge([recorder]).gil_pressure == pytest.approx(pressure, abs=1e-6)


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[None]:
    """Run the block beside a thread that does `work` over and over."""
    stop, running = False, threading.Barrier(2)

    def repeat() -> None:
        running.wait(10)
        while not stop:
            work()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(repeat)
        running.wait(10)
        try:
            yield
        finally:
            stop = True


def pressures(probes: int = 25) -> Iterator[float]:
    """Yield three: other processes may take the cores for the time of one."""
    for _ in range(3):
        recorder = Recorder()
        while merge([recorder]).gil_probes < probes:
            recorder.probe()
            time.sleep(PROBE_EVERY_S)  # the sample that a worker reads between two probes
        yield merge([recorder]).gil_pressure


def spin() -> None:
    for _ in range(1000):
        pass


@needs_gil
def test_beside_a_thread_of_pure_python_the_pressure_is_near_1() -> None:
    with beside(spin):
        assert any(pressure > 0.7 for pressure in pressures())


@needs_gil
def test_time_without_a_core_is_no_wait_for_the_gil(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    delayed = 0.0

    def nap(_r: Any, _w: Any, _x: Any, seconds: float) -> None:
        nonlocal delayed
        clock.wall += seconds + 0.004
        delayed += 0.004

    monkeypatch.setattr(recorder_module, "select", nap)
    monkeypatch.setattr(recorder_module, "delayed_s", lambda: delayed)
    recorder = Recorder()
    recorder.probe()
    assert merge([recorder]).gil_pressure == pytest.approx(0.0, abs=1e-6)
    assert merge([recorder]).core_wait_s == pytest.approx(0.004)
    delayed, clock.wall = delayed + 2.0, clock.wall + 3.0  # in a sample
    recorder.probe()
    assert merge([recorder, recorder]).core_wait_s == pytest.approx(2 * 2.008)


def test_how_often_a_thread_stopped_is_counted_between_probes_and_naps_are_not(
    clock: Clock,
) -> None:
    recorder = Recorder()
    time.sleep(0.001)
    recorder.probe()
    assert merge([recorder]).blocked == 0  # what was before the first
    for k in range(10):
        time.sleep(0.001)  # each stops the thread once, at least
        clock.wall += 1.0
        recorder.probe()
        assert k + 1 <= merge([recorder]).blocked
