"""A run: N steps over one loader. `run` starts this module in a new process, and does not import it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset
from torchvision import transforms

import fastload
from fastload.bench.figures import BenchError
from fastload.bench.plan import SweepRun, TransformName, sample_order
from fastload.datasets import ImageFileList
from fastload.image import IMAGENET_MEAN, IMAGENET_STD, Plan, RandomResizedCrop, Resize
from fastload.measure.averages import average_line
from fastload.measure.figures import Figures
from fastload.measure.fresh import answer
from fastload.measure.loop_timer import Meter
from fastload.measure.samples import Numbered


def image_transform(name: TransformName) -> Callable[[Any], torch.Tensor]:
    """Return a transform from PIL image to float32[3, H, W], composed of torchvision's transforms (v1)."""
    if name == "resize":
        steps: list[Any] = [transforms.Resize((256, 256)), transforms.ToTensor()]
    else:
        steps = [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(mean=IMAGENET_MEAN, std=IMAGENET_STD),
        ]
    composed: Callable[[Any], torch.Tensor] = transforms.Compose(steps)
    return composed


def image_plan(name: TransformName) -> Plan:
    """Return the plan of the same transform: float32[3, H, W] again, with pixels that docs/images.md compares."""
    if name == "resize":
        return Resize((256, 256), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return RandomResizedCrop(224, flip=0.5, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def open_loader(run: SweepRun, dataset: Dataset[Any], order: list[int]) -> TorchDataLoader[Any]:
    """Return the loader of a run. Two runs over one workload differ in nothing else but a plan."""
    size = run.workload.batch_size
    options: dict[str, Any] = {"sampler": order, "num_workers": run.workers, "drop_last": True}
    if run.loader == "torch":
        return TorchDataLoader(dataset, size, **options)
    method: Any = run.loader if run.loader in ("thread", "process") else "auto"
    return fastload.DataLoader(dataset, size, worker_method=method, **options)


def open_run(run: SweepRun) -> tuple[TorchDataLoader[Any], list[int]]:
    """Return the loader over the files of the run's list, and the indices that it must deliver."""
    work = run.workload
    transform = (image_plan if run.loader == "plan" else image_transform)(work.transform)
    listed = ImageFileList(str(work.file_list), base_dir=work.base_dir, transform=transform)
    order = sample_order(len(listed), run.ordered_samples, seed=work.seed)
    return open_loader(run, Numbered(listed), order), order


def measure(run: SweepRun, say: Callable[[str], None]) -> Figures:
    """Take `steps` batches from the loader of a run, one per step. Pass each line of the run to `say` at once."""
    began = time.monotonic()
    work = run.workload
    loader, order = open_run(run)
    say(f"Batch size: {work.batch_size}")
    say(f"num workers: {run.workers}")
    say("Starting data loader")
    ours = loader if isinstance(loader, fastload.DataLoader) else None
    meter = Meter(None if ours is None else ours.stats, step_ms=work.step_ms)
    batches = iter(loader)
    delivered: list[int] = []
    for number in range(1, work.steps + 1):
        with meter.waiting():
            _images, _targets, indices = next(batches)
        with meter.stepping(len(indices)):
            pass  # A step computes nothing, and only waits.
        delivered += indices.tolist()
        if number % work.status_print_interval == 0:
            say(f"step_img_rate: {meter.window():.2f}")
    measured = meter.end()
    say(average_line(measured.window_rates))
    say("Stopping data loader")
    if ours is not None:
        ours.close()
    del batches  # The last reference: torch's iterator ends its processes here, and waits for them.
    say(f"All Done: {time.monotonic() - began:.2f}")

    if delivered != order[: work.samples]:
        raise BenchError(f"{run.name}: the loader delivered wrong samples or a wrong order")
    return Figures.of(measured, unique_samples=len(set(delivered)))


def _measured(content: Any) -> dict[str, Any]:
    # As in each worker of any loader. Otherwise serial loading alone, on the loop's thread, would have several.
    torch.set_num_threads(1)
    return asdict(measure(SweepRun.from_json(content), partial(print, flush=True)))


if __name__ == "__main__":
    sys.exit(answer(_measured))
