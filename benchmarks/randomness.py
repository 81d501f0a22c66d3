"""What a random stream for each sample costs: a data set read in streams, and the same in a plain loop."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms

import fastload
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from fastload.randomness import Stream, StreamKeys, entered

TITLE = "randomness: microseconds per sample that reading in random streams costs, one thread"
REPEATS = 5

CROP = transforms.RandomResizedCrop(224)
PICTURE = Image.new("RGB", (500, 375))


def _nothing(index: int) -> int:
    return index


def _one_draw(index: int) -> float:
    return torch.rand(1).item()


def _crop_and_flip(index: int) -> Any:
    """What RandomResizedCrop and RandomHorizontalFlip draw, without the pixels: about 10 torch calls."""
    box = transforms.RandomResizedCrop.get_params(PICTURE, list(CROP.scale), list(CROP.ratio))
    return box, bool(torch.rand(1) < 0.5)


def _ten_calls(index: int) -> torch.Tensor:
    """Torch calls that draw nothing: each passes through the mode."""
    row = torch.zeros(4)
    for _ in range(9):
        row = row + 1
    return row


def _numpy_draw(index: int) -> float:
    return float(fastload.sample_rng().random())


SAMPLES = {
    "draws nothing": _nothing,
    "one torch.rand": _one_draw,
    "crop and flip of torchvision v1": _crop_and_flip,
    "ten torch calls that do not draw": _ten_calls,
    "one draw of sample_rng()": _numpy_draw,
}


class Drawn(Dataset[Any]):
    """Samples that do nothing else."""

    def __init__(self, name: str) -> None:
        self.sample = SAMPLES[name]

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


class _Place:
    """What a stream is moved over: as a batch, without one."""

    def __init__(self) -> None:
        self.keys = StreamKeys(0, 0)

    def stream_key(self, at: int | None) -> int:
        return self.keys.sample(at or 0, at)


def cases(*, smoke: bool) -> list[Case]:
    return [Case(name, {"name": name, "count": 100 if smoke else 5_000}) for name in SAMPLES]


def measure(*, name: str, count: int) -> Figures:
    dataset = Drawn(name)
    plain_s = streams_s = 0.0
    for _ in range(3):  # taking turns
        began = perf_counter()
        for index in range(count):
            dataset[index]
        plain_s += perf_counter() - began
        stream, place = Stream(), _Place()
        began = perf_counter()
        with entered(stream):
            stream.source = place
            for index in range(count):
                stream.at, stream.stale = index, True
                dataset[index]
        streams_s += perf_counter() - began
    per = 1e6 / (3 * count)
    return {"cost_us": (streams_s - plain_s) * per, "plain_us": plain_s * per}


def rows(results: Results) -> list[Row]:
    aims = {"draws nothing": Aim("<=", 0.2, of="figure")}
    return [row(results, name, "cost_us", unit="us/sample", aim=aims.get(name)) for name in SAMPLES]
