"""Promises:
- What a loader costs a training step beside it is measured, with and without loader threads, and by 1 to 16 readers.
- On a machine with a GPU, what readers do beside it is checked in ten minutes. Without one, the CPU takes its place,
  and the record says so.
- No worker process hangs that is forked while the GPU computes.

`scripts/device-check` runs it. Each case has a limit: one that hangs is killed, and the others run.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import distributed, nn
from torch.multiprocessing import get_start_method, set_start_method, spawn
from torch.utils.data import Dataset, DistributedSampler, default_collate

from benchmarks._data import Photos, sample_images
from benchmarks._measure import READERS, in_turns, open_readers, steady
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from fastload import prefetch_to
from fastload.bench.figures import BenchError
from fastload.bench.loop import image_transform

TITLE = "device: training steps beside readers of Pillow + torchvision v1, copies, forks, two ranks"
REPEATS = 1

KINDS = ("thread", "process", "spread", "torch")
COUNTS = (1, 2, 4, 8, 16)
THERE = "a batch that is on the device"
BATCH, FORKS, RANKS = 16, 1_000, 2


def machine() -> dict[str, str]:
    """Return what the figures are of."""
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    cuda = f", CUDA {torch.version.cuda}" if names else ""
    return {"device": (", ".join(names) or "CPU, not a device") + cuda}


def device(rank: int = 0) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def photos(length: int) -> Photos:
    return Photos(sample_images(32) * (length // 32), image_transform("rrc"))


class Filled(Dataset[Any]):
    """float32[3, 64, 64] that is full of its index."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 64, 64), float(index))


def training(at: torch.device) -> Callable[[Any], torch.Tensor]:
    """Return a training step of a small network, which returns its loss. The loop launches some 200 kernels."""
    width = 64 if at.type == "cuda" else 4
    layers: list[nn.Module] = [nn.Conv2d(3, width, 8, stride=8)]
    for _ in range(6):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    model = nn.Sequential(*layers).to(at)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1] % 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not math.isfinite(loss.item()):  # a loop that logs its loss waits here, too
            raise BenchError("the loss is not finite")
        return loss.detach()

    return step


def cases(*, smoke: bool) -> list[Case]:
    """Return the cases. Their limits add up to less than ten minutes."""
    counts, seconds = (COUNTS[:1], 0.05) if smoke else (COUNTS, 2.0)
    found = [
        Case(_beside(n), {"what": "steps", "readers": n, "seconds": seconds}, limit_s=50)
        for n in counts
    ]
    for what, limit_s, options in (
        ("values", 50, {"seconds": 2 * seconds}),
        ("overlap", 50, {"steps": 2 if smoke else 30}),
        ("forks", 150, {"forks": 6 if smoke else FORKS, "seconds": 120.0}),
        ("ranks", 80, {"samples": 64 if smoke else 1024}),
    ):
        found.append(Case(what, {"what": what, **options}, limit_s=limit_s))
    return found


def measure(*, what: str, **options: Any) -> Figures:
    torch.set_num_threads(1)
    return MEASURES[what](**options)


def measure_steps(readers: int, seconds: float) -> Figures:
    """Return steps a second on one batch, and beside readers of each kind: in two turns, if there is time."""
    at = device()
    step, dataset = training(at), photos(1 << 16)
    batch = [part.to(at) for part in default_collate([dataset[k] for k in range(BATCH)])]

    def rate(kind: str) -> float:
        timed = partial(steady, warm_s=seconds / 4, seconds=seconds, step=step)
        if kind == THERE:
            return timed([batch])[0]
        with open_readers(kind, dataset, readers, processes=2, **_loading()) as loader:
            return timed(prefetch_to(loader, at))[0]

    found: dict[str, list[float]] = {kind: [] for kind in (THERE, *KINDS)}
    began = perf_counter()
    while len(found[THERE]) < 2 and perf_counter() - began < 10 * seconds:
        for kind in list(found)[:: -1 if found[THERE] else 1]:
            found[kind].append(rate(kind))
    return {kind: median(rates) for kind, rates in found.items()}


def _loading(sampler: Any = None) -> dict[str, Any]:
    """Return the arguments of all loaders here. A batch that takes a minute raises, with all stacks of fastload."""
    pinned = {"pin_memory": True} if torch.cuda.is_available() else {}  # torch warns without one
    return {"batch_size": BATCH, "sampler": sampler, "timeout": 60, **pinned}


