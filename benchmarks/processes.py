"""Promises:
- Worker processes are measured against torch's own, with the same start method and number of workers.
- The hand-over of samples that are ready in memory is measured beside torch's persistent processes, as is pure Python
  under the GIL.

The rates are those of the second to the sixth epoch, with workers that persist. The time to the first batch is that of
new workers. A process sends each batch through shared memory, which a thread need not. Pure Python is the case that
threads lose: only one of them can run it at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks._measure import open_readers, rate, run_epochs
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from benchmarks.images import Photos, sample_images, transform
from fastload.bench.figures import BenchError

TITLE = (
    "processes: 2 worker processes and 2 threads beside torch's 2 processes, forked; second to sixth epoch, and the "
    "first batch of new ones"
)
REPEATS = 7

WORKERS = 2
NAMES = {
    "process": "fastload's processes",
    "thread": "fastload's threads",
    "torch": "torch's processes",
}


class Floats(Dataset[Any]):
    """float32[3, 224, 224], which costs little to make."""

    pixels = torch.zeros(3, 224, 224)

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pixels + index, index


class Bytes(Floats):
    """uint8[784], ready in memory."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rows = torch.zeros(length, 784, dtype=torch.uint8)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], index


class Tokens(Floats):
    """int64[128] of a tokenizer in pure Python, which holds the GIL."""

    text = "the loader reads a sample in its own stream and puts it into the batch " * 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        ids, word = [], 0
        for letter in self.text:
            if letter == " ":
                ids.append(word % 30_000)
                word = index
            else:
                word = (word * 31 + ord(letter)) & 0xFFFF_FFFF
        return torch.tensor(ids[:128]), index


def _photos(length: int) -> Photos:
    return Photos(sample_images(length), transform("crop"))


PHOTOS = "Pillow + torchvision v1"
WORKLOADS: dict[str, tuple[Callable[[int], Dataset[Any]], int, int, float]] = {
    # dataset, samples, batch size, and the aim for the ratio to torch's rate
    "float32[3, 224, 224]": (Floats, 1536, 64, 5.0),
    "uint8[784]": (Bytes, 60_000, 128, 2.0),
    "tokenizer in Python": (Tokens, 4096, 32, 1.0),
    PHOTOS: (_photos, 512, 32, 1.1),
}


def cases(*, smoke: bool) -> list[Case]:
    return [
        Case(
            _name(kind, workload),
            {"kind": kind, "workload": workload, "length": 4 * batch if smoke else length},
        )
        for workload, (_, length, batch, _) in WORKLOADS.items()
        for kind in NAMES
    ]


def measure(*, kind: str, workload: str, length: int) -> Figures:
    torch.manual_seed(0)
    make, _, batch_size, _ = WORKLOADS[workload]
    dataset = make(length)
    with _opened(kind, dataset, batch_size) as loader:
        next(iter(loader))  # what the first use of the classes costs is in no figure
    began = perf_counter()
    with _opened(kind, dataset, batch_size) as loader:
        batches = iter(loader)
        values, indices = next(batches)
        first_s = perf_counter() - began
        expected = torch.stack([torch.as_tensor(dataset[i][0]) for i in indices.tolist()])
        if workload != PHOTOS and not torch.equal(values, expected):
            raise BenchError("a batch has samples that are not those of its indices")
        del batches, values, expected
        epochs = run_epochs(loader, count=6, indices=range(length))
    return {"rate": rate(epochs[1:]), "first_ms": 1000 * first_s}


def _opened(kind: str, dataset: Dataset[Any], batch_size: int) -> Any:
    forked = {} if kind == "thread" else {"multiprocessing_context": "fork"}
    return open_readers(kind, dataset, WORKERS, batch_size=batch_size, shuffle=True, **forked)


def rows(results: Results) -> list[Row]:
    found = []
    for workload, (_, _, _, least) in WORKLOADS.items():
        *ours, theirs = (_name(kind, workload) for kind in NAMES)
        for key, what, unit in (("rate", "", "samples/s"), ("first_ms", "first batch: ", "ms")):
            of = partial(row, results, key=key, unit=unit)
            aims = [Aim(">=", least) if key == "rate" else None, None]  # threads have none
            found += [
                of(name, name=what + name, against=(theirs, key), aim=aim)
                for name, aim in zip(ours, aims, strict=True)
            ]
            found.append(of(theirs, name=what + theirs))
    return found


def _name(kind: str, workload: str) -> str:
    return f"{workload}: {NAMES[kind]}"
