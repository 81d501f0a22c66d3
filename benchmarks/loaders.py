"""Promises:
- The rate of unmodified Pillow and torchvision datasets with two workers is measured against torch's best.
- Reads that wait run at 0.9 of workers / latency, for up to 64 workers. The first batch comes within
  1.2 x ceil(batch / workers) reads + 10 ms.
- The cost of the loader itself is measured by small samples that are ready in memory, without workers, against torch's.
- The rate of a TensorDataset is measured against plain indexing, and is never below torch's best.
- The dataset is not copied for threads. Memory and threads are measured for 1, 8 and 32 workers on a million objects,
  beside fork and spawn.
- A slow `collate_fn` is no bottleneck: several batches are read and collated at once.
- The time to start and to stop 64 threads is measured, with samples that cost nothing.
- The first batch of 2 workers is measured for threads, forks and a fork server, beside torch's default, and the import.
- Worker processes are measured against torch's own, with the same start method and number of workers.
- The hand-over of samples that are ready in memory is measured beside torch's persistent processes, as is pure Python
  under the GIL.
- What readers cost a training step of many small operations is measured, by kind.

Each section is a benchmark: kinds of work, and the loaders that each of them is read by.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, RandomSampler

from benchmarks import _data as data
from benchmarks._measure import READERS, NotMeasuredError, open_readers, rate, run_epochs, steady
from benchmarks._report import Aim, Figures, Results, Row, best, row
from benchmarks._run import Case
from fastload.bench.figures import BenchError
from fastload.bench.loop import image_transform
from fastload.measure.page_cache import prepare_cache
from fastload.measure.processes import descendants, tree_memory

SMOKE_LENGTH, SMOKE_WORKERS = 80, 4
SPAWNED_BYTES = 2**29
"""What to have free for each spawned process: an interpreter with torch, the strings, and those once more, pickled."""
READ_S = 0.020
LATENCY, COLLATE = "workers / latency", "workers / (read + collate)"
FIRST = "1.2 x ceil(batch / workers) reads + 10 ms"
ALONE = "the same step alone"
IDEALS = (LATENCY, COLLATE, FIRST, ALONE)
OPERATIONS, STEPS_S = 2_000, 3.0
IMPORT = "from time import perf_counter; t = perf_counter(); import NAME; print(perf_counter() - t)"
UNCHECKED = (data.Photos, data.Slow)
"""Datasets whose samples differ from read to read, or are slow."""


SERIAL = {"auto": "fastload, serial", "torch": "torch, serial", "plain": "plain indexing"}


class Loader(NamedTuple):
    """Readers of a kind in READERS, or "plain": a loop that indexes tensors, and no loader."""

    kind: str
    workers: int
    how: str = ""
    """How processes start; or "batched", for a BatchSampler as sampler: torch then indexes the tensors once a batch."""

    @property
    def name(self) -> str:
        readers = f"{READERS.get(self.kind)}, {self.workers}" if self.workers else SERIAL[self.kind]
        return f"{readers}, {self.how}" if self.how else readers


def loaders(text: str) -> list[Loader]:
    """Return the loaders that a text lists: kind, number of workers, and how, with commas between them."""
    return [Loader(kind, int(n), *how) for kind, n, *how in map(str.split, text.split(","))]


@dataclass(frozen=True)
class Work:
    """What is read."""

    make: Callable[[int], Any]
    batch_size: int
    length: int
    """Samples. If they take simulated seconds, for each worker."""
    epochs: int = 1
    """The first one counts only if there are no others."""
    part: int = 1
    """An epoch reads the samples divided by this number."""
    seconds: float = 0.0
    """Simulated time of a sample."""
    collate: Callable[[Any], Any] | None = None

    def of(self, it: Loader) -> int:
        return self.length * max(1, it.workers) if self.seconds else self.length


@dataclass(frozen=True)
class Shown:
    """A figure that has a row for each loader."""

    key: str
    unit: str
    against: str | None = None
    """One of IDEALS; "plain"; "torch": each of torch's with as many workers; or "best": of torch's."""
    aims: tuple[Aim, ...] = ()
    """For each work, of the loaders of the first one's kind."""