def measure_values(seconds: float) -> Figures:
    """Check what `prefetch_to` brings while the device computes. Return how many batches were right, by kind."""
    at, figures = device(), {}
    work = torch.rand(2048 if at.type == "cuda" else 64, 2048, device=at)
    expected = float(sum(index * (index // BATCH) for index in range(len(Filled()))) * 3 * 64 * 64)
    for kind in KINDS:
        ends, figures[kind] = perf_counter() + seconds, 0.0
        with open_readers(kind, Filled(), 4, processes=2, **_loading()) as loader:
            if at.type == "cuda" and not all(batch.is_pinned() for batch in loader):
                raise BenchError(f"{kind}: a batch is not pinned")
            while not figures[kind] or perf_counter() < ends:
                total = torch.zeros((), dtype=torch.float64, device=at)
                for number, batch in enumerate(prefetch_to(loader, at, depth=2)):
                    work @ work.T  # so this batch is used after the next ones are copied
                    total += number * batch.double().sum()
                if total.item() != expected:
                    raise BenchError(f"{kind}: batches on the device have wrong values")
                figures[kind] += number + 1
    return figures


def measure_overlap(steps: int) -> Figures:
    """Return the milliseconds of a step with a batch of 38 MB (0.6 on the CPU) that is copied in different ways."""
    at = device()
    gpu = at.type == "cuda"
    work = torch.rand(4096 if gpu else 128, 4096, device=at)
    batch = torch.rand(64 if gpu else 1, 3, 224, 224)
    pinned, there = batch.pin_memory() if gpu else batch, batch.to(at)

    def loop(batches: Any) -> None:
        for each in batches:
            work @ work.T
            each.sum()
        if gpu:
            torch.cuda.synchronize()

    ways = {
        THERE: lambda: loop(repeat(there, steps)),
        "a pinned batch by prefetch_to": lambda: loop(prefetch_to([pinned] * steps, at)),
        "a batch that the loop copies": lambda: loop(each.to(at) for each in [batch] * steps),
    }
    return {name: 1000 * seconds / steps for name, seconds in in_turns(ways, 3).items()}


def measure_forks(forks: int, seconds: float) -> Figures:
    """Fork worker processes while the device computes, and check their batches."""
    at, done, starts = device(), 0, []
    work = torch.rand(4096 if at.type == "cuda" else 64, 4096, device=at)
    ends = perf_counter() + seconds
    while done < forks and perf_counter() < ends:
        product = work @ work.T
        kind, processes = ("spread", 2) if len(starts) % 2 else ("process", 4)
        began = perf_counter()
        with open_readers(kind, Filled(), 4, processes=2, **_loading(range(64))) as loader:
            batches = iter(prefetch_to(loader, at))
            found = [next(batches)]
            starts.append(perf_counter() - began)
            found += batches
        if torch.cat(found)[:, 0, 0, 0].tolist() != list(range(64)) or not product.isfinite().all():
            raise BenchError(
                f"after {done} forks: the batches are wrong, or what the device computed"
            )
        done += processes
    return {"forks": done, "first batch": 1000 * median(starts), "worst": 1000 * max(starts)}


def measure_ranks(samples: int) -> Figures:
    """Train in two ranks with a loader each, and check that they read each sample once in each epoch."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_train_rank, (samples, folder, get_start_method()), nprocs=RANKS)
        figures: Figures = json.loads(Path(folder, "figures").read_text())
    return figures


def _train_rank(rank: int, samples: int, folder: str, method: str) -> None:
    set_start_method(method, force=True)  # of its workers, which `spawn` would spawn too
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    own_gpus = torch.cuda.device_count() >= RANKS
    at = device(rank)
    home = at if own_gpus else torch.device("cpu")
    distributed.init_process_group(
        "nccl" if own_gpus else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=RANKS,
    )
    step, dataset, figures = training(at), photos(samples), {}
    for kind in KINDS:
        counts, began = torch.zeros(samples, device=home), perf_counter()
        sampler = DistributedSampler(dataset, RANKS, rank)
        with open_readers(kind, dataset, 4, processes=2, **_loading(sampler)) as loader:
            for epoch in range(2):
                sampler.set_epoch(epoch)
                for batch in prefetch_to(loader, at):
                    loss = step(batch).to(home)
                    counts[batch[1].to(home)] += 1
                    distributed.all_reduce(loss)
        distributed.all_reduce(counts)
        if not (counts == 2).all():
            raise BenchError(f"{kind}: the ranks did not read each sample once in each epoch")
        figures[kind] = 2 * samples / (perf_counter() - began)
    if rank == 0:
        Path(folder, "figures").write_text(json.dumps(figures))
    distributed.destroy_process_group()


MEASURES: dict[str, Callable[..., Figures]] = {
    "steps": measure_steps,
    "values": measure_values,
    "overlap": measure_overlap,
    "forks": measure_forks,
    "ranks": measure_ranks,
}


def rows(results: Results) -> list[Row]:
    found = []
    units = {"values": ("right batches", None), "ranks": ("samples/s", None)}
    units |= {_beside(readers): ("steps/s", THERE) for readers in COUNTS}
    for case in results:
        of = partial(row, results, case)
        if case == "forks":
            found += [
                of("forks", unit="forks", aim=Aim(">=", FORKS, "figure")),
                of("first batch", unit="ms", name="forks: first batch"),
                of("worst", unit="ms", name="forks: the slowest first batch"),
            ]
        elif case == "overlap":
            ways = "a pinned batch by prefetch_to", "a batch that the loop copies"
            found += [of(way, unit="ms/step", name=way, against=THERE) for way in ways]
        else:
            unit, against = units[case]
            name = "two ranks" if case == "ranks" else case
            found += [
                of(kind, unit=unit, name=f"{name}: {READERS[kind]}", against=against)
                for kind in KINDS
            ]
    return found


def _beside(readers: int) -> str:
    return f"steps beside {readers} reader{'s' * (readers > 1)}"
