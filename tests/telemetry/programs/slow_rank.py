"""One of two ranks becomes slow on purpose: rank 0 asks until the other is named with its cause, and reports.

    slow_rank.py CAUSE

Both ranks step together, but for a slow step, which all ranks would wait for. Rank 0 prints what it saw, as JSON.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from fastload import DataLoader, distributed, stage
from fastload._kit.torch_private import default_store

SLOW_S = 3.0  # seconds of health before
LIMIT_S = 40.0
BUFFER = bytes(2**20)
HOLD_GIL = ctypes.PyDLL(None).usleep  # unlike `CDLL`, it keeps the GIL


class Samples(Dataset[int]):
    """Cheap samples, until `slow` names what makes them dear. All but "others" waits, so no other process counts."""

    slow = ""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> int:
        with stage("read"):
            time.sleep(0.03 if self.slow == "storage" else 0.001)
        with stage("decode"):
            time.sleep(0.03 if self.slow == "decode" else 0)
        HOLD_GIL(25_000 if self.slow == "gil" else 0)
        for _ in range(16 if self.slow == "others" else 0):
            hashlib.sha256(BUFFER).digest()
        return index


def collate(samples: list[int]) -> torch.Tensor:
    time.sleep(0.3 if Samples.slow == "collate" else 0)
    return torch.tensor(samples)


@contextmanager
def burners(count: int) -> Iterator[None]:
    """Other processes on this rank's core."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def main(cause: str) -> None:
    rank = distributed.init("gloo").rank
    if cause == "others":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    loader = DataLoader(
        Samples(), 8, num_workers=2, worker_method="thread", collate_fn=collate, prefetch_batches=3
    )
    with loader, burners(3 if (cause, rank) == ("others", 1) else 0):
        found = until_named(cause, rank, iter(loader), loader)
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()  # rank 0 keeps the store
    distributed.shutdown()


def until_named(cause: str, rank: int, steps: Iterator[Any], loader: Any) -> dict[str, Any]:
    """Step until rank 0 knows that rank 1 is the slowest, and why. Return what it was told, and how long it took."""
    began = asked = time.monotonic()
    found: dict[str, Any] = {"seen": [], "named": {}}
    while time.monotonic() - began < SLOW_S + LIMIT_S:
        next(steps)
        slow_s = time.monotonic() - began - SLOW_S
        if rank == 1 and slow_s > 0:
            Samples.slow = cause
        time.sleep(0.2 if Samples.slow == "step" else 0.02)
        if rank == 0 and slow_s > 0 and time.monotonic() - asked > 0.5:
            asked = time.monotonic()
            heard = loader.stats(ranks=True)
            found["seen"].append(str(heard))
            one = heard.slowest
            if one is not None and (one.rank, one.cause) == (1, cause):
                said, most = heard.sentences()[0], heard.waits_most.rank
                found["named"] = {
                    "after_s": slow_s, "since_s": one.since_s, "waits_most": most, "said": said,
                }  # fmt: skip
        if all_know(bool(found["named"]), together=cause != "step"):
            break
    return found


def all_know(named: bool, *, together: bool) -> bool:
    """Return whether the slow rank is named, on both ranks after the same step if they step together."""
    if together:
        flag = torch.tensor([named], dtype=torch.int32)
        dist.all_reduce(flag)
        return bool(flag)
    if named:
        default_store().set("named", "yes")
    return bool(default_store().check(["named"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
