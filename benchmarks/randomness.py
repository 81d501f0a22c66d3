"""Promise: The cost per sample of a random stream is measured, for each kind of generator, used and unused.

A dataset is read in streams, and the same in a plain loop.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import fastload
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from fastload.random.held import Keyed
from fastload.random.keys import StreamKeys
from fastload.random.streams import MODULES, Stream, entered, routable

TITLE = "randomness: microseconds per sample that reading in random streams costs, one thread"
REPEATS = 5


def _nothing(index: int) -> int:
    return index


def _one_draw(index: int) -> float:
    return torch.rand(1).item()


def _numpy_draw(index: int) -> float:
    return float(fastload.sample_rng().random())


def _random_draw(index: int) -> float:
    return random.random()


def _global_numpy_draw(index: int) -> float:
    return float(np.random.rand())


Held = tuple[Callable[[], Any], Callable[[Any], Any]]
HELD: dict[str, Held] = {
    "RandomState": (lambda: np.random.RandomState(0), lambda g: g.rand()),
    "Generator (PCG64)": (lambda: np.random.default_rng(0), lambda g: g.random()),
    "Generator (Philox)": (lambda: np.random.Generator(np.random.Philox(0)), lambda g: g.random()),
    "random.Random": (lambda: random.Random(0), lambda g: g.random()),
    "torch.Generator": (torch.Generator, lambda g: torch.rand((), generator=g)),
}
"""Generators that a dataset holds: how one is made, and a draw from it."""

SAMPLES = {
    "draws nothing": _nothing,
    "one random.random()": _random_draw,
    "one np.random.rand()": _global_numpy_draw,
    "one torch.rand": _one_draw,
    "one draw of sample_rng()": _numpy_draw,
}


class Drawn(Dataset[Any]):
    """Samples that do nothing but draw; `name` is one of `SAMPLES`, or of `HELD` with "used" or "unused"."""

    def __init__(self, name: str) -> None:
        held, _, how = name.rpartition(", ")
        self.held: list[tuple[str, Any]] = []
        if held not in HELD:
            self.sample = SAMPLES[name]
            return
        make, draw = HELD[held]
        self.held = [("dataset.generator", make())]
        self.sample = (lambda index: draw(self.held[0][1])) if how == "used" else _nothing

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


class _Place:
    """What a stream is moved over: as a batch, without one."""

    def __init__(self) -> None:
        self.keys = StreamKeys(0, 0)

    def stream_key(self, at: int | None, *, seeded: bool = True) -> int:
        return self.keys.sample(at or 0, at)


NAMES = [*SAMPLES, *(f"{held}, {how}" for held in HELD for how in ("unused", "used"))]


def cases(*, smoke: bool) -> list[Case]:
    return [Case(name, {"name": name, "count": 100 if smoke else 5_000}) for name in NAMES]


def measure(*, name: str, count: int) -> Figures:
    dataset = Drawn(name)
    plain_s = streams_s = 0.0
    for _ in range(3):  # taking turns
        began = perf_counter()
        for index in range(count):
            dataset[index]
        plain_s += perf_counter() - began
        held = Keyed(dataset.held, own_state=False) if dataset.held else None
        stream, place = Stream(modules=routable(MODULES), held=held), _Place()
        with entered(stream):
            stream.source = place
            began = perf_counter()
            for index in range(count):
                stream.at, stream.stale = index, True
                if held is not None:
                    held.begin(place.stream_key(index))
                dataset[index]
            streams_s += perf_counter() - began
    per = 1e6 / (3 * count)
    return {"cost_us": (streams_s - plain_s) * per, "plain_us": plain_s * per}


def rows(results: Results) -> list[Row]:
    aims = {"draws nothing": Aim("<=", 0.2, of="figure")}
    return [row(results, name, "cost_us", unit="us/sample", aim=aims.get(name)) for name in NAMES]
