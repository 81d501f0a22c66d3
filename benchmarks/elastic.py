"""Leases beside static sharding: three worker processes, one of them slow or all alike; and the cost of a lease."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from multiprocessing import get_context
from time import monotonic, sleep
from typing import Any

from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

import fastload
from benchmarks._measure import in_turns
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from fastload.bench.figures import BenchError
from fastload.elastic import Leases, LeaseSampler
from fastload.testing import SlowDataset

TITLE = (
    "elastic: shards of 512, batches of 64, 2 threads, steps simulated (they sleep); from the moment when all workers "
    "are ready to the end of the last; ideal: all batches over the sum of the workers' rates. Overhead: one worker, "
    "samples of 1 ms (simulated)"
)
REPEATS = 3

BATCH, SHARD = 64, 512
TURNS = 3
Indices = list[int]


def cases(*, smoke: bool) -> list[Case]:
    shards, samples = (6, 512) if smoke else (118, 4_096)
    steps = {"slow": [0.01, 0.01, 0.05], "equal": [0.01, 0.01, 0.01]}
    workers = [
        Case(name, {"steps": each, "shards": shards, "samples": 0, "num_workers": 2})
        for name, each in steps.items()
    ]
    alone = [
        Case(f"alone {n}", {"steps": [], "shards": 0, "samples": samples, "num_workers": n})
        for n in (0, 2)
    ]
    return [*workers, *alone]


def measure(*, steps: list[float], shards: int, samples: int, num_workers: int) -> Figures:
    if not steps:
        return overhead(samples, num_workers)
    ideal = shards * SHARD / BATCH / sum(1 / step for step in steps)
    found: Figures = {"ideal": ideal}
    for way in ("leases", "static"):
        found[way] = seconds(way, steps, shards * SHARD, num_workers)
    return found


def seconds(way: str, steps: list[float], length: int, num_workers: int) -> float:
    """Return how long the workers took together. Raise if they did not read each sample once."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run = partial(work, way, server.port, len(steps), length, num_workers)
    with ProcessPoolExecutor(len(steps), get_context("spawn")) as pool:
        answered = list(pool.map(run, range(len(steps)), steps))
    if sorted(chain(*(read for _, _, read in answered))) != list(range(length)):
        raise BenchError(f"{way}: not every sample was read once")
    return max(end for _, end, _ in answered) - min(begin for begin, _, _ in answered)


def work(
    way: str, port: int, world_size: int, length: int, num_workers: int, rank: int, step: float
) -> tuple[float, float, Indices]:
    """Train an epoch in a process of its own, and return when it began and ended, and what it read."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    options: dict[str, Any] = {"num_workers": num_workers, "seed": 0}
    with Leases(length, shard=SHARD, store=PrefixStore(way, store)) as leases:
        if way == "leases":
            options["batch_sampler"] = LeaseSampler(leases, BATCH)
        else:
            part = fastload.RankSampler(length, rank=rank, world_size=world_size, ends="uneven")
            options |= {"sampler": part, "batch_size": BATCH}
        loader = fastload.DataLoader(range(length), **options)
        if store.add("ready", 1) == world_size:
            store.set("go", "")
        store.wait(["go"])
        begin, read = monotonic(), []
        for batch in loader:
            sleep(step)
            read.append(batch)
        return begin, monotonic(), [index for batch in read for index in batch.tolist()]


def overhead(samples: int, num_workers: int) -> Figures:
    """Return the seconds of an epoch with each sampler."""
    dataset = SlowDataset(samples, seconds=0.001)
    part = fastload.RankSampler(samples, rank=0, world_size=1)
    with Leases(samples, shard=SHARD, store=HashStore()) as leases:
        loaders = {
            "rank": fastload.DataLoader(
                dataset, BATCH, sampler=part, num_workers=num_workers, seed=0
            ),
            "leases": fastload.DataLoader(
                dataset, batch_sampler=LeaseSampler(leases, BATCH), num_workers=num_workers, seed=0
            ),
        }

        def epoch(name: str) -> None:
            if (count := sum(len(batch) for batch in loaders[name])) != samples:
                raise BenchError(f"{name}: {count} of {samples} samples")

        return in_turns({name: partial(epoch, name) for name in loaders}, TURNS)


def rows(results: Results) -> list[Row]:
    def of(case: str, key: str, against: str, aim: Aim | None = None) -> Row:
        return row(results, case, key, name=f"{key}, {case}", unit="s", against=against, aim=aim)

    return [
        of("slow", "leases", "ideal", Aim("<=", 1.15)),
        of("slow", "static", "ideal"),
        of("slow", "static", "leases", Aim(">=", 3.0)),
        of("equal", "leases", "ideal", Aim("<=", 1.1)),
        of("equal", "static", "ideal"),
        of("alone 0", "leases", "rank", Aim("<=", 1.01)),
        of("alone 2", "leases", "rank", Aim("<=", 1.01)),
    ]