@dataclass
class Section:
    """A benchmark."""

    TITLE: str
    REPEATS: int
    works: dict[str, Work]
    loaders: list[Loader]
    shown: list[Shown]

    def cases(self, *, smoke: bool) -> list[Case]:
        return [
            Case(
                self._name(work, it),
                {**it._asdict(), "work": work, "length": SMOKE_LENGTH if smoke else do.of(it)},
                watch_memory=self._shows("peak_mib"),
            )
            for work, do in self.works.items()
            for it in self.loaders
            if not smoke or it.workers <= SMOKE_WORKERS
        ]

    def measure(self, *, work: str, length: int, **loader: Any) -> Figures:
        it, do = Loader(**loader), self.works[work]
        if it.how == "spawn" and (free := available_bytes()) < it.workers * SPAWNED_BYTES:
            raise NotMeasuredError(
                f"{it.workers} spawned processes may take {it.workers / 2:.0f} GiB, "
                f"of which {free / 2**30:.0f} are free"
            )
        torch.manual_seed(0)
        dataset = do.make(length)
        indices = torch.randperm(length)[: length // do.part].tolist()
        options: dict[str, Any] = {"batch_size": do.batch_size, "collate_fn": do.collate}
        options |= {"shuffle": True} if do.part == 1 else {"sampler": indices}
        if it.how == "batched":
            sampler = BatchSampler(RandomSampler(dataset), do.batch_size, drop_last=False)
            options = {"batch_size": None, "sampler": sampler}
        elif it.how:
            options["multiprocessing_context"] = it.how
        opened: Callable[[], Any] = partial(open_readers, it.kind, dataset, it.workers, **options)
        if it.kind == "plain":
            opened = partial(nullcontext, Plain(dataset, do.batch_size))
        if self._shows("step"):
            return _steps(opened, STEPS_S if length > SMOKE_LENGTH else 0.1)
        figures = _starts(opened) if self._shows("second loader") else {}
        if self._shows("import"):
            package = "torch" if it.kind == "torch" else "fastload"
            python = [sys.executable, "-c", IMPORT.replace("NAME", package)]
            figures["import"] = 1000 * float(subprocess.check_output(python))
        with opened() as batches:
            epochs = run_epochs(batches, count=do.epochs, indices=indices)
            figures["peak_mib"] = (tree_memory(os.getpid()) or 0) / 2**20
            tree = [os.getpid(), *descendants(os.getpid())]
            figures["threads"] = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in tree)
            if not isinstance(dataset, UNCHECKED):
                check(batches, dataset)
        figures["rate"] = rate(epochs[1:] or epochs)
        figures["first batch"] = 1000 * epochs[0].first_batch_s
        if do.seconds:
            figures[LATENCY] = figures[COLLATE] = it.workers / do.seconds
            figures[FIRST] = 1200 * math.ceil(do.batch_size / it.workers) * do.seconds + 10
        return figures

    def rows(self, results: Results) -> list[Row]:
        found = []
        for number, work in enumerate(self.works):
            names = {it: name for it in self.loaders if (name := self._name(work, it)) in results}
            for shown in self.shown:
                what = "" if shown.key == "rate" else f"{shown.key}: "
                for it, name in names.items():
                    judged = shown.aims and it.kind == self.loaders[0].kind
                    aim = shown.aims[number] if judged else None
                    of = partial(row, results, name, shown.key, unit=shown.unit, name=what + name)
                    for against, reference in _references(shown, it, names, results):
                        found.append(of(against=against, reference=reference, aim=aim))
        return found

    def _shows(self, key: str) -> bool:
        return any(shown.key == key for shown in self.shown)

    def _name(self, work: str, it: Loader) -> str:
        return f"{work}: {it.name}" if work else it.name


