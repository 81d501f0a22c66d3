"""What a benchmark is to run, as pure values: nothing here opens a file or starts a process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, get_args

import numpy as np

from fastload.measure import WARMUP_STEPS
from fastload.measure.page_cache import CacheState
from fastload.sampler import RankSampler

LoaderKind = Literal["serial", "thread", "torch"]
"""serial: fastload's loader without workers, inline. thread: fastload's threads. torch: torch's worker processes."""
TransformName = Literal["resize", "rrc"]
"""What torchvision's own transforms (v1) make of a picture: see `TRANSFORMS`."""

TRANSFORMS: dict[TransformName, str] = {
    "resize": "Resize((256, 256)) + ToTensor",
    "rrc": "RandomResizedCrop(224) + flip + ToTensor + Normalize",
}
"""In words."""
LOADERS: tuple[LoaderKind, ...] = get_args(LoaderKind)
LOADER_NAMES: dict[LoaderKind, str] = {
    "thread": "fastload threads",
    "torch": "torch processes",
    "serial": "serial",
}
"""As legends of plots and pages name them, in this order."""
TRACED_STEPS = 4
"""Steps that a timeline shows: the last of a run that is just long enough to be in its stride."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What every run of a benchmark has in common: the samples, their order, and the loop that takes them."""

    file_list: str
    base_dir: str | None = None
    transform: TransformName = "resize"
    batch_size: int = 64
    steps: int = 20
    status_print_interval: int = 5
    step_ms: float = 0.0
    """Milliseconds that a step waits for a simulated accelerator; 0 means that the loop does nothing but load."""
    seed: int = 0
    cache: CacheState = "warm"

    @property
    def samples(self) -> int:
        """Samples that a rank of a run delivers: `steps` full batches, however short the list is."""
        return self.steps * self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measurement: a loader over a workload. Runs over one workload differ in the loader and in nothing else."""

    workload: Workload
    loader: LoaderKind
    workers: int
    """Workers of each rank."""
    ranks: int = 1
    """Processes that load at once on this node, each its part of the order."""
    repeat: int = 0

    @property
    def name(self) -> str:
        """The loader, its workers and its ranks, in words."""
        ranks = "" if self.ranks == 1 else f"{self.ranks} ranks x "
        if self.loader == "serial":
            return f"{ranks}serial"
        kind = "thread" if self.loader == "thread" else "torch process"
        plural = "" if self.workers == 1 else "es" if self.loader == "torch" else "s"
        return f"{ranks}{self.workers} {kind}{plural}"

    @property
    def ordered_samples(self) -> int:
        """Samples that the loader of each rank is given: more than the loop takes.

        A loader that reaches the end of its order stops reading ahead, and what it had read ahead before the measured
        steps then looks like speed. The order is longer than any loader here looks ahead (torch: 2 batches a worker;
        fastload: 2 + workers at most), so the work in flight is the same at the first measured step as at the last.
        """
        ahead_batches = 2 * self.workers + 2 if self.workers else 0
        return self.workload.samples + ahead_batches * self.workload.batch_size

    def to_json(self) -> dict[str, Any]:
        """This run as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The run that `to_json` wrote down."""
        return cls(**{**document, "workload": Workload(**document["workload"])})


def plan_runs(
    workload: Workload,
    *,
    loaders: Sequence[LoaderKind],
    workers: Sequence[int],
    repeats: int,
    ranks: Sequence[int] = (1,),
) -> list[Run]:
    """Every loader with every number of workers (the serial one once) in every number of ranks, `repeats` times.

    The repeats are interleaved. Every second one goes backwards, so that a machine that slowly gets faster or slower
    favours no loader.
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


def traced(run: Run) -> Run:
    """The run to draw a timeline of: as `run`, in one rank, and short."""
    steps = WARMUP_STEPS + TRACED_STEPS
    return replace(run, ranks=1, repeat=0, workload=replace(run.workload, steps=steps))


def rank_order(run: Run, length: int, rank: int) -> list[int]:
    """The indices that a rank's loader is given: its part, by `RankSampler`, of one order over `length` samples.

    Step k of all ranks together is one contiguous piece of that order.
    """
    order = sample_order(length, run.ordered_samples * run.ranks, seed=run.workload.seed)
    part = RankSampler(len(order), rank=rank, world_size=run.ranks, shuffle=False)
    return [order[position] for position in part]


def sample_order(length: int, count: int, *, seed: int) -> list[int]:
    """The first `count` indices of an endless sequence of epochs over `length` samples, each shuffled by `seed`.

    A pure function, and a prefix of every longer order with the same seed: all runs deliver the same samples in the
    same order, and a list that is shorter than the run is begun again only after every sample of it was delivered.
    """
    generator = np.random.default_rng(seed)
    epochs = [generator.permutation(length) for _ in range(math.ceil(count / length))]
    order: list[int] = np.concatenate(epochs)[:count].tolist()
    return order
