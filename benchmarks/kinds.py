"""Promises:
- The default reads as fast as the best kind of workers, once it has measured one loader, and faster than torch.
- A training step of many small operations takes no longer beside the default than beside torch's processes.

The matrix of work x workers x step. A step of operations stands for a loop that launches kernels from Python: each
operation releases the GIL. A wait without the GIL stands for one that waits for its device. Run it by name, on a quiet
machine: it takes half an hour.
"""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from benchmarks._data import Photos, Slow, sample_images
from benchmarks._measure import NotMeasuredError, open_readers, steady
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from fastload.bench.loop import image_transform
from fastload.engine import choice
from fastload.measure.repeats import turns

TITLE = "kinds of workers: the default beside each kind and torch, steps a second; beside a step of small operations"
REPEATS = 2

KINDS = ("first", "auto", "thread", "process", "spread", "none", "torch")
"""The default before it has measured anything, and after; processes with one worker each, and one process."""
WARM_S, MEASURED_S, TURNS = 0.6, 1.2, 2


class Rows(Dataset[Any]):
    """Samples of an index, by a function."""

    def __init__(self, length: int = 100_000) -> None:
        self.length = length
        self.data = np.random.default_rng(0).random((64, 3, 64, 64), dtype=np.float32)
        self.words = [
            "the loader reads a sample in its own stream",
            "and puts it into the batch",
        ] * 32

    def __len__(self) -> int:
        return self.length