def _references(shown: Shown, it: Loader, names: dict[Loader, str], results: Results) -> list[Any]:
    """Return what a figure is compared with, and what that is called: nothing, one figure or several."""
    if shown.against in IDEALS:
        return [(shown.against, None)]
    if it.kind in ("torch", "plain") or shown.against is None:
        return [(None, None)] * (shown.against != "plain")  # they have rows of their own once
    if shown.against == "best":
        theirs = [names[other] for other in names if other.kind == "torch"]
        return [((best(results, theirs, shown.key), shown.key), "torch's best")]
    theirs = [
        name
        for other, name in names.items()
        if other.kind == shown.against and (other.kind == "plain" or other.workers == it.workers)
    ]
    return [((name, shown.key), None) for name in theirs]


def _starts(opened: Callable[[], Any]) -> Figures:
    """Return milliseconds to the first batch of two loaders, and of closing the second with work in flight."""
    figures: Figures = {}
    for which in ("first loader", "second loader"):
        with opened() as loader:
            began = perf_counter()
            next(iter(loader))
            arrived = perf_counter()
        del loader  # with the last reference, torch ends its processes, and waits for them
        figures |= {which: 1000 * (arrived - began), "close": 1000 * (perf_counter() - arrived)}
    return figures


def _steps(opened: Callable[[], Any], seconds: float) -> Figures:
    """Return milliseconds of a step that launches small operations from Python: beside readers, and alone."""
    x = torch.zeros(8)

    def step(batch: Any) -> None:
        for _ in range(OPERATIONS):
            x.add_(1.0)

    _, alone_s = steady([None], warm_s=seconds / 6, seconds=seconds / 3, step=step)
    with opened() as loader:
        per_s, step_s = steady(loader, warm_s=seconds / 3, seconds=seconds, step=step)
    return {"step": 1000 * step_s, ALONE: 1000 * alone_s, "rate": per_s}


def check(batches: Any, dataset: Any) -> None:
    """Raise BenchError if a batch is not the samples of its indices."""
    values, indices = next(iter(batches))
    expected = [torch.as_tensor(dataset[index][0]) for index in indices.tolist()]
    if not torch.equal(values, torch.stack(expected)):
        raise BenchError("a batch has samples that are not those of its indices")


