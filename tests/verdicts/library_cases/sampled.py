"""Datasets beside samplers of torch and of the user. A sampler runs in the loop's thread, so it has no say."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler, WeightedRandomSampler

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT

SEEN: list[int] = []


class Points(Dataset[Any]):
    """Points with labels, of which few are 1."""

    def __init__(self) -> None:
        self.points = torch.arange(2 * COUNT).reshape(COUNT, 2).float()
        self.labels = [int(index % 4 == 0) for index in range(COUNT)]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.points[index] / 10, self.labels[index]


def weighted(folder: Path) -> Made:
    dataset = Points()
    counts = torch.bincount(torch.tensor(dataset.labels))
    weights = [1 / counts[label].item() for label in dataset.labels]
    return Made(dataset, sampler=WeightedRandomSampler(weights, num_samples=COUNT))


class Balanced(Sampler[int]):
    """Draws as many points of one label as of the other, and remembers which."""

    def __init__(self, labels: list[int]) -> None:
        self.labels = labels
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        for k in range(len(self.labels)):
            among = [index for index, label in enumerate(self.labels) if label == k % 2]
            SEEN.append(random.choice(among))
            yield SEEN[-1]


def own_sampler(folder: Path) -> Made:
    dataset = Points()
    return Made(dataset, sampler=Balanced(dataset.labels))
