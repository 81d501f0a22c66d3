"""The plan of a benchmark, as pure values, which are the options of `fastload bench`. Nothing here opens a file.

torch and numpy are imported by functions, so that `fastload bench --help` does not wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from fastload._kit.options import Count, Option
from fastload._kit.texts import counted
from fastload.measure.options import CacheState, ImageList, LoopOptions
from fastload.measure.repeats import turns

LoaderKind = Literal["serial", "auto", "thread", "process", "torch", "plan"]
TransformName = Literal["resize", "rrc"]
_WORKERS = {"thread": "thread", "process": "process", "torch": "torch process"}


@dataclass(frozen=True, kw_only=True)
class Workload(LoopOptions, ImageList):
    """What all runs of a benchmark have in common: the samples, their order, and the loop that takes them."""

    steps: Annotated[int, Option("-s --nsteps", min=6)] = 20
    """Batches per run. The first 5 are warm-up, and no rate counts them."""
    transform: TransformName = "resize"
    """Transform of the images. resize: Resize((256, 256)) + ToTensor. rrc: RandomResizedCrop(224) + flip + ToTensor +
    Normalize."""
    cache: CacheState = "warm"
    """State of the page cache before each run. warm: the files are in it. cold: the kernel has dropped them."""

    @property
    def samples(self) -> int:
        """Number of samples that a run delivers: `steps` full batches, even if the list is shorter."""
        return self.steps * self.batch_size

    @property
    def step(self) -> str:
        """What the loop does after each batch."""
        if self.step_ms > 0:
            return f"simulated: waits {self.step_ms:g} ms, without an accelerator"
        return "none: the loop only loads"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The configurations that are compared over one workload."""

    loaders: Annotated[tuple[LoaderKind, ...], Option("--loaders NAME,NAME,...")] = (
        "serial",
        "auto",
        "torch",
    )
    """Loaders to measure. serial: fastload without workers. auto: fastload with the workers that it chooses. thread,
    process: fastload with these. torch: torch's DataLoader with worker processes. plan: as auto, with a plan of
    fastload.image in place of torchvision's transforms."""
    workers: Annotated[tuple[Count, ...], Option("--workers N,N,...")] = (1, 2, 4)
    """Numbers of workers to measure with each loader but serial."""
    repeats: Count = 3
    """Runs of each configuration, interleaved. The table shows medians."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One measurement: a loader over a workload. Runs over one workload differ only in the loader, or in its plan."""

    workload: Workload
    loader: LoaderKind
    workers: int
    repeat: int = 0

    @property
    def name(self) -> str:
        """Name of the run: the loader and its workers."""
        if self.loader == "serial":
            return "serial"
        kind = _WORKERS.get(self.loader, "worker")
        return counted(self.workers, kind) + ", plan" * (self.loader == "plan")

    @property
    def ordered_samples(self) -> int:
        """Number of samples in the order of the loader: more than the loop takes.

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


def plan_runs(workload: Workload, sweep: Sweep) -> list[SweepRun]:
    """Return runs of each loader with each number of workers, `repeats` times. Serial loading has no workers.

    The repeats are interleaved.
    """
    once = [
        (loader, count)
        for loader in sweep.loaders
        for count in ((0,) if loader == "serial" else sweep.workers)
    ]
    return [
        SweepRun(workload=workload, loader=loader, workers=count, repeat=repeat)
        for repeat, (loader, count) in turns(once, sweep.repeats)
    ]


def sample_order(length: int, count: int, *, seed: int) -> list[int]:
    """Return the first `count` indices of an endless sequence of epochs over `length` samples, shuffled by `seed`.

    This is a pure function, and its result is a prefix of every longer order with the same seed. So all runs deliver
    the same samples in the same order. If the list is shorter than a run, it starts again after its last sample.
    """
    import numpy as np

    generator = np.random.default_rng(seed)
    epochs = [generator.permutation(length) for _ in range(math.ceil(count / length))]
    order: list[int] = np.concatenate(epochs)[:count].tolist()
    return order
