"""Promise: a seed gives the batches that it gave on Python 3.11, bit for bit, on every Python.

A state of version 3 resumes with them. That of an iterable dataset is refused.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ChainDataset

import fastload
from fastload.errors import StateError

RECORDED = {
    "order": "2334ef060b684401c07a43fbf57ff3fa6934b3c365a4cca53de0c39b42063ed2",
    "draws": "1363f5318cb2e286187453249189b3cab8b239fe21af51a29f7060dc6b4db67c",
    "images": "19a83fa2e057ee661343aa5dc63c0ae81773257e6e188683b16d8f0634eeeeed",
}
"""SHA-256 of the batches of two epochs, from Python 3.11.7 with torch 2.14.1 and NumPy 2.4.6."""


class Order:
    def __len__(self) -> int:
        return 1_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Draws:
    """Samples that draw in all ways."""

    def __init__(self) -> None:
        self.held = np.random.default_rng(1), random.Random(2), np.random.RandomState(3)

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        cards = list(range(20))
        random.shuffle(cards)
        of_numpy, of_python, of_state = self.held
        drawn = [
            *(index, *cards, random.random(), random.gauss(0, 1), random.randrange(10**6)),
            *(np.random.rand(), np.random.randn(), *np.random.permutation(9)),
            *(of_numpy.random(), of_python.random(), of_state.standard_normal()),
            *(fastload.sample_rng().random(), *torch.rand(2).tolist(), *torch.randperm(9).tolist()),
            torch.rand(1, generator=fastload.sample_generator()).item(),
        ]
        return torch.tensor(drawn, dtype=torch.float64)


def images(folder: Path) -> Any:
    """Return PNG files, which every decoder reads alike, with a plan."""
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("torchvision")
    from fastload.datasets import ImageFolder
    from fastload.image import RandomResizedCrop

    (folder / "a").mkdir()
    for k in range(12):
        y, x, c = np.indices((40 + k, 60, 3))
        pixels = ((x * 7 + y * 5 * k + c * 83) % 256).astype(np.uint8)
        image.fromarray(pixels).save(folder / "a" / f"{k:02}.png")
    return ImageFolder(folder, transform=RandomResizedCrop(32))


def digest(batches: Iterable[Any]) -> str:
    """Return the SHA-256 of the bytes of all tensors, in their order."""
    sha = hashlib.sha256()
    for batch in batches:
        for tensor in [batch] if isinstance(batch, torch.Tensor) else batch:
            sha.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            sha.update(tensor.contiguous().numpy().tobytes())
    return sha.hexdigest()


@pytest.mark.parametrize(
    ("workers", "method"), [(0, "thread"), (2, "thread"), (3, "thread"), (2, "process")]
)
@pytest.mark.parametrize("name", RECORDED)
def test_the_batches_are_the_recorded_ones(
    name: str, workers: int, method: str, tmp_path: Path
) -> None:
    dataset = {"order": Order, "draws": Draws, "images": lambda: images(tmp_path)}[name]()
    options: dict[str, Any] = {"worker_method": method, "copy_dataset": "state"}
    loader = fastload.DataLoader(
        dataset, batch_size=7, shuffle=True, seed=5, num_workers=workers, **options
    )
    assert digest(batch for _ in range(2) for batch in loader) == RECORDED[name]


STATE = {
    **{"version": 3, "kind": "map-style", "epoch": 0, "batches": 3, "position": 21, "ended": False},
    **{"seed": 5, "world_size": 1, "global_batch": 7, "drop_last": False, "stream_seed": 5},
    **{"sampler_epoch": None, "samples": 60, "sampler": "RankSampler", "sampler_length": 60},
    **{"generators": 0, "sampler_seed": 5, "shuffle": True, "ends": "pad", "window": None},
    **{"run": None, "set_id": None, "ahead": [], "ahead_on_rank": None, "checksum": None},
    **{"checksum_on_rank": None, "sampler_state": None, "draws": None},
}
"""Commit e13b4bee, of 28 November 2026, saved it after 3 batches."""


def test_a_state_of_version_3_resumes() -> None:
    dataset: Any = Draws()

    def loader() -> Any:
        return fastload.DataLoader(dataset, batch_size=7, shuffle=True, seed=5, num_workers=2)

    whole, resumed = loader(), loader()
    first, second = list(whole), list(whole)
    resumed.load_state_dict(STATE)
    assert digest(resumed) == digest(first[3:])
    assert digest(resumed) == digest(second)


def test_a_state_of_version_3_of_an_iterable_dataset_is_refused() -> None:
    loader = fastload.DataLoader(ChainDataset([]))
    with pytest.raises(StateError, match="^version: the state has 3, this loader 4; use the"):
        loader.load_state_dict({**STATE, "kind": "iterable"})
