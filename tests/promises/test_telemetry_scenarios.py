"""Promise: The report names the right cause: slow reads, decode, Python under the GIL, collate, the step, a
straggler, too few or too many workers. See also `tests/telemetry/test_diagnosis.py`.

The costs are simulated: `time.sleep` for what waits, loops and hashes for what computes. If other processes take the
cores a measured run may look otherwise than it is, so each scenario has three attempts; what it must say is never
less. If the report itself says in each of them that others take the cores, nothing can be shown, and the scenario is
skipped.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Sampler, TensorDataset

import fastload.engine.pinning
from fastload import DataLoader, Stats, stage
from fastload._kit.cores import usable_cores
from fastload.telemetry.diagnosis import bound
from tests.gil import needs_gil

ATTEMPTS = 3
BUFFER = bytes(2**20)  # hashlib lets the GIL go for buffers of more than 2 KiB


class Simulated(Dataset[int]):
    """`cost(index)` is what a sample takes. There are eight in each file."""

    def __init__(self, length: int, cost: Callable[[int], object]) -> None:
        self.length, self.cost = length, cost

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.cost(index)
        return index

    def locate(self, index: int) -> str:
        return f"shard-{index // 8:03d}.tar"


def waits(seconds: float) -> Callable[[Any], None]:
    return lambda _: time.sleep(seconds)


def hashes(mebibytes: int) -> Callable[[Any], None]:
    def cost(_: Any) -> None:
        for _ in range(mebibytes):
            hashlib.sha256(BUFFER).digest()

    return cost


def counts(steps: int) -> Callable[[Any], None]:
    def cost(_: Any) -> None:
        total = 0
        for k in range(steps):
            total += k

    return cost


def staged(**costs: Callable[[Any], object]) -> Callable[[int], None]:
    """One stage after the other."""

    def cost(index: int) -> None:
        for name, part in costs.items():
            with stage(name):
                part(index)

    return cost


def run(loader: DataLoader[Any], step: Callable[[Any], object] | None = None) -> Stats:
    """One epoch, with what the loop does after each batch."""
    with loader:
        for batch in loader:
            if step is not None:
                step(batch)
    return loader.stats()


def advised(stats: Stats) -> int:
    """The number of workers that the advice names."""
    found = re.search(r"num_workers=(\d+)", bound(stats).advice)
    assert found, bound(stats).advice
    return int(found[1])


class SlowSampler(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        for k in range(160):
            time.sleep(0.005)
            yield k


def slow_collate(samples: list[int]) -> torch.Tensor:
    hashes(24)(samples)
    return torch.tensor(samples)


Also = Callable[[Stats], bool]
Scenario = tuple[str, str, Callable[[], Stats], Also]
"""Cause, words of the sentence, the run, and what else must hold."""


def epoch(
    length: int,
    cost: Callable[[int], object],
    step: Callable[[Any], object] | None = None,
    **options: Any,
) -> Callable[[], Stats]:
    return lambda: run(DataLoader(Simulated(length, cost), 8, **options), step)


def of_storage(stats: Stats) -> bool:
    read = stats.stages["read"]
    assert read.count == 160
    assert stats.stages["sample"].seconds >= read.seconds >= 1.59
    return read.seconds < 2.1 and 0.0095 <= read.p50_s < 0.015


def in_transform(stats: Stats) -> bool:
    return '"transform"' in bound(stats).sentence


def keeps_up(stats: Stats) -> bool:
    assert "more workers" not in bound(stats).advice
    return stats.occupancy > 0.5


READS = staged(read=waits(0.01), decode=waits(0.0005))
LIGHT = staged(decode=counts(100))
PYTHON = staged(read=waits(0.0005), transform=counts(60_000))
SCENARIOS: dict[str, Scenario] = {
    "slow reads": ("storage", "num_workers|packed", epoch(160, READS, num_workers=2), of_storage),
    "a free core": (
        "decode",
        "num_workers=",
        epoch(120, staged(decode=hashes(8)), num_workers=1),
        lambda stats: advised(stats) > 1 and stats.gil_pressure < 0.2,
    ),
    # After a read that lets the GIL go, a thread waits for it: that wait is no slow storage.
    "Python": ("gil", 'worker_method="process"', epoch(240, PYTHON, num_workers=2), in_transform),
    "slow collate": (
        "collate",
        "collate",
        epoch(160, waits(0.0005), num_workers=2, collate_fn=slow_collate),
        lambda stats: stats.stages["collate"].count == 20,
    ),
    "step that waits": ("step", "step", epoch(400, LIGHT, waits(0.02), num_workers=2), keeps_up),
    "step in Python": ("step", "step", epoch(400, LIGHT, counts(400_000), num_workers=2), keeps_up),
    # 16 ms of reads for a step of 20 ms: one or two do.
    "too many workers": (
        "step",
        "num_workers=",
        epoch(400, staged(read=waits(0.002)), waits(0.02), num_workers=16),
        lambda stats: advised(stats) <= 6,
    ),
    "one slow file": (
        "straggler",
        r"101.*shard-012\.tar",
        epoch(240, lambda k: time.sleep(1.0 if k == 101 else 0.002), num_workers=4),
        lambda stats: stats.slowest_s >= 1.0,
    ),
    "no workers": (
        "inline",
        "num_workers=",
        epoch(60, staged(decode=waits(0.01))),
        lambda stats: advised(stats) >= 2 and '"decode"' in bound(stats).sentence,
    ),
    "slow sampler": (
        "sampler",
        "sampler",
        epoch(160, waits(0.0002), sampler=SlowSampler(), num_workers=2),
        lambda stats: bool(re.search(r"\d\d\d ms of it in the sampler|\d s of it in", str(stats))),
    ),
}
MARKS: dict[str, Any] = {
    "a free core": [
        pytest.mark.slow,
        pytest.mark.skipif(usable_cores() < 2, reason="needs a free core"),
    ],
    "Python": needs_gil,
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in SCENARIOS])
def test_the_report_names_the_cause(name: str) -> None:
    cause, words, make, also = SCENARIOS[name]
    reports, causes = [], []
    for _ in range(ATTEMPTS):
        stats = make()
        finding = bound(stats)
        assert str(stats).rstrip().endswith(finding.sentence), "the report ends in the sentence"
        assert finding.advice in finding.sentence
        said = finding.cause == cause and re.search(words, finding.sentence, re.IGNORECASE)
        if said and also(stats):
            return
        reports.append(f"{finding.cause}: {stats}")
        causes.append(finding.cause)
    if {*causes} == {"others"}:
        pytest.skip("other processes take the cores, and the report says so")
    raise AssertionError(f"expected {cause} and {words!r}:\n" + "\n\n".join(reports))


# ---- the figures ----


def test_a_light_dataset_says_why_it_has_no_workers() -> None:
    stats = run(DataLoader(TensorDataset(torch.arange(4000)), 8, num_workers=8))
    assert (stats.workers, stats.workers_asked) == (0, 8)
    assert "8 asked for: the loop copies a batch faster than it is handed over" in str(stats)


@pytest.mark.parametrize("workers", [0, 2])
def test_pinning_is_a_stage_with_and_without_workers(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(data: object) -> object:  # simulated: here may be nothing to pin for
        time.sleep(0.01)
        return data

    monkeypatch.setattr(fastload.engine.pinning, "_accelerator", lambda: "cuda")
    monkeypatch.setattr(fastload.engine.pinning, "pin", slow)
    stats = run(DataLoader(Simulated(40, waits(0)), 10, num_workers=workers, pin_memory=True))
    assert stats.stages["pin"].count == 4
    assert stats.stages["pin"].seconds >= 0.04
    assert re.search(r"(?m)^pin .* 4 ", str(stats)), str(stats)


# ---- other processes ----


@pytest.mark.parametrize("workers", [0, 2])
def test_the_figures_are_those_of_the_run(workers: int) -> None:
    cost = staged(read=waits(0.002), decode=waits(0.001))
    loader = DataLoader(Simulated(100, cost), 10, num_workers=workers)
    started = time.perf_counter()
    stats = run(loader, waits(0.002))
    elapsed = time.perf_counter() - started
    assert (stats.samples, stats.batches, stats.errors) == (100, 10, 0)
    assert stats.bytes == 100 * torch.tensor(0).element_size()
    assert 0.5 * elapsed < stats.elapsed_s <= elapsed
    assert stats.stages["read"].count == stats.stages["decode"].count == 100
    assert stats.stages["sample"].count == 100
    assert 0.002 * 0.9 <= stats.stages["read"].p50_s <= stats.stages["read"].p95_s
    assert stats.stages["read"].p95_s <= stats.stages["read"].p99_s
    assert 0 <= stats.occupancy <= 1
    assert stats.consumer_wait_s <= stats.elapsed_s
    assert stats.worker_wait_s <= max(workers, 1) * stats.elapsed_s
    assert loader.stats() == stats, "a finished epoch no longer changes"
