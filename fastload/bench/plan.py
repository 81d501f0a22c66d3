"""The plan of a benchmark, as pure values. Nothing here opens a file or starts a process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np

from fastload.measure.page_cache import CacheState
from fastload.order.sampler import RankSampler

LoaderKind = Literal["serial", "thread", "torch", "plan"]
"""serial: fastload's loader without workers, inline. thread: fastload's threads. torch: torch's worker processes.
plan: fastload's threads, with a plan of `fastload.image` in place of torchvision's transforms."""
TransformName = Literal["resize", "rrc"]
"""Transforms of images, with torchvision (v1). resize: Resize((256, 256)) + ToTensor. rrc: RandomResizedCrop(224) +
flip + ToTensor + Normalize."""
LOADERS: tuple[LoaderKind, ...] = get_args(LoaderKind)
LOADER_NAMES: dict[LoaderKind, str] = {
    "thread": "fastload threads",
    "plan": "fastload threads, plan",
    "torch": "torch processes",
    "serial": "serial, one thread",
}
"""Names in the legends of plots and pages, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What all runs of a benchmark have in common: the samples, their order, and the loop that takes them."""

    file_list: str
    base_dir: str | None = None
    transform: TransformName = "resize"
    batch_size: int = 64
    steps: int = 20
    status_print_interval: int = 5
    step_ms: float = 0.0
    """Milliseconds that a step waits, as if for an accelerator. 0: the loop only loads."""
    seed: int = 0
    cache: CacheState = "warm"

    @property
    def samples(self) -> int:
        """Number of samples that a rank of a run delivers: `steps` full batches, even if the list is shorter."""
        return self.steps * self.batch_size

    @property
    def step(self) -> str:
        """What the loop does after each batch."""
        if self.step_ms > 0:
            return f"simulated: waits {self.step_ms:g} ms, without an accelerator"
        return "none: the loop only loads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measurement: a loader over a workload. Runs over one workload differ only in the loader, or in its plan."""

    workload: Workload
    loader: LoaderKind
    workers: int
    """Workers per rank."""
    ranks: int = 1
    """Processes on this node that load at the same time, each its part of the order."""
    repeat: int = 0

    @property
    def name(self) -> str:
        """Name of the run: the loader, its workers and its ranks."""
        ranks = "" if self.ranks == 1 else f"{self.ranks} ranks x "
        if self.loader == "serial":
            return f"{ranks}serial"
        kind, plural = ("torch process", "es") if self.loader == "torch" else ("thread", "s")
        plan = ", plan" if self.loader == "plan" else ""
        return f"{ranks}{self.workers} {kind}{'' if self.workers == 1 else plural}{plan}"

    @property
    def ordered_samples(self) -> int:
        """Number of samples in the order of each rank's loader: more than the loop takes.

        At the end of its order a loader stops reading ahead, and batches read during the warm-up would then count as
        speed. So the order is longer than any loader here reads ahead: torch at most 2 batches per worker, fastload at
        most 2 + workers. The work in flight is then the same at the first measured step as at the last.
        """
        ahead_batches = 2 * self.workers + 2 if self.workers else 0
        return self.workload.samples + ahead_batches * self.workload.batch_size

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the run of which `asdict` returned these values."""
        return cls(**{**document, "workload": Workload(**document["workload"])})


def plan_runs(
    workload: Workload,
    *,
    loaders: Sequence[LoaderKind],
    workers: Sequence[int],
    repeats: int,
    ranks: Sequence[int] = (1,),
) -> list[Run]:
    """Return runs of each loader with each number of workers and ranks, `repeats` times. Serial loading has no workers.

    The repeats are interleaved. Every second one is in reverse order, so that a machine that slowly gets faster or
    slower favours no loader.
    """
    once = [
        (together, loader, count)
        for together in ranks
        for loader in loaders
        for count in ((0,) if loader == "serial" else workers)
    ]
    return [
        Run(workload=workload, loader=loader, workers=count, ranks=together, repeat=repeat)
        for repeat in range(repeats)
        for together, loader, count in (once if repeat % 2 == 0 else reversed(once))
    ]


def rank_order(run: Run, length: int, rank: int) -> list[int]:
    """Return the indices for a rank's loader: its `RankSampler` part of one order over `length` samples.

    Step k of all ranks together is one contiguous piece of that order.
    """
    order = sample_order(length, run.ordered_samples * run.ranks, seed=run.workload.seed)
    part = RankSampler(len(order), rank=rank, world_size=run.ranks, shuffle=False)
    return [order[position] for position in part]


def sample_order(length: int, count: int, *, seed: int) -> list[int]:
    """Return the first `count` indices of an endless sequence of epochs over `length` samples, shuffled by `seed`.

    This is a pure function, and its result is a prefix of every longer order with the same seed. So all runs deliver
    the same samples in the same order. If the list is shorter than a run, it starts again after its last sample.
    """
    generator = np.random.default_rng(seed)
    epochs = [generator.permutation(length) for _ in range(math.ceil(count / length))]
    order: list[int] = np.concatenate(epochs)[:count].tolist()
    return order
