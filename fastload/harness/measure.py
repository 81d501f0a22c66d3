"""One run, in a process of its own: N steps over one loader. Started by `bench.execute`, and not imported by it.

    python -m fastload.harness.measure RUN.json RESULT.json

The run's lines go to standard output; its figures, or one sentence why there are none, to RESULT.json.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset
from torchvision import transforms

import fastload
from fastload.datasets import ImageFileList
from fastload.errors import FastloadError
from fastload.harness.figures import BenchError, Figures, average_line
from fastload.harness.plan import WARMUP_STEPS, Run, TransformName, Workload, sample_order
from fastload.harness.processes import cpu_seconds

Sample = tuple[torch.Tensor, int, int]
Step = Callable[[torch.Tensor, torch.Tensor], None]


class Numbered(Dataset[Sample]):
    """A dataset of pairs whose samples carry their index, so that what arrives can be counted and compared."""

    def __init__(self, dataset: ImageFileList) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        image, target = self._dataset[index]
        return image, target, index

    def locate(self, index: int) -> str:
        """The file of a sample, for the loader's error notes."""
        return self._dataset.locate(index)


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


def open_loader(run: Run, dataset: Dataset[Sample], order: list[int]) -> TorchDataLoader[Any]:
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


def measure(run: Run, say: Callable[[str], None]) -> Figures:
    """Take `steps` batches from the run's loader, a step each; `say` gets the lines of the run as they come."""
    began = time.perf_counter()
    work = run.workload
    transform = image_transform(work.transform)
    listed = ImageFileList(work.file_list, base_dir=work.base_dir, transform=transform)
    order = sample_order(len(listed), run.ordered_samples, seed=work.seed)
    loader = open_loader(run, Numbered(listed), order)
    say(f"Batch size: {work.batch_size}")
    say(f"num workers: {run.workers}")
    say("Starting data loader")
    start = time.perf_counter()
    batches = iter(loader)
    steps = _take_steps(batches, start, work, say)
    say(average_line(steps.window_rates, warmup_steps=WARMUP_STEPS))
    say("Stopping data loader")
    stats = None
    if isinstance(loader, fastload.DataLoader):
        stats = asdict(loader.stats())
        loader.close()
    del batches  # The last reference: torch's iterator ends its processes here, and waits for them.
    closed = time.perf_counter()
    say(f"All Done: {closed - began:.2f}")

    if steps.delivered != order[: work.samples]:
        raise BenchError(f"{run.name}: the loader delivered other samples than it was asked for")
    warm, end = steps.warm, steps.end
    steady_samples, steady_s = (work.steps - WARMUP_STEPS) * work.batch_size, end.at - warm.at
    cpu_s = None if end.cpu is None or warm.cpu is None else end.cpu - warm.cpu
    return Figures(
        rate=steady_samples / steady_s,
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
        loader_stats=stats,
    )


def _take_steps(
    batches: Iterator[Any], start: float, work: Workload, say: Callable[[str], None]
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
            marks[number] = _Mark(time.perf_counter(), waited, cpu_seconds())
    return _Steps(first_batch_s, marks[WARMUP_STEPS], marks[work.steps], window_rates, delivered)


def _end_with_parent() -> None:
    """Ask the kernel to end this process with the one that started it, however that one ends (Linux)."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _sentence(error: Exception) -> str:
    """An error in one line, with its notes. Of an error that torch carried over from a worker, the error itself."""
    text = str(error).strip()
    if "Original Traceback" in text:
        return text.splitlines()[-1]
    return "; ".join([f"{type(error).__name__}: {text}", *getattr(error, "__notes__", ())])


def main(run_path: str, result_path: str) -> int:
    """Measure the run of one file, write the result to the other. 0 if there are figures, 1 if there is an error."""
    _end_with_parent()
    run = Run.from_json(json.loads(Path(run_path).read_text()))
    try:
        result: dict[str, Any] = {
            "figures": asdict(measure(run, lambda line: print(line, flush=True)))
        }
    except Exception as error:
        result = {"error": _sentence(error)}
        if not isinstance(error, FastloadError | OSError):
            traceback.print_exc()
    Path(result_path).write_text(json.dumps(result))
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