def available_bytes() -> int:
    """Return the memory that this machine could give without swapping, or the container as far as it is limited."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    machine = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    if not limit.exists() or limit.read_text().strip() == "max":
        return machine
    return min(machine, int(limit.read_text()) - int(used.read_text()))


class Plain:
    """The loop that needs no loader: a permuted index, and the tensors indexed with pieces of it."""

    def __init__(self, dataset: Any, batch_size: int) -> None:
        self.tensors, self.batch_size = dataset.tensors, batch_size

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for rows in torch.randperm(len(self.tensors[0])).split(self.batch_size):
            yield [tensor[rows] for tensor in self.tensors]


def slow_collate(samples: list[Any]) -> torch.Tensor:
    """Return int64[B] of the indices, after a simulated 5 ms per sample in which others can run."""
    time.sleep(READ_S / 4 * len(samples))
    return torch.tensor(samples)


def photos(length: int) -> data.Photos:
    paths = data.sample_images(length)
    prepare_cache(paths, "warm")
    return data.Photos(paths, image_transform("rrc"))


SECTIONS = {
    "images": Section(
        "images: JPEG, Pillow + torchvision v1 (RandomResizedCrop, flip, ToTensor, Normalize), batches of 64; second "
        "epoch, files in the page cache",
        5,
        {"": Work(photos, 64, 2048, epochs=2)},
        loaders("auto 2, process 2, thread 2, torch 0, torch 2"),
        [Shown("rate", "img/s", "best", (Aim(">=", 1.15),))],
    ),
    "latency": Section(
        "latency: simulated reads of 20 ms, batches of 64; one epoch from iter(), starting the workers included",
        3,
        {"": Work(partial(data.Slow, seconds=READ_S), 64, 128, seconds=READ_S)},
        [*(Loader("thread", 2**n) for n in range(7)), *loaders("auto 8, torch 2, torch 8")],
        [
            Shown("rate", "samples/s", LATENCY, (Aim(">=", 0.9),)),
            Shown("first batch", "ms", FIRST, (Aim("<=", 1),)),
        ],
    ),
    "tensor_dataset": Section(
        "tensor_dataset: 60,000 x uint8[784] and labels, batches of 128, shuffled; second to sixth epoch",
        5,
        {"": Work(data.pixels, 128, 60_000, epochs=6)},
        loaders("auto 0, auto 2, thread 2, torch 0, torch 2, torch 0 batched, plain 0"),
        [
            Shown("rate", "samples/s", "plain", (Aim(">=", 0.8),)),
            Shown("rate", "samples/s", "best", (Aim(">=", 1),)),
        ],
    ),
    "small": Section(
        "small: samples of 16 float32 and a number, made beforehand; no workers, shuffled; second to sixth epoch",
        5,
        {
            f"{name}, batches of {size}": Work(make, size, 10_000, epochs=6)
            for name, make in (("tensors", data.Ready), ("arrays", data.Arrays))
            for size in (32, 128)
        },
        loaders("auto 0, torch 0"),
        [Shown("rate", "samples/s", "torch", (Aim(">=", 1),) * 4)],
    ),
    "memory": Section(
        "memory: a dataset of a million strings, a quarter of them read in random order, batches of 64",
        3,
        {"": Work(data.FileNames, 64, 1_000_000, part=4)},
        loaders(
            ", ".join(f"auto {n}, thread {n}, torch {n} fork, torch {n} spawn" for n in (1, 8, 32))
        ),
        [
            Shown("first batch", "ms", "torch"),
            Shown("peak_mib", "MiB", "torch"),
            Shown("threads", ""),
        ],
    ),
    "collate": Section(
        "collate: simulated reads of 5 ms, a collate_fn that waits as long as the batch's; 4 workers, batches of 16",
        3,
        {"": Work(partial(data.Slow, seconds=READ_S / 4), 16, 256, 1, 1, READ_S / 2, slow_collate)},
        loaders("thread 4, torch 4"),
        [Shown("rate", "samples/s", COLLATE, (Aim(">=", 0.9),))],
    ),
    "thread_cost": Section(
        "thread_cost: milliseconds to the first batch of 64, and of closing with work in flight; samples in memory",
        5,
        {"": Work(data.Ready, 64, 6400)},
        loaders(
            "thread 64, torch 64, auto 2, thread 2, process 2 forkserver, torch 2, torch 2 forkserver"
        ),
        [
            Shown("first loader", "ms", "torch"),
            Shown("second loader", "ms", "torch"),
            Shown("close", "ms", "torch", (Aim("<=", 500, of="figure"),)),
            Shown("import", "ms"),
        ],
    ),
    "processes": Section(
        "processes: the default, 2 processes and 2 threads beside torch's 2 processes, forked; second epoch, first "
        "batch of new ones",
        7,
        {
            "float32[3, 224, 224]": Work(data.Floats, 64, 4608, epochs=2),
            "uint8[784]": Work(data.Bytes, 128, 180_000, epochs=2),
            "tokenizer in Python": Work(data.Tokens, 32, 12_288, epochs=2),
        },
        loaders("process 2 fork, auto 2, thread 2, torch 2 fork"),
        [
            Shown("rate", "samples/s", "torch", tuple(Aim(">=", x) for x in (5, 2, 1))),
            Shown("second loader", "ms", "torch"),
        ],
    ),
    "step": Section(
        f"step: a step of {OPERATIONS:,} small operations beside 2 readers of Pillow + torchvision v1, batches of 8",
        3,
        {"": Work(photos, 8, 2048)},
        loaders("auto 2, thread 2, torch 2"),
        [Shown("step", "ms", ALONE, (Aim("<=", 1.05),))],
    ),
}
