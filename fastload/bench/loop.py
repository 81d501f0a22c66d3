"""One rank of a run: N steps over one loader. `run` starts it in a fresh process, and does not import it."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset
from torchvision import transforms

import fastload
from fastload.bench.figures import BenchError, Figures, Part, average_line
from fastload.bench.plan import Run, TransformName, Workload, rank_order
from fastload.datasets import ImageFileList
from fastload.measure import WARMUP_STEPS
from fastload.measure.fresh import answer
from fastload.measure.processes import cpu_seconds
from fastload.measure.run_stats import RunStats
from fastload.measure.samples import Numbered
from fastload.telemetry.diagnosis import bound

Step = Callable[[torch.Tensor, torch.Tensor], None]


def image_transform(name: TransformName) -> Callable[[Any], torch.Tensor]:
    """PIL image -> float32[3, H, W]: torchvision's own transforms (v1), as a user would compose them."""
    if name == "resize":
        steps: list[Any] = [transforms.Resize((256, 256)), transforms.ToTensor()]
    else:
        steps = [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        ]
    composed: Callable[[Any], torch.Tensor] = transforms.Compose(steps)
    return composed


def open_loader(run: Run, dataset: Dataset[Any], order: list[int]) -> TorchDataLoader[Any]:
    """The loader of a run: the only thing in which two runs over one workload differ."""
    kind = TorchDataLoader if run.loader == "torch" else fastload.DataLoader
    return kind(
        dataset, run.workload.batch_size, sampler=order, num_workers=run.workers, drop_last=True
    )


def simulated_step(step_ms: float) -> Step:
    """A training step that only waits, as the loop does while an accelerator computes; 0 ms does nothing at all."""

    def wait(images: torch.Tensor, targets: torch.Tensor) -> None:
        time.sleep(step_ms / 1000)

    def nothing(images: torch.Tensor, targets: torch.Tensor) -> None:
        return

    return wait if step_ms > 0 else nothing


@dataclass(frozen=True, slots=True)
class _Mark:
    """A moment of the loop, with what had added up by then."""

    at: float
    clock: float
    """The same moment on the clock that all processes share."""
    waited: float
    cpu: float | None


@dataclass(frozen=True, slots=True)
class _Steps:
    """What the loop saw."""

    first_batch_s: float
    warm: _Mark
    """The end of the warm-up."""
    end: _Mark
    """The end of the last step."""
    window_rates: list[float]
    delivered: list[int]


def open_run(run: Run, rank: int = 0) -> tuple[TorchDataLoader[Any], list[int]]:
    """The loader of a rank over the files of the run's list, and the indices that it is to give."""
    work = run.workload
    transform = image_transform(work.transform)
    listed = ImageFileList(work.file_list, base_dir=work.base_dir, transform=transform)
    order = rank_order(run, len(listed), rank)
    return open_loader(run, Numbered(listed), order), order


def measure(
    run: Run,
    say: Callable[[str], None],
    *,
    rank: int = 0,
    barrier: Callable[[], None] = lambda: None,
) -> Part:
    """Take `steps` batches from a rank's loader, a step each; `say` gets the lines of the run as they come.

    `barrier` is called when all is ready, and returns when the loading is to start.
    """
    began = time.perf_counter()
    work = run.workload
    loader, order = open_run(run, rank)
    say(f"Batch size: {work.batch_size}")
    say(f"num workers: {run.workers}")
    if run.ranks > 1:
        say(f"ranks: {run.ranks} on this node; the rates below are of rank {rank} alone")
    say("Starting data loader")
    barrier()
    start = time.perf_counter()
    batches = iter(loader)
    run_stats = RunStats(loader.stats) if isinstance(loader, fastload.DataLoader) else None
    steps = _take_steps(batches, start, work, say, run_stats)
    say(average_line(steps.window_rates, warmup_steps=WARMUP_STEPS))
    say("Stopping data loader")
    stats = steady = None
    if isinstance(loader, fastload.DataLoader) and run_stats is not None:
        stats, steady = loader.stats(), run_stats.now()
        loader.close()
    del batches  # The last reference: torch's iterator ends its processes here, and waits for them.
    closed = time.perf_counter()
    say(f"All Done: {closed - began:.2f}")

    if steps.delivered != order[: work.samples]:
        raise BenchError(f"{run.name}: the loader delivered other samples than it was asked for")
    warm, end = steps.warm, steps.end
    steady_samples, steady_s = (work.steps - WARMUP_STEPS) * work.batch_size, end.at - warm.at
    cpu_s = None if end.cpu is None or warm.cpu is None else end.cpu - warm.cpu
    figures = Figures(
        rate=steady_samples / steady_s,
        rank_rates=[steady_samples / steady_s],
        window_rates=steps.window_rates,
        first_batch_s=steps.first_batch_s,
        steady_s=steady_s,
        wait_share=(end.waited - warm.waited) / steady_s,
        cpu_s_per_1000=None if cpu_s is None else cpu_s * 1000 / steady_samples,
        total_s=end.at - start,
        close_s=closed - end.at,
        samples=len(steps.delivered),
        unique_samples=len(set(steps.delivered)),
        intraop_threads=torch.get_num_threads(),
        start_method=multiprocessing.get_start_method() if run.loader == "torch" else None,
        loader_stats=None if stats is None else asdict(stats),
        finding=None if steady is None else bound(steady).sentence,
    )
    return Part(
        figures=figures,
        steady_from_s=warm.clock,
        steady_to_s=end.clock,
        delivered=steps.delivered,
    )


def _take_steps(
    batches: Iterator[Any],
    start: float,
    work: Workload,
    say: Callable[[str], None],
    run_stats: RunStats | None,
) -> _Steps:
    """The loop of a training script; `start` is when `iter()` was called."""
    step = simulated_step(work.step_ms)
    delivered: list[int] = []
    window_rates: list[float] = []
    waited = first_batch_s = 0.0
    window_start = start
    marks: dict[int, _Mark] = {}
    for number in range(1, work.steps + 1):
        asked = time.perf_counter()
        images, targets, indices = next(batches)
        arrived = time.perf_counter()
        waited += arrived - asked
        first_batch_s = first_batch_s or arrived - start
        step(images, targets)
        delivered += indices.tolist()
        if number % work.status_print_interval == 0:
            now = time.perf_counter()
            rate = work.status_print_interval * work.batch_size / (now - window_start)
            window_start = now
            say(f"step_img_rate: {rate:.2f}")
            if number > WARMUP_STEPS:  # the rule of the tutorial whose lines these are
                window_rates.append(rate)
        if number in (WARMUP_STEPS, work.steps):
            if number == WARMUP_STEPS and run_stats is not None:
                run_stats.begin()
            marks[number] = _Mark(time.perf_counter(), time.monotonic(), waited, cpu_seconds())
    return _Steps(first_batch_s, marks[WARMUP_STEPS], marks[work.steps], window_rates, delivered)


def _rank(content: Any, rank: int, barrier: Callable[[], None]) -> dict[str, Any]:
    say = partial(print, flush=True)
    return asdict(measure(Run.from_json(content), say, rank=rank, barrier=barrier))


if __name__ == "__main__":
    sys.exit(answer(_rank))