class Loops(Rows):
    """Pure Python: some 70 ns for each turn of a loop."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.turns = turns

    def __getitem__(self, index: int) -> int:
        total = 0
        for k in range(self.turns):
            total += k ^ index
        return total


class Floats(Rows):
    """One operation of NumPy on 48 KB of float32."""

    def __getitem__(self, index: int) -> Any:
        return self.data[index % 64] * 2


class Tokens(Rows):
    """A tokenizer in Python with a dict of words."""

    def __getitem__(self, index: int) -> Any:
        text = self.words[index % 64] * 8
        ids = [hash(word) % 30_000 for word in text.split(" ")]
        return torch.tensor((ids + [0] * 128)[:128])


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise NotMeasuredError(f"{name} is not installed") from error


class Tokenized(Rows):
    """Text by the library `tokenizers`."""

    def __init__(self) -> None:
        super().__init__()
        library = _library("tokenizers")
        words = {word: k for k, word in enumerate(" ".join(self.words).split())}
        self.tokenizer = library.Tokenizer(
            library.models.WordLevel({**words, "[UNK]": 999}, "[UNK]")
        )
        self.tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()

    def __getitem__(self, index: int) -> Any:
        ids = self.tokenizer.encode(self.words[index % 64] * 8).ids
        return torch.tensor((ids + [0] * 128)[:128])


def hub_text() -> Any:
    words = Rows().words
    texts = {"text": words * 256, "label": list(range(256 * len(words)))}
    return _library("datasets").Dataset.from_dict(texts)


def parquet() -> Any:
    from fastload.datasets import ParquetDataset

    arrow, path = _library("pyarrow"), Path(tempfile.mkdtemp(dir="/dev/shm"), "rows.parquet")
    atexit.register(shutil.rmtree, path.parent)
    numbers = np.random.default_rng(0).random((65_536, 8))
    table = arrow.table({f"c{k}": column for k, column in enumerate(numbers.T)})
    import_module("pyarrow.parquet").write_table(table, path, row_group_size=4096)
    return ParquetDataset(path)


class Library(Rows):
    """A transform of a library that may be missing."""

    def __init__(self, name: str) -> None:
        super().__init__()
        library = _library(name)
        if name == "albumentations":
            crop = library.Compose([library.RandomCrop(48, 48), library.HorizontalFlip()])
            self.read: Callable[[Any], Any] = lambda x: crop(image=x.transpose(1, 2, 0))["image"]
        else:
            zoom = library.transforms.RandZoom(prob=1.0, min_zoom=0.9, max_zoom=1.1)
            self.read = lambda x: torch.as_tensor(np.asarray(zoom(x)))

    def __getitem__(self, index: int) -> Any:
        return self.read(self.data[index % 64])


class Volumes(Dataset[Any]):
    """Rows of an HDF5 file, opened at the first sample."""

    def __init__(self, folder: str) -> None:
        self.h5py = _library("h5py")
        self.path, self.file = f"{folder}/rows.h5", None
        with self.h5py.File(self.path, "w") as file:
            file["x"] = np.random.default_rng(0).random((4096, 4096), dtype=np.float32)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = self.h5py.File(self.path)
        return self.file["x"][index]


def plans() -> Any:
    from fastload.datasets import ImageFileList
    from fastload.image import RandomResizedCrop

    folder = next(p for p in Path(sample_images(512)[0]).parents if (p / "filelist.txt").exists())
    return ImageFileList(folder / "filelist.txt", transform=RandomResizedCrop(224))


WORK: dict[str, tuple[Callable[[], Any], int]] = {
    "pure Python, 1 ms": (lambda: Loops(14_000), 8),
    "pure Python, 10 us": (lambda: Loops(140), 64),
    "Pillow + v1": (lambda: Photos(sample_images(512) * 20, image_transform("rrc")), 8),
    "float32 images": (Floats, 32),
    "tokens in Python": (Tokens, 32),
    "waits of 20 ms": (lambda: Slow(4096, seconds=0.020), 8),
    "tensors": (lambda: TensorDataset(torch.zeros(16_384, 784), torch.zeros(16_384)), 128),
    "image plans": (plans, 32),
    "albumentations": (lambda: Library("albumentations"), 32),
    "MONAI": (lambda: Library("monai"), 32),
    "HDF5 rows": (lambda: Volumes("/dev/shm"), 32),
    "tokenizers": (Tokenized, 32),
    "text of Hugging Face": (hub_text, 32),
    "Parquet rows": (parquet, 32),
}
CELLS = [(2, 0, 0.0), (8, 0, 0.0), (2, 3_000, 0.0), (2, 0, 0.005)]
"""Workers, operations in a step, and the seconds of its wait."""
STEPS = [(1, 3_000, 0.0), (8, 3_000, 0.0)]
"""Beside which a training step is measured with other numbers of readers."""


def cases(*, smoke: bool) -> list[Case]:
    return [
        Case(
            _name(work, *cell),
            {
                "work": work,
                "workers": cell[0],
                "operations": cell[1],
                "wait_s": cell[2],
                "smoke": smoke,
            },
        )
        for work in WORK
        for cell in (CELLS[:1] if smoke else CELLS + STEPS * (work == "Pillow + v1"))
        if not smoke or work in ("pure Python, 10 us", "waits of 20 ms")
    ]


def measure(*, work: str, workers: int, operations: int, wait_s: float, smoke: bool) -> Figures:
    torch.set_num_threads(1)
    make, batch_size = WORK[work]
    given = {"dataset": make(), "readers": workers, "batch_size": batch_size, "shuffle": True}
    warm_s, seconds = (0.0, 0.1) if smoke else (WARM_S, MEASURED_S)
    timed = partial(
        steady,
        warm_s=warm_s,
        seconds=seconds,
        step=partial(_step, torch.zeros(8), operations, wait_s),
    )
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _, kind in turns(KINDS, 1 if smoke else TURNS):
        if kind in ("first", "auto"):
            choice.forget()
        if kind == "auto":
            with open_readers("auto", **given) as loader:
                timed(loader)
        with open_readers({"first": "auto"}.get(kind, kind), processes=1, **given) as loader:
            found[kind].append(timed(loader))
        time.sleep(0.05)  # torch's workers end
    medians = {kind: median(rate for rate, _ in taken) for kind, taken in found.items()}
    step_s = {kind: median(seconds for _, seconds in taken) for kind, taken in found.items()}
    best = max(rate for kind, rate in medians.items() if kind not in ("first", "auto"))
    return {
        **medians,
        "of best": medians["auto"] / best,
        "of torch": medians["auto"] / medians["torch"],
        "first of torch": medians["first"] / medians["torch"],
        "near": float(medians["auto"] >= 0.9 * best),
        "step of torch": step_s["auto"] / max(step_s["torch"], 1e-9) if operations else math.nan,
    }


def _step(x: torch.Tensor, operations: int, wait_s: float, batch: Any) -> None:
    for _ in range(operations):
        x.add_(1.0)
    if wait_s:
        time.sleep(wait_s)


def rows(results: Results) -> list[Row]:
    found = []
    shares: dict[str, list[float]] = {"of best": [], "of torch": [], "first of torch": []}
    near: list[float] = []
    for case, repeats in results.items():
        of = partial(row, results, case)
        found.append(of("auto", unit="steps/s", against="torch", reference="torch"))
        found.append(of("of best", unit="", name=f"{case}: of the best kind"))
        if "3000" in case:
            aim = Aim("<=", 1.05, of="figure")
            found.append(of("step of torch", unit="", name=f"{case}: step", aim=aim))
        for figures in (x for x in repeats if x is not None):
            near.append(figures["near"])
            for key, values in shares.items():
                values.append(figures[key])
    for key, least in (("of best", 0.97), ("of torch", 1.1), ("first of torch", 1.0)):
        if shares[key]:
            mean = math.exp(sum(map(math.log, shares[key])) / len(shares[key]))
            name, aim = f"default, {key}: geometric mean", Aim(">=", least, of="figure")
            found.append(row({name: [{key: mean}]}, name, key, unit="", aim=aim))
    if near:
        name = "default within 10 % of the best kind: share of cells"
        share = sum(near) / len(near)
        found.append(
            row({name: [{"share": share}]}, name, "share", unit="", aim=Aim(">=", 0.9, of="figure"))
        )
    return found


def _name(work: str, workers: int, operations: int, wait_s: float) -> str:
    step = f"a wait of {1000 * wait_s:g} ms" if wait_s else f"{operations} operations"
    return f"{work}; {workers} workers; {step}"
